"""The SGLang engine: the engine protocol over HTTP, to a server of this process or of another."""

import asyncio
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from mcore_agent.processes import tree_rss
from mcore_agent.protocols import Completion, EngineDown, Request
from mcore_agent.registry import register
from mcore_agent.rollout.errors import EngineStateError
from mcore_agent.rollout.requests import check_request
from mcore_agent.rollout.sglang import gpu, wire
from mcore_agent.rollout.sglang.buckets import Transport, transport_of
from mcore_agent.rollout.sglang.gate import Gate, tags_of
from mcore_agent.rollout.sglang.line import Line, Refused
from mcore_agent.rollout.sglang.names import expected_weights
from mcore_agent.rollout.sglang.options import check_recipe
from mcore_agent.rollout.sglang.server import START_S, Address, Server
from mcore_agent.rollout.sglang.updates import Updates

BOTH = ("weights", "kv_cache")
ALWAYS = frozenset({"abort", "pause", "sleep", "update", "checksum", "top_k", "top_p"})
MODES = ("in_place", "retract", "abort")
ABORT_S = 10.0  # then a request counts as aborted with the tokens that are known here: none
ALIVE_S, END_S = 10.0, 5.0  # for an answer; for the rest of a server to end, once its connections broke


@dataclass(eq=False)
class _Flight:
    """A request between ``generate`` and its answer."""

    request: Request
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)  # the server aborts by prefix: no name may begin another
    held: "asyncio.Future[bool] | None" = None  # waits for ``resume``; False: aborted before it was sent
    task: "asyncio.Task[Any] | None" = None
    ended: bool = False  # aborted from here
    cut: bool = False  # its connection was closed from here

    def let(self, go: bool) -> None:
        """Ends the wait, if it waits."""
        if self.held is not None and not self.held.done():
            self.held.set_result(go)


