"""What an engine refuses. Every engine raises these two, so that callers need not know which engine it is."""


class EngineStateError(RuntimeError):
    """The call is not legal in the engine's present state. The message says which state, and what to call first."""


class WeightUpdateError(ValueError):
    """A weight update did not give every parameter exactly once with its shape and type. The names are listed."""
