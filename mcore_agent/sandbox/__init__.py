"""Places to run commands in, behind ``protocols.Sandbox``."""

from collections.abc import Callable
from typing import Literal

from mcore_agent.protocols import Sandbox
from mcore_agent.sandbox.bubblewrap import Bubblewrap
from mcore_agent.sandbox.process import ProcessSandbox

Backend = Literal["bubblewrap", "process"]
BACKENDS: dict[str, Callable[[], Sandbox]] = {"bubblewrap": Bubblewrap, "process": ProcessSandbox}
