"""SGLang as an engine: a server process (``server``) behind the engine protocol (``engine``).

``server`` starts, watches and ends the process, with ``options`` for its arguments and ``keeper`` and ``serve`` as what runs;
``line`` speaks HTTP; ``names`` knows which weights the model has; ``buckets`` carries them; ``inside`` runs in the server.
"""

from mcore_agent.rollout.sglang.engine import SGLangEngine
from mcore_agent.rollout.sglang.server import Address, Server

__all__ = ["Address", "SGLangEngine", "Server"]
