"""One SGLang server process: started, watched, and ended with everything that it started."""

import atexit
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mcore_agent.processes import tree_rss
from mcore_agent.protocols import EngineDown
from mcore_agent.rollout.sglang.options import check_release, server_arguments, serves
from mcore_agent.rollout.sglang.wire import Served

START_S = 600.0
ATTEMPTS = 3  # starts that lost a port to another process
LOG_LINES = 30
HERE = Path(__file__).parent
PORT_TAKEN = ("address already in use", "EADDRINUSE", "is not available in")
LOOK_S = 0.1
PROBE_S = 10.0


class ServerDown(EngineDown):
    """The server did not start, or has ended; the message shows the end of its log."""


@dataclass(frozen=True)
class Address:
    """Where a server is: enough for another process of the node to use it."""

    url: str
    pid: int  # of its keeper: the root of all its processes
    folder: str  # its log, its model's config, and where weights and checksums pass


def write_model(hf_config: Mapping[str, Any], folder: Path) -> int:
    """Writes ``config.json`` without end tokens: a request says itself where it stops. Returns the context in tokens.

    Raises ValueError for a model that transformers or SGLang does not know.
    """
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = hf_config.get("model_type", "")
    architecture = (hf_config.get("architectures") or [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, "")])[0]
    if not architecture or not serves(architecture):
        raise ValueError(
            f"hf_config has model_type {kind!r} ({architecture or 'no causal language model'}), which SGLang cannot serve; "
            "use rollout.engine=local or a model that SGLang lists"
        )
    fields = AutoConfig.for_model(**hf_config).to_dict() | {"architectures": [architecture]}
    fields |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields, indent=1, default=str))
    return int(fields["max_position_embeddings"])


def park(url: str, limit_s: float = START_S) -> None:
    """Puts a server into the state of a new one: asleep, without weights, holding requests back; those that it has are aborted.

    Raises OSError.
    """
    tags = ["kv_cache", "weights"]
    parked = Served(ready=False, asleep=frozenset(tags)).text()
    # What is paused in place cannot be aborted before it is retracted, and a paused scheduler takes a whole core.
    for mode in ("retract", "abort"):
        _post(f"{url}/pause_generation", {"mode": mode}, limit_s)
    _post(f"{url}/continue_generation", {"torch_empty_cache": False}, limit_s)
    _post(f"{url}/pause_generation", {"mode": "abort"}, limit_s)
    deadline = time.monotonic() + limit_s
    while True:  # a scheduler that is in the middle of a step does not flush, and dies of releasing memory
        try:
            _post(f"{url}/flush_cache", {}, limit_s)
            break
        except urllib.error.HTTPError:
            if time.monotonic() > deadline:
                raise
            time.sleep(LOOK_S)
    _post(f"{url}/release_memory_occupation", {"tags": tags}, limit_s)
    _post(f"{url}/update_weight_version", {"new_version": parked, "abort_all_requests": False}, limit_s)


def _post(url: str, body: Mapping[str, Any], limit_s: float) -> None:
    asked = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=limit_s):
        pass


