"""Functions that may hang, crash or take all memory: they run in child processes (see ``reward.children``), never here."""
