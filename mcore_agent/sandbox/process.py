"""Commands as plain processes: limits, but no walls (M37). For code that you trust."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from mcore_agent.protocols import ExecLimits, Ran
from mcore_agent.sandbox.folder import LIMITS, NO_ENV, PATH, Folder


@dataclass
class ProcessSandbox(Folder):
    """Holds a command to its limits and leaves nothing of it behind. It isolates nothing.

    A command has the network, and reads and writes whatever its user may: where root made the sandbox that is a user without
    possessions, and otherwise everything of yours. Use bubblewrap for code that a model wrote.
    """

    isolates: ClassVar[frozenset[str]] = frozenset()

    def exec(self, command: Sequence[str], limits: ExecLimits = LIMITS, stdin: bytes = b"", env: Mapping[str, str] = NO_ENV) -> Ran:
        """Runs a command to its end; of the environment it sees only ``env`` and where it lives."""
        own = {"PATH": PATH, "HOME": f"{self.home}/work", "TMPDIR": f"{self.home}/tmp", "LANG": "C.UTF-8"}
        return self.keep(command, f"{self.home}/work", limits, stdin, {**own, **env})