class Server:
    """A server for one Hugging Face config, with the tensors that publishing brings. The constructor does not wait.

    It ends, with all its processes, when ``close`` is called, when this process ends in whatever way, or when it is
    killed itself. Raises ReleaseError, ServerOptionError and ValueError at once; ``ready`` raises ServerDown.
    """

    def __init__(
        self,
        hf_config: Mapping[str, Any],
        dtype: str = "fp32",
        options: Mapping[str, Any] | None = None,
        max_batch: int = 64,
        tp: int = 1,
        gpus: Sequence[int] = (),
        folder: str = "",
        start_s: float = START_S,
        memory_saver: bool = True,
    ):
        check_release()
        self._own_folder = None if folder else tempfile.TemporaryDirectory(prefix="sglang-", ignore_cleanup_errors=True)
        self.folder = Path(folder or self._own_folder.name).absolute()  # type: ignore[union-attr]
        given = dict(options or {})
        port = int(given.pop("port", 0))  # 0: the server binds a free one itself
        context = write_model(hf_config, self.folder / "model")
        self._arguments = server_arguments(
            given,
            model=self.folder / "model",
            context=context,
            dtype=dtype,
            max_batch=max_batch,
            tp=tp,
            gpus=gpus,
            port=port,
            memory_saver=memory_saver,
        )
        self._environment = _environment(self.folder, bool(gpus))
        self._start_s, self._attempt, self._address, self._lock = start_s, 1, "", threading.Lock()
        self._process = self._start()
        atexit.register(self.close)

    def _start(self) -> "subprocess.Popen[str]":
        path = self.folder / "arguments.json"
        path.write_text(json.dumps(self._arguments, indent=1))
        (self.folder / "port").unlink(missing_ok=True)
        self._deadline = time.monotonic() + self._start_s
        command = [sys.executable, "-I", str(HERE / "keeper.py"), str(os.getpid())]
        command += [sys.executable, "-P", str(HERE / "serve.py"), str(path)]
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                command, env=self._environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, text=True
            )

    @property
    def log(self) -> Path:
        return self.folder / "server.log"

    @property
    def pid(self) -> int:
        """Of the keeper, the root of all processes of the server."""
        return self._process.pid

    @property
    def address(self) -> Address:
        """Waits until the server answers. Raises ServerDown."""
        return Address(self.ready(), self.pid, str(self.folder))

    def ready(self) -> str:
        """Waits until the server answers; returns its URL. Raises ServerDown with the end of its log."""
        with self._lock:  # the server is put to sleep once
            while not self._address:
                self.check()
                url = self._look()
                if url:
                    try:
                        park(url, self._start_s)
                    except OSError as e:
                        raise ServerDown(f"a new server could not be put to sleep: {e}. {self.tail()}") from e
                    self._address = url
                elif time.monotonic() > self._deadline:
                    self.close()
                    raise ServerDown(
                        f"the server did not answer within {self._start_s:.0f} s; raise rollout.options.start_s if it is only slow. "
                        f"{self.tail()}"
                    )
                else:
                    time.sleep(LOOK_S)
            return self._address

    def check(self, wait_s: float = 0.0) -> None:
        """Raises ServerDown when the process has ended, or ends within ``wait_s``; one that lost a port at its start is started again."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait_s)
        status = self._process.poll()
        if status is None:
            return
        said = self.tail()
        taken = any(mark.lower() in said.lower() for mark in PORT_TAKEN)
        fixed = self._arguments["port"]
        if not self._address and taken and not fixed and self._attempt < ATTEMPTS:
            self._attempt += 1
            self._process = self._start()
            return
        reason = ""
        if taken and fixed:
            reason = f"port {fixed} (rollout.options.server.port) is in use: leave it out, and the server takes a free one. "
        when = "ended" if self._address else "ended before it answered"
        raise ServerDown(f"the server {when} with status {status}. {reason}{said}")

    def _look(self) -> str:
        """The URL of a server that answers, or nothing."""
        try:
            url = f"http://127.0.0.1:{int((self.folder / 'port').read_text())}"
            with urllib.request.urlopen(f"{url}/model_info", timeout=PROBE_S) as answer:
                return url if "weight_version" in json.load(answer) else ""
        except (OSError, ValueError):
            return ""  # not listening yet

    def tail(self) -> str:
        """The last lines of the log."""
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return f"The end of {self.log}:\n" + "\n".join(line[:500] for line in lines[-LOG_LINES:])

    def kill(self) -> None:
        """SIGKILL to the server's main process, as an accident would."""
        assert self._process.stdout is not None
        os.kill(int(self._process.stdout.readline()), signal.SIGKILL)

    def rss(self) -> int:
        """Bytes of memory of all processes of the server."""
        return tree_rss(self.pid)

    def close(self) -> None:
        """Ends the server and all that it started; its log stays if a folder was given. Closing again does nothing."""
        atexit.unregister(self.close)
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(30)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        if self._own_folder is not None:
            self._own_folder.cleanup()


def _environment(folder: Path, cuda: bool) -> dict[str, str]:
    """What the server's processes see. Log-probabilities must be those after temperature, whatever the user's shell says."""
    out = {k: v for k, v in os.environ.items() if k != "SGLANG_RETURN_ORIGINAL_LOGPROB"}
    root = str(HERE.parents[2])
    paths = [root] if cuda else [str(HERE.parent / "sglang_cpu"), root]
    out |= {
        "PYTHONPATH": os.pathsep.join([*paths, *filter(None, [out.get("PYTHONPATH")])]),
        "MCORE_AGENT_SERVER_FOLDER": str(folder),
        "HF_HUB_OFFLINE": "1",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # by the tokens that it keeps for itself
        "SGLANG_FORCE_STREAM_INTERVAL": "8",  # tokens after which the front knows what an aborted request had
        "SGLANG_TIMEOUT_KEEP_ALIVE": "600",  # longer than a client keeps an idle connection: else it may write to a closed one
    }
    if not cuda:
        out |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": out.get("OMP_NUM_THREADS", "1"), "CUDA_VISIBLE_DEVICES": ""}
    return out
