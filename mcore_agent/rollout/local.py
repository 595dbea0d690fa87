"""The local engine: a transformers model in this process, behind the same protocol as every other engine.

Batches are formed by requests, never by clock. A *wave* starts when every open client has a request that waits; it
runs ``max_batch`` rows at a time, sorted by ``Request.order`` and ``id``, until all are answered. So a rerun gives the
same bits at whatever speed environments answer, if clients open together: open an episode's client before the first
``await`` of its task, and let the tasks of a batch start together. A client that opens later joins the next wave.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from mcore_agent.protocols import Completion, Request
from mcore_agent.registry import register
from mcore_agent.rollout.attention import install
from mcore_agent.rollout.decode import Chunk, Client, Decoder, Row
from mcore_agent.rollout.errors import EngineStateError, WeightUpdateError
from mcore_agent.rollout.requests import check_request
from mcore_agent.rollout.served import ServedWeights

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
TAGS = frozenset({"weights", "kv_cache", "cuda_graph"})  # no graphs here: the tag is accepted and frees nothing
CAPABILITIES = frozenset({"abort", "pause", "sleep", "update", "checksum", "prefix_cache", "deterministic", "top_k", "top_p"})


def build_model(hf_config: dict[str, Any], dtype: torch.dtype, device: torch.device) -> "PreTrainedModel":
    """A causal model of a Hugging Face config, its weights not initialized. Raises ValueError for sliding windows."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    config = AutoConfig.for_model(**hf_config)
    fields = config.to_dict()
    windows = set(fields.get("layer_types") or ["full_attention"]) - {"full_attention"}
    if windows or fields.get("sliding_window") is not None:
        raise ValueError(
            f"hf_config asks for {sorted(windows) or 'a sliding window'}, but the local engine has full attention only; "
            "use another engine or set use_sliding_window to false"
        )
    # Grouped matrix products on a CPU want sizes in multiples of 16 bytes and gain nothing at small batches.
    experts = {"experts_implementation": "eager"} if device.type == "cpu" else {}
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, attn_implementation=install(), dtype=dtype, **experts)
    model.tie_weights()
    return model.eval().requires_grad_(False).to(device)


@dataclass(eq=False)
class _Waiter:
    row: Row
    future: asyncio.Future[Completion]

    @property
    def key(self) -> tuple[tuple[int, ...], str]:
        return self.row.request.order, self.row.request.id


