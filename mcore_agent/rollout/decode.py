"""The forward passes of the local engine: prefill, then one token for every row, until rows finish. Runs in one thread.

A step may carry drafts: then a pass reads a row's newest token and the draft behind it, every position draws its own token
from its own logits with its own random number, and a row keeps the tokens up to the first that the draft did not foresee.
So what is drawn, with which probability, is what single steps draw; the numbers differ from theirs by the rounding of a
pass of another shape, and a token can differ only where its random number lies within that rounding of a boundary.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

from mcore_agent.protocols import Completion, Request
from mcore_agent.rollout.drafting import Drafting
from mcore_agent.rollout.kv import KV, Past, common_prefix
from mcore_agent.rollout.sampling import Draw, sample

FIRST_ROOM = 64  # columns for new tokens that a batch's cache starts with; it grows by half


@dataclass(eq=False)
class Client:
    """One episode: keeps the keys and values of its last turn while it is open."""

    open: bool = True
    inner: int = 0  # open clients inside this one; it is not waited for while there are any
    waiting: int = 0  # its requests that have not started
    away: int = 0  # its environment works; it is not waited for
    past: Past | None = None
    sequence: int | None = None  # its last dialog in the index of drafts


@dataclass(eq=False)
class Row:
    """A request and what it has been answered so far."""

    request: Request
    client: Client | None
    tokens: list[int] = field(default_factory=list)
    logp: list[float] = field(default_factory=list)
    version: list[int] = field(default_factory=list)
    cached: int | None = None  # set by the first prefill
    aborted: bool = False
    sequence: int | None = None  # in the index of drafts
    followed: int = 0  # tokens of the answer that the index has

    def completion(self, finish: str, error: str = "", routing: np.ndarray | None = None) -> Completion:
        return Completion(
            tokens=np.array(self.tokens, dtype=np.int64),
            logp=np.array(self.logp, dtype=np.float32),
            version=np.array(self.version, dtype=np.int32),
            finish=finish,
            cached=self.cached or 0,
            error=error,
            routing=routing,
        )

    def so_far(self) -> np.ndarray:
        return np.concatenate([self.request.tokens, np.array(self.tokens, dtype=np.int64)])


@dataclass(eq=False)
class Chunk:
    """Rows that decode together. ``kv`` None: nothing computed, or dropped; the next step prefills from tokens."""

    rows: list[Row]
    kv: KV | None = None
    lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, np.int64))  # [B] tokens of each row so far
    last: Tensor | None = None  # [B] newest token of each row, whose keys are not in the cache yet
    draw: Draw | None = None  # sampling parameters in the order of rows; None after a change

    def drop_cache(self) -> None:
        self.kv = None

    def completion(self, slot: int, finish: str, error: str = "") -> Completion:
        """With the experts of its tokens, where they were asked for and are at hand."""
        row, routing = self.rows[slot], None
        if row.request.routing and self.kv is not None and not error:
            routing = self.kv.experts(slot, len(row.request.tokens) + len(row.tokens) - 1)
        return row.completion(finish, error, routing)

    @torch.inference_mode()  # it writes to tensors that were made so
    def remove(self, slots: Iterable[int]) -> None:
        """Takes rows out; rows from the end move to their places."""
        for slot in sorted(slots, reverse=True):
            end = len(self.rows) - 1
            self.rows[slot] = self.rows[end]
            self.rows.pop()
            if self.kv is not None:
                assert self.last is not None
                self.kv.remove(slot)
                self.lengths[slot], self.last[slot] = self.lengths[end], self.last[end]
                self.lengths, self.last = self.lengths[:end], self.last[:end]
            self.draw = None


@dataclass(eq=False)
class Source:
    """A distinct prefill: ``rows`` of a chunk start with these tokens, of which ``reused`` come from ``past``."""

    tokens: np.ndarray
    past: Past | None
    reused: int
    rows: list[int]

    @property
    def new(self) -> int:
        return len(self.tokens) - self.reused


def sources(rows: Sequence[Row]) -> list[Source]:
    """Rows that start with equal tokens and have no past of their own are computed once. Sorted by new tokens."""
    shared: dict[bytes, Source] = {}
    found: list[Source] = []
    for i, row in enumerate(rows):
        tokens = row.so_far()
        past = row.client.past if row.client is not None else None
        reused = min(common_prefix(past.tokens, tokens), len(tokens) - 1) if past is not None else 0
        if reused == 0:
            source = shared.setdefault(tokens.tobytes(), Source(tokens, None, 0, []))
            if not source.rows:
                found.append(source)
        else:
            source = Source(tokens, past, reused, [])
            found.append(source)
        source.rows.append(i)
        if row.cached is None:
            row.cached = reused
    return sorted(found, key=lambda s: s.new)


def split(found: Sequence[Source], limit: int) -> list[list[Source]]:
    """Groups of sources whose padded new tokens stay within ``limit`` (one source may exceed it alone)."""
    groups: list[list[Source]] = []
    for source in found:
        if groups and (len(groups[-1]) + 1) * source.new <= limit:
            groups[-1].append(source)
        else:
            groups.append([source])
    return groups


class Decoder:
    """Decodes chunks with one causal model of transformers. ``keep_bytes`` bounds what a wave leaves for next turns."""

    def __init__(
        self,
        model: nn.Module,
        layers: int,
        device: torch.device,
        prefill_tokens: int,
        keep_bytes: int,
        drafting: Drafting | None = None,
    ):
        self.model, self.layers, self.device = model, layers, device
        self.prefill_tokens, self.keep_bytes = prefill_tokens, keep_bytes
        self.drafting = drafting
        self.kept = 0  # bytes kept in this wave: counted by wave, not by clock, so that reuse is reproducible
        self.tokens = self.steps = 0  # generated so far, and the steps of rows that gave them
        self._running: KV | None = None  # the cache of the pass that runs
        # The routers that return (logits, scores, chosen experts); transformers names their classes so.
        routers = [module for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
        self.mixtures = len(routers)
        for layer, router in enumerate(routers):
            router.register_forward_hook(partial(self._routed, layer))

    def _routed(self, layer: int, module: nn.Module, arguments: object, result: tuple[Tensor, Tensor, Tensor]) -> None:
        if self._running is not None:
            self._running.put_experts(layer, self.mixtures, result[2])

    def start_wave(self) -> None:
        self.kept = 0

    @torch.inference_mode()
    def run(
        self, chunk: Chunk, version: int, interrupted: Callable[[], bool], finish: Callable[[Row, Completion], None]
    ) -> None:
        """Until every row is finished or ``interrupted``, which is asked between steps. Tokens carry ``version``."""
        while chunk.rows and not interrupted():
            drafts = self._drafts(chunk)
            logits = self._prefill(chunk) if chunk.kv is None else self._step(chunk, drafts)
            if chunk.draw is None:
                chunk.draw = Draw.of([row.request for row in chunk.rows], self.device)
            if drafts:
                kept, ended = self._verify(chunk, drafts, logits, chunk.draw, version)
            else:
                ids, logp = sample(logits[:, -1], chunk.draw, chunk.lengths)
                kept, ended = self._append(chunk, [[i] for i in ids.tolist()], [[p] for p in logp.tolist()], version)
                chunk.last = ids
            chunk.lengths = chunk.lengths + kept
            for slot, (reason, error) in ended.items():
                row, completion = chunk.rows[slot], chunk.completion(slot, reason, error)
                self._keep(chunk, slot, completion)
                self._follow(row, completion)
                finish(row, completion)
            chunk.remove(ended)

    def _append(
        self, chunk: Chunk, ids: list[list[int]], logp: list[list[float]], version: int
    ) -> tuple[list[int], dict[int, tuple[str, str]]]:
        """Adds each row's tokens up to one that ends it. Returns how many, and by row why it ended and an error."""
        kept: list[int] = []
        ended: dict[int, tuple[str, str]] = {}
        for slot, row in enumerate(chunk.rows):
            before = len(row.tokens)
            for token, value in zip(ids[slot], logp[slot], strict=True):
                if not np.isfinite(value):
                    place = len(row.request.tokens) + len(row.tokens)
                    ended[slot] = "error", f"the model's logits at position {place} are not finite"
                    break
                row.tokens.append(token)
                row.logp.append(value)
                row.version.append(version)
                if token in row.request.stop:
                    ended[slot] = "stop", ""
                    break
                if len(row.tokens) == row.request.max_new:
                    ended[slot] = "length", ""
                    break
            kept.append(len(row.tokens) - before)
        self.steps += len(kept)
        self.tokens += sum(kept)
        return kept, ended

    def _keep(self, chunk: Chunk, slot: int, completion: Completion) -> None:
        client = chunk.rows[slot].client
        if client is None or not client.open:
            return
        client.past = None
        if completion.finish != "error" and chunk.kv is not None and self.kept < self.keep_bytes:
            client.past = chunk.kv.past(slot, chunk.rows[slot].so_far()[:-1])
            self.kept += client.past.nbytes

    # ---------------------------------------------------------------------------------------------- drafts

    def _follow(self, row: Row, completion: Completion | None = None) -> None:
        """Tells the index of drafts what a row says; a finished one stays there for its client's next turn to extend."""
        if self.drafting is None or (completion is not None and completion.finish == "error"):
            return
        index, client = self.drafting.index, row.client
        if row.sequence is None:
            row.sequence = index.open(row.so_far().tolist(), client.sequence if client is not None else None)
            if client is not None:
                client.sequence = None  # taken: a second request at the same time begins its own
        else:
            index.append(row.sequence, row.tokens[row.followed :])
        row.followed = len(row.tokens)
        if completion is not None and client is not None:
            client.sequence = row.sequence

    def _drafts(self, chunk: Chunk) -> list[list[int]]:
        """What may follow each row, [] where nothing is known; none at all for an ordinary step."""
        drafting = self.drafting
        if drafting is None or not drafting.on or chunk.kv is None or len(chunk.rows) > drafting.below:
            return []
        drafts = []
        for row in chunk.rows:
            self._follow(row)
            assert row.sequence is not None
            room = min(drafting.longest, row.request.max_new - len(row.tokens) - 1)
            drafts.append(drafting.index.draft(row.sequence, room))
        return drafts if any(drafts) else []

    def _verify(
        self, chunk: Chunk, drafts: list[list[int]], logits: Tensor, draw: Draw, version: int
    ) -> tuple[list[int], dict[int, tuple[str, str]]]:
        """``logits`` [B, q, V] behind the newest token and each drafted one. Returns as ``_append``, caches cut to fit."""
        drafting, kv, width = self.drafting, chunk.kv, logits.shape[1]
        assert drafting is not None and kv is not None
        places = chunk.lengths[:, None] + np.arange(width)
        drawn, values = sample(logits.flatten(0, 1), draw.repeat(width), places.ravel())
        ids, logp = drawn.view(-1, width).tolist(), values.view(-1, width).tolist()
        for slot, draft in enumerate(drafts):
            count = 1  # the first token needs no draft
            while count <= len(draft) and draft[count - 1] == ids[slot][count - 1]:
                count += 1
            ids[slot], logp[slot] = ids[slot][:count], logp[slot][:count]
        kept, ended = self._append(chunk, ids, logp, version)
        kv.settle(width, kept)
        chunk.last = self._long([row.tokens[-1] for row in chunk.rows])
        drafting.proposed += sum(map(len, drafts))
        drafting.accepted += sum(max(0, count - 1) for count in kept)
        return kept, ended

    # ---------------------------------------------------------------------------------------------- passes

    def _forward(self, tokens: Tensor, positions: Tensor, mask: Tensor | None, kv: KV, keep: int = 1) -> Tensor:
        """Logits [B, keep, V] behind the last columns of ``tokens`` [B, q]; appends q columns to ``kv``."""
        self._running = kv
        try:
            out = self.model(
                input_ids=tokens, position_ids=positions, attention_mask=mask, past_key_values=kv, use_cache=True, logits_to_keep=keep
            )
        finally:
            self._running = None
        kv.advance(tokens.shape[1])
        return out.logits

    def _step(self, chunk: Chunk, drafts: Sequence[Sequence[int]]) -> Tensor:
        """Logits [B, q, V] behind each row's newest token and, padded to q - 1, its draft."""
        kv, last = chunk.kv, chunk.last
        assert kv is not None and last is not None
        starts = kv.length - (chunk.lengths - 1)  # [B] first column of each row
        kv.first = int(starts.min())
        tokens, places, mask = last[:, None], chunk.lengths[:, None] - 1, None
        if drafts:
            counts = np.array([len(draft) for draft in drafts])
            padded = np.zeros((len(drafts), counts.max()), dtype=np.int64)
            for slot, draft in enumerate(drafts):
                padded[slot, : len(draft)] = draft
            tokens = torch.cat([tokens, self._long(padded)], 1)
            places = places + np.minimum(np.arange(tokens.shape[1]), counts[:, None])
        width = tokens.shape[1]
        if width > 1 or kv.first != starts.max():
            columns = torch.arange(kv.first, kv.length + width, device=self.device)
            mask = (columns >= torch.from_numpy(starts).to(self.device)[:, None])[:, None, None]  # [B, 1, 1, columns]
            if width > 1:
                ends = torch.arange(kv.length, kv.length + width, device=self.device)
                mask = mask & (columns <= ends[:, None])  # [B, 1, q, columns]
        return self._forward(tokens, self._long(places), mask, kv, width)

    def _prefill(self, chunk: Chunk) -> Tensor:
        found = sources(chunk.rows)
        width = max(len(s.tokens) for s in found)
        more = max(row.request.max_new - len(row.tokens) for row in chunk.rows)
        kv = KV(self.layers, len(chunk.rows), width + min(more, FIRST_ROOM), length=width)
        parts: list[Tensor] = []
        order: list[int] = []
        for group in split(found, self.prefill_tokens):
            logits, part = self._prefill_group(group)
            rows = np.repeat(np.arange(len(group)), [len(s.rows) for s in group])
            to = [r for s in group for r in s.rows]
            columns = self._columns(group, part)
            kv.take(part, self._long(to), self._long(rows), columns[self._long(rows)])
            parts.append(logits[self._long(rows)])  # [n, 1, V]
            order += to
        for row in chunk.rows:
            if row.client is not None:
                row.client.past = None  # its numbers are in the batch's cache now
        chunk.kv = kv
        chunk.lengths = np.array([len(row.request.tokens) + len(row.tokens) for row in chunk.rows], dtype=np.int64)
        return torch.cat(parts)[self._long(np.argsort(order))]

    def _prefill_group(self, group: Sequence[Source]) -> tuple[Tensor, KV]:
        """One forward pass: past columns and new columns are each padded on the left, the mask has the holes."""
        past, new = max(s.reused for s in group), max(s.new for s in group)
        kv = KV(self.layers, len(group), past + new, length=past)
        tokens = np.zeros((len(group), new), dtype=np.int64)
        for i, s in enumerate(group):
            if s.past is not None:
                kv.put_past(i, s.past, s.reused, past)
            tokens[i, new - s.new :] = s.tokens[s.reused :]
        reused, fresh = self._long([s.reused for s in group]), self._long([s.new for s in group])
        steps = torch.arange(new, device=self.device)
        positions = (reused - new + fresh)[:, None] + steps  # negative only where a token is padding
        mask = None
        if past or new != min(s.new for s in group):
            columns = torch.arange(past + new, device=self.device)
            used = torch.where(columns < past, columns >= past - reused[:, None], columns - past >= new - fresh[:, None])  # [B, P+N]
            causal = columns - past <= steps[:, None]  # [N, P+N]
            own = columns - past == steps[:, None]  # padding sees itself: a softmax over nothing is not a number
            mask = (used[:, None] & causal | own)[:, None]  # [B, 1, N, P+N]
        return self._forward(self._long(tokens), positions.clamp(min=0), mask, kv), kv

    def _columns(self, group: Sequence[Source], kv: KV) -> Tensor:
        """[B, w] where each row's columns lie in ``kv``, without the hole, so that rows end together; 0 before a row starts."""
        width = max(len(s.tokens) for s in group)
        past = kv.length - max(s.new for s in group)
        index = np.zeros((len(group), width), dtype=np.int64)
        for i, s in enumerate(group):
            index[i, width - len(s.tokens) : width - s.new] = np.arange(past - s.reused, past)
            index[i, width - s.new :] = np.arange(kv.length - s.new, kv.length)
        return self._long(index)

    def _long(self, values: Sequence[int] | np.ndarray) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64, device=self.device)
