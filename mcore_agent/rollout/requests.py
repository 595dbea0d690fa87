"""What makes a request invalid, the same for every engine."""

import numpy as np

from mcore_agent.protocols import Request


def check_request(r: Request, vocab_size: int) -> None:
    """Raises ValueError, naming request, field and value, for what no engine can serve."""

    def refuse(key: str, value: object, reason: str) -> None:
        raise ValueError(f"request {r.id!r}: {key} is {value!r}, but {reason}")

    tokens = np.asarray(r.tokens)
    if tokens.ndim != 1 or len(tokens) == 0 or tokens.dtype.kind not in "iu":
        refuse("tokens", r.tokens, "must be a list of token ids that is not empty")
    for key, ids in (("tokens", tokens), ("stop", np.asarray(r.stop, dtype=np.int64))):
        outside = ids[(ids < 0) | (ids >= vocab_size)]
        if len(outside):
            refuse(key, int(outside[0]), f"the model's vocabulary has {vocab_size} tokens")
    if r.max_new < 1:
        refuse("max_new", r.max_new, "must be at least 1")
    if not (np.isfinite(r.temperature) and r.temperature >= 0):
        refuse("temperature", r.temperature, "must be finite and at least 0 (0 is greedy)")
    if not 0 < r.top_p <= 1:
        refuse("top_p", r.top_p, "must be above 0 and at most 1 (1 is off)")
    if r.top_k < 0:
        refuse("top_k", r.top_k, "must be at least 0 (0 is off)")