@register("engine", "local")
class LocalEngine:
    """Serves a Hugging Face config on one device; it starts asleep and without weights (``version`` -1).

    ``wake()``, then a complete update, then ``generate``. Calls belong to one event loop at a time; the engine itself
    may be used from a new loop once the old one has no requests in flight. Requests made on behalf of an episode belong
    inside its ``client()`` (tasks started there inherit it): one made outside would wait for that client forever.
    Raises EngineStateError for calls out of order, WeightUpdateError for incomplete updates, ValueError for bad requests.
    """

    def __init__(
        self,
        hf_config: dict[str, Any],
        dtype: Literal["fp32", "bf16"] = "fp32",
        max_batch: int = 64,  # rows of one forward pass
        device: str = "cpu",
        prefill_tokens: int = 8192,  # padded tokens of one prefill pass
        prefix_cache_gb: float = 1.0,  # keys and values that a wave may leave for the next turns
    ):
        if max_batch < 1 or prefill_tokens < 1 or prefix_cache_gb < 0:
            raise ValueError(f"max_batch {max_batch} and prefill_tokens {prefill_tokens} must be at least 1, prefix_cache_gb 0")
        model = build_model(hf_config, DTYPES[dtype], torch.device(device))
        config = model.config
        self.version = -1
        self.max_batch = max_batch
        self.vocab_size, self.max_length = int(config.vocab_size), int(config.max_position_embeddings)
        self._weights = ServedWeights(model, bool(config.tie_word_embeddings))
        self._weights.free()
        self._decoder = Decoder(model, config.num_hidden_layers, torch.device(device), prefill_tokens, int(prefix_cache_gb * 2**30))
        self._asleep = {"weights", "kv_cache"}
        self._paused = self._closed = False
        self._clients: set[Client] = set()
        self._current: ContextVar[Client | None] = ContextVar("client", default=None)
        self._waiters: dict[str, _Waiter] = {}  # every request in flight
        self._pending: list[_Waiter] = []  # those whose wave has not formed
        self._wave: deque[Chunk] = deque()
        self._driver: asyncio.Task[None] | None = None
        self._interrupt = threading.Event()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="local-engine")

    def capabilities(self) -> frozenset[str]:
        return CAPABILITIES

    # ---------------------------------------------------------------------------------------------- requests

    @contextmanager
    def client(self) -> Iterator[None]:
        """One episode. A wave waits for every open client; one that has open clients inside it is not waited for."""
        outer = self._current.get()
        client = Client()
        self._clients.add(client)
        if outer is not None:
            outer.inner += 1
        self._current.set(client)
        try:
            yield
        finally:
            self._current.set(outer)
            if outer is not None:
                outer.inner -= 1
            client.open, client.past = False, None
            self._clients.discard(client)
            self._schedule_check()

    async def generate(self, request: Request) -> Completion:
        """Raises ValueError for invalid arguments; a request that cannot fit the model's context ends as ``error``."""
        check_request(request, self.vocab_size)
        if request.id in self._waiters:
            raise ValueError(f"request {request.id!r}: a request with this id is in flight; give each its own")
        self._require_serving()
        total = len(request.tokens) + request.max_new
        if total > self.max_length:
            reason = f"prompt of {len(request.tokens)} and max_new {request.max_new} exceed the context of {self.max_length}"
            return Row(request, None).completion("error", reason)
        client = self._current.get()
        if client is not None and not client.open:
            client = None
        waiter = _Waiter(Row(request, client), asyncio.get_running_loop().create_future())
        self._waiters[request.id] = waiter
        self._pending.append(waiter)
        if client is not None:
            client.waiting += 1
        self._schedule_check()
        try:
            return await waiter.future
        finally:
            if waiter.future.cancelled():  # the caller is gone: its id is free at once, its row leaves at the next step
                self._abort_one(waiter)
                if self._waiters.get(request.id) is waiter:
                    del self._waiters[request.id]

    def _require_serving(self) -> None:
        if self._closed:
            raise EngineStateError("the engine is closed; make a new one")
        if self._asleep:
            raise EngineStateError(f"generate while {sorted(self._asleep)} sleep; wake them first")
        if not self._weights.ready and not self._paused:
            raise EngineStateError("generate without complete weights; finish a weight update first")

    # ----------------------------------------------------------------------------------------------- batches

    def _schedule_check(self) -> None:
        # One turn of the loop later, so that all tasks that are ready now can open clients and send requests.
        if self._waiters:
            next(iter(self._waiters.values())).future.get_loop().call_soon(self._check)

    def _check(self) -> None:
        if self._driver is not None or self._paused or self._closed or not self._weights.ready:
            return
        if not self._wave:
            if not self._pending or any(c.waiting == 0 and c.inner == 0 for c in self._clients):
                return
            self._form_wave()
        self._driver = asyncio.get_running_loop().create_task(self._drive())
        self._driver.add_done_callback(self._driven)

    def _form_wave(self) -> None:
        waiting, self._pending = sorted(self._pending, key=lambda w: w.key), []
        for waiter in waiting:
            if waiter.row.client is not None:
                waiter.row.client.waiting -= 1
        rows = [waiter.row for waiter in waiting]
        self._wave.extend(Chunk(rows[i : i + self.max_batch]) for i in range(0, len(rows), self.max_batch))
        self._decoder.start_wave()

    async def _drive(self) -> None:
        """Runs the wave until it is answered or paused."""
        while self._wave and not self._paused:
            self._interrupt.clear()
            self._drop_aborted()
            if self._wave:
                await self._run(self._wave[0])
                if not self._wave[0].rows:
                    self._wave.popleft()

    def _driven(self, driver: asyncio.Task[None]) -> None:
        self._driver = None
        if driver.cancelled():
            self._fail_wave(None)
        elif (failure := driver.exception()) is not None:
            self._fail_wave(failure)
        self._schedule_check()

    async def _run(self, chunk: Chunk) -> None:
        loop = asyncio.get_running_loop()

        def finish(row: Row, completion: Completion) -> None:
            loop.call_soon_threadsafe(self._answer, row, completion)

        work = loop.run_in_executor(self._pool, self._decoder.run, chunk, self.version, self._interrupt.is_set, finish)
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            self._interrupt.set()
            await asyncio.wait({work})
            raise
        except (RuntimeError, MemoryError) as e:  # torch: out of memory and failed kernels
            for row in chunk.rows:
                self._answer(row, row.completion("error", f"{type(e).__name__}: {e}"))
            chunk.rows.clear()

    def _fail_wave(self, failure: BaseException | None) -> None:
        """Answers every request of the wave: with the exception, or as aborted when the driver was cancelled (None)."""
        for row in [row for chunk in self._wave for row in chunk.rows]:
            self._answer(row, failure or row.completion("abort"))
        self._wave.clear()

    def _answer(self, row: Row, result: Completion | BaseException) -> None:
        waiter = self._waiters.get(row.request.id)
        if waiter is None or waiter.row is not row:
            return
        del self._waiters[row.request.id]
        if waiter.future.done():
            return
        if isinstance(result, Completion):
            waiter.future.set_result(result)
        else:
            waiter.future.set_exception(result)

    # ------------------------------------------------------------------------------------- abort, pause, sleep

    async def abort(self, ids: Iterable[str] | None = None) -> None:
        """Requests end as ``abort`` with the tokens they have; ids that are not in flight are ignored."""
        chosen = list(self._waiters) if ids is None else list(ids)
        waiters = [self._waiters[i] for i in chosen if i in self._waiters]
        for waiter in waiters:
            self._abort_one(waiter)
        if waiters:
            await asyncio.wait([waiter.future for waiter in waiters])

    def _abort_one(self, waiter: _Waiter) -> None:
        waiter.row.aborted = True
        if waiter in self._pending:
            self._pending.remove(waiter)
            if waiter.row.client is not None:
                waiter.row.client.waiting -= 1
            self._answer(waiter.row, waiter.row.completion("abort"))
        elif self._driver is None:
            self._drop_aborted()
        else:
            self._interrupt.set()
        self._schedule_check()

    def _drop_aborted(self) -> None:
        for chunk in self._wave:
            gone = [i for i, row in enumerate(chunk.rows) if row.aborted]
            for i in gone:
                self._answer(chunk.rows[i], chunk.rows[i].completion("abort"))
            chunk.remove(gone)
        self._wave = deque(chunk for chunk in self._wave if chunk.rows)

    async def pause(self) -> None:
        """Stops between two decode steps and keeps all requests. New ones wait."""
        self._require_open("pause")
        self._paused = True
        if self._driver is not None:
            self._interrupt.set()
            await asyncio.wait({self._driver})

    async def resume(self) -> None:
        self._require_open("resume")
        if self._waiters and not self._weights.ready:
            raise EngineStateError("resume with requests in flight but without complete weights; finish a weight update first")
        self._paused = False
        self._schedule_check()

    def _require_open(self, what: str) -> None:
        if self._closed:
            raise EngineStateError(f"{what}: the engine is closed; make a new one")

    async def _require_idle(self, what: str) -> None:
        self._require_open(what)
        while self._driver is not None:
            if len(self._waiters) > len(self._pending):
                raise EngineStateError(f"{what} while {len(self._waiters)} requests are in flight; pause first, or wait for them")
            await asyncio.wait({self._driver})  # all of its wave is answered; it ends by itself

    def _tags(self, tags: Iterable[str]) -> set[str]:
        chosen = {tags} if isinstance(tags, str) else set(tags)
        if chosen - TAGS:
            raise ValueError(f"no tag {sorted(chosen - TAGS)}; known: {', '.join(sorted(TAGS))}")
        return chosen - {"cuda_graph"}

    async def sleep(self, tags: Iterable[str] = ("weights", "kv_cache")) -> None:
        """Frees memory by tag. Raises EngineStateError while requests are in flight, paused ones included."""
        chosen = self._tags(tags)
        await self._require_idle("sleep")
        if self._waiters:
            raise EngineStateError(f"sleep while {len(self._waiters)} requests are in flight; abort them or wait for them")
        if self._weights.updating:
            raise EngineStateError("sleep inside a weight update; end it first")
        self._drop_caches()
        if "weights" in chosen:
            self._weights.free()
        self._asleep |= chosen

    async def wake(self, tags: Iterable[str] = ("weights", "kv_cache")) -> None:
        """Takes memory again. Weights come back empty: a complete update must follow."""
        chosen = self._tags(tags)
        self._require_open("wake")
        if "weights" in chosen and not self._weights.resident:
            self._weights.allocate()
        self._asleep -= chosen

    async def close(self) -> None:
        """Ends every request as ``abort`` and frees all memory. Calls after it raise EngineStateError; closing again does nothing."""
        if self._closed:
            return
        self._closed = True
        await self.abort()
        if self._driver is not None:
            await asyncio.wait({self._driver})
        self._drop_caches()
        self._weights.free()
        self._pool.shutdown()

    # ----------------------------------------------------------------------------------------------- weights

    async def begin_update(self) -> None:
        """Starts an update; a former one that was not ended is void. Pause first when requests run."""
        await self._require_idle("begin_update")
        if not self._weights.resident:
            raise EngineStateError("begin_update while the weights sleep; wake them first")
        self._drop_caches()
        self._weights.begin()

    async def update(self, bucket: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copies tensors, named as in a Hugging Face checkpoint; the bucket's memory is the caller's again on return.

        Raises WeightUpdateError for a wrong shape or type. After any error inside it the update is void.
        """
        self._require_update("update")
        self._weights.put(bucket)

    async def end_update(self, version: int) -> None:
        """Serves the new weights as ``version``. Raises WeightUpdateError unless each name was given exactly once."""
        self._require_update("end_update")
        if version < max(self.version, 0):
            raise WeightUpdateError(f"version is {version}, but {self.version} was served; versions start at 0 and do not go back")
        self._weights.finish()
        self._drop_caches()
        self.version = version
        self._schedule_check()

    def _require_update(self, what: str) -> None:
        self._require_open(what)
        if not self._weights.updating:
            raise EngineStateError(f"{what} outside begin_update … end_update; begin an update first")

    def _drop_caches(self) -> None:
        for client in self._clients:
            client.past = None
        for chunk in self._wave:
            chunk.drop_cache()

    async def flush(self) -> None:
        """Forgets all keys and values; paused requests compute theirs again. Raises EngineStateError while requests run."""
        await self._require_idle("flush")
        self._drop_caches()

    async def checksum(self) -> dict[str, str]:
        """Checksum of every weight as it is served now, by checkpoint name."""
        self._require_open("checksum")
        if not self._weights.resident:
            raise EngineStateError("checksum while the weights sleep; wake them first")
        return await asyncio.to_thread(self._weights.checksums)
