"""The local engine: a transformers model in this process, behind the same protocol as every other engine.

Batches are formed by requests, never by clock. A *wave* starts when every open client has a request that waits or is
``away``; it runs ``max_batch`` rows at a time, sorted by ``Request.order`` and ``id``, until all are answered. So a rerun
gives the same bits at whatever speed environments answer, if nobody is ever away and clients open together: open an
episode's client before the first ``await`` of its task, and let the tasks of a batch start together. A client that opens
later joins the next wave.
"""

import asyncio
import math
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal

import torch

from mcore_agent.protocols import Completion, Request
from mcore_agent.registry import register
from mcore_agent.rollout.decode import Chunk, Client, Decoder, Drafting, Row
from mcore_agent.rollout.drafting import SuffixIndex
from mcore_agent.rollout.errors import EngineStateError, WeightUpdateError
from mcore_agent.rollout.requests import check_request
from mcore_agent.rollout.served import DTYPES, ServedWeights, build_model
from mcore_agent.rollout.waves import Waiter, Waves

PAUSES = ("in_place", "retract", "abort")
TAGS = frozenset({"weights", "kv_cache", "cuda_graph"})  # no graphs here: the tag is accepted and frees nothing
CAPABILITIES = frozenset({"abort", "pause", "sleep", "update", "checksum", "prefix_cache", "deterministic", "top_k", "top_p", "waves"})


def check_recipe(options: Mapping[str, Any], cuda: bool) -> None:
    """The options of the engine in a recipe. Raises ValueError, naming option, value, reason and way out."""
    try:
        kind = torch.device(options.get("device", "cpu")).type
    except RuntimeError:
        kind = ""
    if kind not in ("cpu", "cuda") or (kind == "cuda" and not cuda):
        there = "cpu or cuda" if cuda else "cpu, this machine has no CUDA GPU"
        raise ValueError(f"device is {options['device']!r}; known: {there}")
    for name in ("prefill_tokens", "draft_below", "draft_max", "draft_budget"):
        if options.get(name, 1) < 1:
            raise ValueError(f"{name} is {options[name]}; give at least 1")
    if not 0 <= options.get("prefix_cache_gb", 0) < math.inf:
        raise ValueError(f"prefix_cache_gb is {options['prefix_cache_gb']}; give at least 0, and finite")


