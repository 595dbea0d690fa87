"""Real SGLang servers for tests: a start costs 11 s on a quiet machine, so those that want the same share one."""

from pathlib import Path
from typing import Any

from mcore_agent.rollout.sglang import Address, Server
from mcore_agent.rollout.sglang.server import park
from tests.required import need
from tests.rollout.tiny import CONFIGS

START_S = 900.0
SHARED: dict[tuple[str, str], Any] = {}  # what has an ``address``; they end with this process


def start(family: str, dtype: str = "fp32", **fields: Any) -> Server:
    """A server of its own. Skips, or fails, where SGLang is not installed."""
    need("sglang")
    config = fields.pop("hf_config", CONFIGS[family])
    return Server(config, dtype, start_s=START_S, **fields)


def shared(family: str, dtype: str = "fp32") -> Address:
    """A server that tests share, in the state of a new one: asleep, without weights."""
    need("sglang")
    key = family, dtype
    if key not in SHARED:
        SHARED[key] = start(family, dtype)
    address = SHARED[key].address
    park(address.url)
    assert Path(address.folder).is_dir()
    return address


def close() -> None:
    """Ends all that are shared."""
    while SHARED:
        SHARED.popitem()[1].close()