@register("engine", "sglang")
class SGLangEngine:
    """Serves a Hugging Face config by an SGLang server. It starts asleep and without weights (``version`` -1).

    Without ``address`` the engine starts a server, which ends with it; with one it uses a running server and leaves it
    running. Several engines may use one server: one that updates weights, pauses and sleeps, others that generate. What the
    server serves is kept in the server; while it sleeps or has no complete weights it holds requests back.

    ``server`` are further fields of SGLang's ServerArgs. ``transport`` is how weights travel (``buckets``): auto is ``ipc`` with
    GPUs, else ``shm``. On a CPU sleeping gives no memory back (SGLang's memory saver needs CUDA), ``Request.seed`` decides
    nothing and answers are not reproducible to the bit; with ``server.enable_deterministic_inference`` on a GPU they are.

    Raises EngineDown when the server is gone, EngineStateError for calls out of order, WeightUpdateError for incomplete
    updates, ValueError for bad requests and options.
    """

    own_process, check_options = True, staticmethod(check_recipe)

    def __init__(
        self,
        hf_config: dict[str, Any],
        dtype: Literal["fp32", "bf16"] = "fp32",
        max_batch: int = 64,  # requests that run together
        tp: int = 1,
        gpus: Sequence[int] = (),
        folder: str = "",  # log and model config; empty: a temporary one
        address: Address | None = None,
        server: dict[str, Any] | None = None,
        transport: Literal["auto", "shm", "ipc", "nccl", "disk"] = "auto",
        start_s: float = START_S,  # seconds for a server to start
        memory_saver: bool = True,  # on a GPU: sleeping gives memory back
    ):
        from transformers import AutoConfig

        self.version = -1
        self._hf_config, self._dtype, self._tp, self._gpus = dict(hf_config), dtype, tp, tuple(gpus)
        self._options = dict(server or {})
        config = AutoConfig.for_model(**{k: v for k, v in hf_config.items() if k != "quantization_config"})
        self.vocab_size, self.max_length = int(config.vocab_size), int(config.max_position_embeddings)
        self._tied, self._experts = bool(config.tie_word_embeddings), wire.Experts.of(config)
        self._kind = ("ipc" if self._gpus else "shm") if transport == "auto" else transport
        self._server: Server | None = None
        if address is None:
            self._server = Server(hf_config, dtype, self._options, max_batch, tp, self._gpus, folder, start_s, memory_saver)
        self._address = address
        self._gate: Gate | None = None
        self._updates: Updates | None = None
        self._closed = False
        self._flights: dict[str, _Flight] = {}
        self._dropping: set[asyncio.Task[None]] = set()
        self._freed, self._work = gpu.Freed(self._gpus), wire.Work()

    # ------------------------------------------------------------------------------------------------ the server

    @property
    def address(self) -> Address:
        """Where the server is, for engines of other processes. Waits until it answers; raises EngineDown."""
        if self._address is None:
            assert self._server is not None
            self._address = self._server.address
        return self._address

    def capabilities(self) -> frozenset[str]:
        found = {"prefix_cache": not self._options.get("disable_radix_cache"), "deterministic": self._seeded}
        found["routing"] = bool(self._options.get("enable_return_routed_experts"))
        return ALWAYS | {name for name, there in found.items() if there}

    @property
    def _seeded(self) -> bool:
        return bool(self._options.get("enable_deterministic_inference") or self._options.get("rl_on_policy_target"))

    async def _open(self, what: str) -> Gate:
        """The server's gate, after the server has started and its state is known. Raises EngineStateError when closed."""
        if self._closed:
            raise EngineStateError(f"{what}: the engine is closed; make a new one")
        if self._gate is None:
            address = await asyncio.to_thread(lambda: self.address)
            self._gate = self._gate or Gate(Line(address.url))
        if not self._gate.known:
            self.version = await self._gate.sync()
        if self._closed:
            raise EngineStateError(f"{what}: the engine was closed meanwhile; make a new one")
        return self._gate

    async def sync(self) -> int:
        """Reads from the server which version it serves, for an engine that does not update the weights itself."""
        gate = await self._open("sync")
        self.version = await gate.sync()
        return self.version

    def _weights(self, gate: Gate) -> Updates:
        if self._updates is None:
            selector = "target" if self._options.get("speculative_draft_model_path") else "all"  # a draft model keeps its weights
            folder = Path(self.address.folder)
            transport: Transport = transport_of(self._kind, gate.line, folder, self._tp, self._gpus, selector)
            names = partial(expected_weights, self._hf_config, self._dtype)
            self._updates = Updates(gate, transport, names, folder, self._tp, selector, self._tied)
        return self._updates

    # -------------------------------------------------------------------------------------------------- requests

    @contextmanager
    def client(self) -> Iterator[None]:
        """One episode. The server forms batches as requests come, so there is nothing to wait for."""
        yield

    async def generate(self, request: Request) -> Completion:
        """Raises ValueError for invalid arguments; a request that cannot fit the model's context ends as ``error``."""
        check_request(request, self.vocab_size)
        if request.routing and "routing" not in self.capabilities():
            raise ValueError(
                f"request {request.id!r}: routing is True, but the server does not record experts; "
                "set rollout.options.server.enable_return_routed_experts=true (GPU only)"
            )
        gate = await self._open("generate")
        if request.id in self._flights:
            raise ValueError(f"request {request.id!r}: a request with this id is in flight; give each its own")
        gate.require_serving()
        total = len(request.tokens) + request.max_new
        if total > self.max_length:
            reason = f"prompt of {len(request.tokens)} and max_new {request.max_new} exceed the context of {self.max_length}"
            return wire.failed(reason)
        flight = self._flights[request.id] = _Flight(request)
        try:
            return await self._fly(flight, gate)
        except asyncio.CancelledError:
            if flight.cut:
                return wire.aborted()
            if flight.task is not None and not self._closed:
                dropping = asyncio.create_task(self._drop(flight.rid))
                self._dropping.add(dropping)
                dropping.add_done_callback(self._dropping.discard)
            raise
        finally:
            if self._flights.get(request.id) is flight:
                del self._flights[request.id]

    async def _fly(self, flight: _Flight, gate: Gate) -> Completion:
        while True:
            while gate.paused:
                flight.held = asyncio.get_running_loop().create_future()
                if not await flight.held:
                    return wire.aborted()
            done = await self._ask_again(flight, gate)
            if done.finish != "abort" or flight.ended:
                return done
            flight.rid = uuid.uuid4().hex  # an engine that updates weights shut the server: it holds the next one back

    async def _ask_again(self, flight: _Flight, gate: Gate) -> Completion:
        try:
            return await self._ask(flight, gate)
        except EngineDown as e:
            # A connection can break without the server: asking once more, under another name, is harmless.
            if flight.cut or not await self._alive(gate):
                raise await self._explained(e) from e
            await self._drop(flight.rid)
            flight.rid = uuid.uuid4().hex
            return await self._ask(flight, gate)

    async def _ask(self, flight: _Flight, gate: Gate) -> Completion:
        body = wire.body_of(flight.request, flight.rid, self._seeded)
        flight.task = asyncio.create_task(gate.line.call("/generate", body, limit_s=None))
        try:
            answer = await flight.task
        except Refused as e:
            return wire.failed(str(e))
        return wire.completion_of(flight.request, answer, self._experts)

    async def _alive(self, gate: Gate) -> bool:
        with suppress(EngineDown, Refused):
            await gate.line.call("/model_info", limit_s=ALIVE_S)
            return True
        return False

    async def _explained(self, e: EngineDown) -> EngineDown:
        """With the end of the server's log, if the server is ours and ends."""
        if self._server is not None:
            try:
                await asyncio.to_thread(self._server.check, END_S)
            except EngineDown as found:
                return found
        return e

    async def _drop(self, rid: str) -> None:
        """Ends a request of the server. One that it does not know is none of its business."""
        if self._gate is not None:
            with suppress(EngineDown, Refused):
                await self._gate.line.call("/abort_request", {"rid": rid})

    async def abort(self, ids: Iterable[str] | None = None) -> None:
        """Ends requests of this engine as ``abort``, with the tokens that they have."""
        gate = await self._open("abort")
        names = set(self._flights if ids is None else ids)
        chosen = [flight for name, flight in self._flights.items() if name in names]
        for flight in chosen:
            flight.ended = True
            flight.let(False)
        sent = {f.task: f for f in chosen if f.task is not None and not f.task.done()}
        if sent and gate.paused:
            await gate.close("retract")  # a request that is paused in place would end only after ``resume``
        loop = asyncio.get_running_loop()
        deadline = loop.time() + ABORT_S
        while sent:
            # Again and again: an abort that overtakes its request finds nothing.
            await asyncio.gather(*(self._drop(flight.rid) for flight in sent.values()))
            _, left = await asyncio.wait(sent, timeout=0.1)
            sent = {task: sent[task] for task in left}
            if loop.time() > deadline:
                return self._cut(sent.values())

    def _cut(self, flights: Collection[_Flight]) -> None:
        for flight in flights:
            flight.cut = True
            flight.let(False)
            if flight.task is not None:
                flight.task.cancel()

    async def pause(self, mode: str = "in_place") -> None:
        """Requests wait, new ones too. Raises ValueError for an unknown mode."""
        if mode not in MODES:
            raise ValueError(f"pause mode is {mode!r}; known: {', '.join(MODES)}")
        gate = await self._open("pause")
        if mode == "abort":
            await self.abort()
        before, gate.paused = gate.paused, True
        try:
            await gate.close("retract" if mode == "retract" else "in_place")
        except EngineDown:
            gate.paused = before  # or a request would wait for an engine that is gone
            raise
        if mode == "abort":
            await self.abort()  # those that came in between

    async def resume(self) -> None:
        """Goes on. Raises EngineStateError with requests in flight but without complete weights."""
        gate = await self._open("resume")
        if self._flights and not gate.served.ready:
            raise EngineStateError("resume with requests in flight but without complete weights; finish a weight update first")
        gate.paused = False
        await gate.settle()
        for flight in self._flights.values():
            flight.let(True)

    def _require_idle(self, what: str, gate: Gate) -> None:
        if self._flights and not gate.paused:
            raise EngineStateError(f"{what} while {len(self._flights)} requests are in flight; pause or abort them, or wait for them")

    # ------------------------------------------------------------------------------------------- sleep and close

    async def sleep(self, tags: Iterable[str] = BOTH) -> None:
        """Frees memory; sleeping weights are lost. Raises EngineStateError while requests are in flight, paused ones included."""
        chosen = tags_of(tags)
        gate = await self._open("sleep")
        if self._flights:
            raise EngineStateError(f"sleep while {len(self._flights)} requests are in flight; abort them or wait for them")
        if gate.served.updating:
            raise EngineStateError("sleep inside a weight update; end it first")
        new = chosen - gate.served.asleep
        if new:
            await gate.clear()
            await gate.flush()  # also the proof that the scheduler is idle: a release that meets work kills it
            with self._freed.measured(new):
                await gate.line.do("/release_memory_occupation", {"tags": sorted(new)})
        await gate.become(asleep=gate.served.asleep | chosen, ready=gate.served.ready and "weights" not in chosen)

    async def wake(self, tags: Iterable[str] = BOTH) -> None:
        """Takes memory again. Weights come back empty: a complete update must follow.

        Raises EngineDown when the memory of a GPU does not become free.
        """
        chosen = tags_of(tags)
        gate = await self._open("wake")
        back = chosen & gate.served.asleep
        if back:
            await self._freed.available(back)
            await gate.line.do("/resume_memory_occupation", {"tags": sorted(back)})
        await gate.become(asleep=gate.served.asleep - chosen)

    async def close(self) -> None:
        """Ends every request as ``abort``, and the server if this engine started it. Closing again does nothing."""
        if self._closed:
            return
        self._closed = True
        flights = list(self._flights.values())
        self._cut(flights)
        tasks = [f.task for f in flights if f.task is not None]
        if tasks:
            await asyncio.wait(tasks)
        if self._updates is not None:
            await self._updates.close()
        if self._gate is not None:
            if self._server is None:
                await asyncio.gather(*(self._drop(flight.rid) for flight in flights))
            await self._gate.line.close()
        if self._server is not None:
            await asyncio.to_thread(self._server.close)

    # --------------------------------------------------------------------------------------------------- weights

    async def begin_update(self) -> None:
        """Starts an update; a former one that was not ended is void. Pause first when requests run."""
        gate = await self._open("begin_update")
        self._require_idle("begin_update", gate)
        await self._weights(gate).begin()

    async def update(self, bucket: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies tensors, named as in a Hugging Face checkpoint; the bucket's memory is the caller's again on return.

        Raises WeightUpdateError for a wrong shape or type. After any error inside it the update is void.
        """
        gate = await self._open("update")
        await self._weights(gate).put(bucket)

    async def end_update(self, version: int) -> None:
        """Serves the new weights as ``version``. Raises WeightUpdateError unless each name was given exactly once."""
        gate = await self._open("end_update")
        await self._weights(gate).end(version)
        self.version = version

    async def flush(self) -> None:
        """Forgets all keys and values; paused requests compute theirs again. Raises EngineStateError while requests run."""
        gate = await self._open("flush")
        self._require_idle("flush", gate)
        if gate.paused:
            await gate.close("retract")
        await gate.flush()

    async def checksum(self) -> dict[str, str]:
        """Checksum of every weight as it is served now, by checkpoint name."""
        gate = await self._open("checksum")
        return await self._weights(gate).checksum()

    # ----------------------------------------------------------------------------------------------- observation

    async def progress(self) -> int:
        """Grows with the tokens that the server computes. One that stands still answers the same."""
        gate = await self._open("progress")
        try:
            return self._work.seen((await gate.line.call("/v1/loads?include=core"))["loads"])
        except (LookupError, TypeError, Refused) as e:
            raise EngineDown(f"{gate.line.url} does not say how far it is: {e}") from e
        except EngineDown as e:
            raise await self._explained(e) from e

    async def memory(self) -> dict[str, int]:
        """Bytes: ``rss`` of the server's processes, and ``device`` of their GPU memory where there are GPUs."""
        await self._open("memory")
        pid = self.address.pid
        return await asyncio.to_thread(lambda: {"rss": tree_rss(pid)} | gpu.device_memory(pid, self._gpus))