@register("engine", "local")
class LocalEngine:
    """Serves a Hugging Face config on one device; it starts asleep and without weights (``version`` -1).

    ``wake()``, then a complete update, then ``generate``. Calls belong to one event loop at a time; the engine itself
    may be used from a new loop once the old one has no requests in flight. Requests made on behalf of an episode belong
    inside its ``client()`` (tasks started there inherit it): one made outside would wait for that client forever.
    Raises EngineStateError for calls out of order, WeightUpdateError for incomplete updates, ValueError for bad requests.
    """

    own_process = False  # it lives in the process that makes it
    check_options = staticmethod(check_recipe)

    def __init__(
        self,
        hf_config: dict[str, Any],
        dtype: Literal["fp32", "bf16"] = "fp32",
        max_batch: int = 64,  # rows of one forward pass
        device: str = "cpu",
        prefill_tokens: int = 8192,  # padded tokens of one prefill pass
        prefix_cache_gb: float = 1.0,  # keys and values that a wave may leave for the next turns
        drafting: bool = False,  # guess tokens from earlier episodes and check the guesses in one pass
        draft_below: int = 4,  # at most so many rows in the batch, or no drafts
        draft_max: int = 8,  # tokens of one draft
        draft_budget: int = 200_000,  # tokens that the index of earlier episodes holds
    ):
        if max_batch < 1 or prefill_tokens < 1 or prefix_cache_gb < 0:
            raise ValueError(f"max_batch {max_batch} and prefill_tokens {prefill_tokens} must be at least 1, prefix_cache_gb 0")
        if draft_below < 1 or draft_max < 1:
            raise ValueError(f"draft_below {draft_below} and draft_max {draft_max} must be at least 1; drafting: false goes without")
        drafts = Drafting(SuffixIndex(draft_budget), draft_below, draft_max) if drafting else None
        model = build_model(hf_config, DTYPES[dtype], torch.device(device))
        config = model.config
        self.version = -1
        self.vocab_size, self.max_length = int(config.vocab_size), int(config.max_position_embeddings)
        self._weights = ServedWeights(model, bool(config.tie_word_embeddings))
        self._weights.free()
        keep = int(prefix_cache_gb * 2**30)
        self._decoder = Decoder(model, config.num_hidden_layers, torch.device(device), prefill_tokens, keep, drafts)
        self._asleep = {"weights", "kv_cache"}
        self._paused = self._closed = False
        self._waves = Waves(max_batch)
        self._driver: asyncio.Task[None] | None = None
        self._interrupt = threading.Event()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="local-engine")

    def capabilities(self) -> frozenset[str]:
        return CAPABILITIES | ({"routing"} if self._decoder.mixtures else set()) | ({"drafting"} if self._decoder.drafting else set())

    @property
    def drafting_on(self) -> bool:
        """Whether small batches are drafted for; may be set at any time. The index learns in either case."""
        return self._decoder.drafting is not None and self._decoder.drafting.on

    @drafting_on.setter
    def drafting_on(self, on: bool) -> None:
        if self._decoder.drafting is not None:
            self._decoder.drafting.on = on
        elif on:
            raise EngineStateError("drafting_on = True, but the engine was made without drafts; make it with drafting: true")

    def draft_stats(self) -> dict[str, int]:
        """Since the start: tokens generated, the steps of single rows that gave them, tokens drafted, and those accepted."""
        decoder, drafting = self._decoder, self._decoder.drafting
        proposed, accepted = (drafting.proposed, drafting.accepted) if drafting is not None else (0, 0)
        return {"tokens": decoder.tokens, "steps": decoder.steps, "proposed": proposed, "accepted": accepted}

    # ---------------------------------------------------------------------------------------------- requests

    @contextmanager
    def client(self) -> Iterator[None]:
        """One episode. A wave waits for every open client; one that has open clients inside it is not waited for."""
        try:
            with self._waves.client():
                yield
        finally:
            self._schedule_check()

    @contextmanager
    def away(self) -> Iterator[None]:
        """While the current client's environment works: waves form without it, and its keys and values stay.

        Waves then depend on the clock, so a rerun need not give the same bits. Outside any client it does nothing.
        """
        client = self._waves.current() or Client()
        client.away += 1
        self._schedule_check()
        try:
            yield
        finally:
            client.away -= 1

    async def generate(self, request: Request) -> Completion:
        """Raises ValueError for invalid arguments; a request that cannot fit the model's context ends as ``error``."""
        check_request(request, self.vocab_size)
        if request.id in self._waves.waiters:
            raise ValueError(f"request {request.id!r}: a request with this id is in flight; give each its own")
        if request.routing and not self._decoder.mixtures:
            raise ValueError(f"request {request.id!r}: routing is True, but the model routes nothing (no capability 'routing')")
        self._require_serving()
        total = len(request.tokens) + request.max_new
        if total > self.max_length:
            reason = f"prompt of {len(request.tokens)} and max_new {request.max_new} exceed the context of {self.max_length}"
            return Row(request, None).completion("error", reason)
        waiter = Waiter(Row(request, self._waves.current()), asyncio.get_running_loop().create_future())
        self._waves.add(waiter)
        self._schedule_check()
        try:
            return await waiter.future
        finally:
            if waiter.future.cancelled():  # the caller is gone: its id is free at once, its row leaves at the next step
                self._abort_one(waiter)
                if self._waves.waiters.get(request.id) is waiter:
                    del self._waves.waiters[request.id]

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
        if self._waves.waiters:
            next(iter(self._waves.waiters.values())).future.get_loop().call_soon(self._check)

    def _check(self) -> None:
        if self._driver is not None or self._paused or self._closed or not self._weights.ready:
            return
        if not self._waves.chunks:
            if not self._waves.form():
                return
            self._decoder.start_wave()
        self._driver = asyncio.get_running_loop().create_task(self._drive())
        self._driver.add_done_callback(self._driven)

    async def _drive(self) -> None:
        """Runs the wave until it is answered or paused."""
        waves = self._waves
        while waves.chunks and not self._paused:
            self._interrupt.clear()
            waves.drop_aborted()
            if waves.chunks:
                await self._run(waves.chunks[0])
                if not waves.chunks[0].rows:
                    waves.chunks.popleft()

    def _driven(self, driver: asyncio.Task[None]) -> None:
        self._driver = None
        if driver.cancelled():
            self._waves.fail(None)
        elif (failure := driver.exception()) is not None:
            self._waves.fail(failure)
        self._schedule_check()

    async def _run(self, chunk: Chunk) -> None:
        loop = asyncio.get_running_loop()

        def finish(row: Row, completion: Completion) -> None:
            loop.call_soon_threadsafe(self._waves.answer, row, completion)

        work = loop.run_in_executor(self._pool, self._decoder.run, chunk, self.version, self._interrupt.is_set, finish)
        try:
            await asyncio.shield(work)
        except asyncio.CancelledError:
            self._interrupt.set()
            await asyncio.wait({work})
            raise
        except (RuntimeError, MemoryError) as e:  # torch: out of memory and failed kernels
            for row in chunk.rows:
                self._waves.answer(row, row.completion("error", f"{type(e).__name__}: {e}"))
            chunk.rows.clear()

    # ------------------------------------------------------------------------------------- abort, pause, sleep

    async def abort(self, ids: Iterable[str] | None = None) -> None:
        """Requests end as ``abort`` with the tokens they have; ids that are not in flight are ignored."""
        known = self._waves.waiters
        waiters = [known[i] for i in (list(known) if ids is None else ids) if i in known]
        for waiter in waiters:
            self._abort_one(waiter)
        if waiters:
            await asyncio.wait([waiter.future for waiter in waiters])

    def _abort_one(self, waiter: Waiter) -> None:
        waiter.row.aborted = True
        if not self._waves.withdraw(waiter):
            if self._driver is None:
                self._waves.drop_aborted()
            else:
                self._interrupt.set()
        self._schedule_check()

    async def pause(self, mode: str = "in_place") -> None:
        """Stops between two decode steps; new requests wait. A pause may follow another, with another mode."""
        if mode not in PAUSES:
            raise ValueError(f"pause mode is {mode!r}; known: {', '.join(PAUSES)}")
        self._require_open("pause")
        self._paused = True
        if self._driver is not None:
            self._interrupt.set()
            await asyncio.wait({self._driver})
        if mode == "retract":
            self._waves.drop_caches()
        elif mode == "abort":
            await self.abort()

    async def resume(self) -> None:
        self._require_open("resume")
        if self._waves.waiters and not self._weights.ready:
            raise EngineStateError("resume with requests in flight but without complete weights; finish a weight update first")
        self._paused = False
        self._schedule_check()

    def _require_open(self, what: str) -> None:
        if self._closed:
            raise EngineStateError(f"{what}: the engine is closed; make a new one")

    async def _require_idle(self, what: str) -> None:
        self._require_open(what)
        while self._driver is not None:
            if len(self._waves.waiters) > len(self._waves.pending):
                raise EngineStateError(f"{what} while {len(self._waves.waiters)} requests are in flight; pause first, or wait for them")
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
        if self._waves.waiters:
            raise EngineStateError(f"sleep while {len(self._waves.waiters)} requests are in flight; abort them or wait for them")
        if self._weights.updating:
            raise EngineStateError("sleep inside a weight update; end it first")
        self._waves.drop_caches()
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
        self._waves.drop_caches()
        self._weights.free()
        self._pool.shutdown()

    # ----------------------------------------------------------------------------------------------- weights

    async def begin_update(self) -> None:
        """Starts an update; a former one that was not ended is void. Pause first when requests run."""
        await self._require_idle("begin_update")
        if not self._weights.resident:
            raise EngineStateError("begin_update while the weights sleep; wake them first")
        self._waves.drop_caches()
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
        self._waves.drop_caches()
        self.version = version
        self._schedule_check()

    def _require_update(self, what: str) -> None:
        self._require_open(what)
        if not self._weights.updating:
            raise EngineStateError(f"{what} outside begin_update … end_update; begin an update first")

    async def flush(self) -> None:
        """Forgets all keys and values; paused requests compute theirs again. Raises EngineStateError while requests run."""
        await self._require_idle("flush")
        self._waves.drop_caches()

    async def checksum(self) -> dict[str, str]:
        """Checksum of every weight as it is served now, by checkpoint name."""
        self._require_open("checksum")
        if not self._weights.resident:
            raise EngineStateError("checksum while the weights sleep; wake them first")
        return await asyncio.to_thread(self._weights.checksums)

    async def progress(self) -> int:
        """Tokens generated since the start; grows while requests run."""
        self._require_open("progress")
        return self._decoder.tokens

    async def memory(self) -> dict[str, int]:
        """Bytes held now: ``weights``, and ``kv_cache`` of the requests in flight and of clients between two turns."""
        self._require_open("memory")
        return {"weights": self._weights.nbytes, "kv_cache": self._waves.cache_bytes()}
