"""Rows packed one after another: what every layer needs to know about them, worked out once per micro-batch."""

import math
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from mcore_agent.learner.context import deal

CALL = 2048  # query-key pairs that cost about as much as one more attention call
FILLED = 3 / 4  # least part of the pairs of a shared call that is wanted, beyond what one more call would cost
LARGE = 1 << 14  # pairs from which on a segment is attended by itself, so that its keys are not copied


@dataclass(frozen=True)
class Buckets:
    """Rows of similar length, padded to their longest, so that one attention call serves many rows.

    Rows of 30, 90 and 40 tokens make two buckets: (1 row of 90) and (2 rows of 40), with the slots
    ``90 + 2 * 40 = 170`` of which 160 hold a token.
    """

    shapes: tuple[tuple[int, int], ...]  # (rows, padded length) of each bucket
    token_of: torch.Tensor  # [slots] index of the packed token in each slot; a padding slot repeats its row's last
    slot_of: torch.Tensor  # [T] slot of each packed token

    @property
    def sizes(self) -> list[int]:
        return [rows * length for rows, length in self.shapes]


def buckets_of(lengths: np.ndarray, device: torch.device) -> Buckets | None:
    """Buckets for rows of these lengths; None when all are equal: then the pack is a rectangle as it lies.

    A row joins a bucket while its padding costs less than a call of its own.
    """
    if np.all(lengths == lengths[0]):
        return None
    starts = np.cumsum(lengths) - lengths
    order = np.argsort(-lengths, kind="stable")
    token_of, shapes = [], []
    at = 0
    while at < len(order):
        longest = int(lengths[order[at]])
        shortest = math.sqrt(max(0, longest**2 - 2 * CALL))
        end = at + int(np.searchsorted(-lengths[order[at:]], -shortest, side="right"))
        rows = order[at:end]
        within = np.minimum(np.arange(longest)[None, :], lengths[rows, None] - 1)
        token_of.append((starts[rows, None] + within).ravel())
        shapes.append((len(rows), longest))
        at = end
    return Buckets(tuple(shapes), *_slots(token_of, int(lengths.sum()), device))


def _slots(token_of: list[np.ndarray], tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """([slots] token of each slot, [tokens] slot of each token)."""
    flat = np.concatenate(token_of)
    slot_of = np.empty(tokens, dtype=np.int64)
    slot_of[flat[::-1]] = np.arange(len(flat))[::-1]  # the first slot of a token wins over its repetitions
    return torch.from_numpy(flat).to(device), torch.from_numpy(slot_of).to(device)


@dataclass(frozen=True)
class Segments:
    """Attention as segments: the queries of one see its keys, causally, the last query the last key.

    So the queries of a segment are also the last of its keys. A row is a segment whose keys are its queries. Where a
    rank holds only tokens 64 to 127 of a row, the keys are tokens 0 to 127. A row that continues another's prefix has
    two key ranges: the prefix and its own tokens.
    """

    queries: np.ndarray  # [n, 2] first and end of each segment's queries, counted over the tokens that this rank holds
    keys: np.ndarray  # [m, 2] first and end of each key range, counted over the whole pack
    segment: np.ndarray  # [m] ascending: whose key range it is

    @property
    def sizes(self) -> np.ndarray:
        """[n, 2] queries and keys of each segment."""
        count = self.queries[:, 1] - self.queries[:, 0]
        total = np.bincount(self.segment, self.keys[:, 1] - self.keys[:, 0], len(self.queries))
        return np.stack([count, total.astype(np.int64)], 1)


def segments_of(own: np.ndarray, lengths: np.ndarray) -> Segments:
    """The segments of the tokens ``own`` [L] (places in the pack, ascending): each a stretch of one row."""
    first = np.repeat(np.cumsum(lengths) - lengths, lengths)[own]
    opens = np.flatnonzero(np.concatenate([[True], (np.diff(own) != 1) | (first[1:] != first[:-1])]))
    ends = np.append(opens[1:], len(own))
    keys = np.stack([first[opens], own[ends - 1] + 1], 1)
    return Segments(np.stack([opens, ends], 1), keys, np.arange(len(opens)))


@dataclass(frozen=True)
class Block:
    """Segments that one attention call serves, padded to ``queries`` by ``keys``."""

    count: int
    queries: int
    keys: int
    key_of: slice | torch.Tensor  # the keys' places in the pack, [count * keys] or one range
    mask: torch.Tensor | None  # 0 or -inf, [queries, keys] or [count, 1, queries, keys]; None: plainly causal


@dataclass(frozen=True)
class Blocks:
    """All segments of a rank by calls, and the slots of their queries."""

    parts: tuple[Block, ...]
    token_of: torch.Tensor  # [slots] index of this rank's token in each slot
    slot_of: torch.Tensor  # [L]

    @property
    def sizes(self) -> list[int]:
        return [part.count * part.queries for part in self.parts]


def blocks_of(segments: Segments, dtype: torch.dtype, device: torch.device) -> Blocks:
    """Calls for these segments: a large one by itself, small ones padded to a common size where that costs little."""
    sizes = segments.sizes
    groups = _groups(sizes)
    most_queries, most_keys = sizes.max(0).tolist()
    # the corner of this mask is the mask of any smaller segment
    corner = _mask(np.array([[most_queries, most_keys]]), most_queries, most_keys, dtype, device)[0, 0]
    spans = segments.keys[:, 1] - segments.keys[:, 0]
    flat = np.repeat(segments.keys[:, 0] - (np.cumsum(spans) - spans), spans) + np.arange(spans.sum())
    offset = np.cumsum(sizes[:, 1]) - sizes[:, 1]
    ranges = np.bincount(segments.segment, minlength=len(sizes))
    parts, token_of = [], []
    for group in groups:
        own = sizes[group]
        queries, keys = own.max(0).tolist()
        token_of.append((segments.queries[group, :1] + np.minimum(np.arange(queries), own[:, :1] - 1)).ravel())
        places = flat[offset[group, None] + np.minimum(np.arange(keys), own[:, 1:] - 1)]
        alone = len(group) == 1 and ranges[group[0]] == 1
        key_of = slice(int(places[0, 0]), int(places[0, -1]) + 1) if alone else torch.from_numpy(places.ravel()).to(device)
        if (own == own[0]).all():
            mask = None if queries == keys else corner[most_queries - queries :, most_keys - keys :]
        else:
            mask = _mask(own, queries, keys, dtype, device)
        parts.append(Block(len(group), queries, keys, key_of, mask))
    return Blocks(tuple(parts), *_slots(token_of, int(sizes[:, 0].sum()), device))


def _groups(sizes: np.ndarray) -> list[np.ndarray]:
    """Indices of the segments (their sizes [n, 2]) that are attended together."""
    shapes, kind = np.unique(sizes[:, ::-1], axis=0, return_inverse=True)  # by keys, then queries
    groups: list[list[int]] = []
    filled = 0
    for index in reversed(range(len(shapes))):
        keys, queries = shapes[index].tolist()
        members = np.flatnonzero(kind.ravel() == index).tolist()
        area = queries * keys
        if area >= LARGE:
            groups = [[m] for m in members] + groups  # at the front: the last group stays open for small ones
            continue
        own = filled + area * len(members)
        if filled:
            both = groups[-1] + members
            if np.prod(sizes[both].max(0)) * len(both) * FILLED <= own + CALL:
                groups[-1], filled = both, own
                continue
        groups.append(members)
        filled = area * len(members)
    return [np.array(g) for g in groups]


def _mask(sizes: np.ndarray, queries: int, keys: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """[n, 1, queries, keys]: query i of a segment of q queries and k keys sees key j <= i + k - q.

    Padding follows the real queries and keys, so only padding queries see padding keys.
    """
    last = np.arange(queries) + (sizes[:, 1:] - sizes[:, :1])
    hidden = torch.from_numpy(np.arange(keys) > last[:, None, :, None]).to(device)
    return torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, -torch.inf)


@dataclass
class PackedRows(PackedSeqParams):
    """What Megatron hands to the attention of every layer. Megatron itself sees one sequence ``[0, L]``: this rank's tokens.

    The rotary angles are looked up here by position within the row, so no layer loops over rows. What a way of
    computing attention needs beyond that is made when it first asks.
    """

    lengths: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # [rows] of the whole pack of T tokens
    cos: torch.Tensor | None = None  # [L, 1, head_dim / 2]
    sin: torch.Tensor | None = None
    share: str = "none"  # what context-parallel ranks share out: none (there is one), heads, or keys
    own: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # [L] places in the pack of this rank's tokens
    order: torch.Tensor | None = None  # [T] the pack's tokens by owner; None: as they lie, rank 0's first
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    routes: Any = None  # routing.Routes of a micro-batch whose experts are recorded or replayed
    made: dict[str, Any] = field(default_factory=dict)  # what a kernel keeps for the other layers

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @cached_property
    def buckets(self) -> Buckets | None:
        """How whole rows are attended."""
        return buckets_of(self.lengths, self.device)

    @cached_property
    def blocks(self) -> Blocks:
        """How this rank's queries attend the keys of the whole pack."""
        assert self.cos is not None
        return blocks_of(segments_of(self.own, self.lengths), self.cos.dtype, self.device)

    @cached_property
    def bounds(self) -> torch.Tensor:
        """[rows + 1] int32: where rows begin and end, as variable-length kernels take it."""
        return torch.from_numpy(np.concatenate([[0], np.cumsum(self.lengths)]).astype(np.int32)).to(self.device)

    @cached_property
    def place(self) -> torch.Tensor:
        """[L] int64: ``own`` on the device."""
        return torch.from_numpy(self.own).to(self.device)

    @cached_property
    def first(self) -> torch.Tensor:
        """[L] int64: where in the pack the row of each of this rank's tokens begins."""
        return torch.from_numpy(np.repeat(np.cumsum(self.lengths) - self.lengths, self.lengths)[self.own]).to(self.device)


def rotary_frequencies(head_dim: int, theta: float) -> torch.Tensor:
    """[head_dim / 2] angle per position (2104.09864): ``theta ** (-2 i / head_dim)``."""
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)


def pack(
    lengths: np.ndarray,
    frequencies: torch.Tensor,
    dtype: torch.dtype,
    device: torch.device,
    cp: int = 1,
    cp_rank: int = 0,
    mode: str = "heads",
) -> PackedRows:
    """The layout of a pack with rows of these lengths; angles in fp32, their cosine and sine in ``dtype``.

    With ``cp`` context-parallel ranks each holds ``L = T / cp`` tokens: of the pack as it lies when they share heads,
    or of ``order`` when they share keys (``context.context_mode``). Raises ValueError when cp does not divide T.
    """
    total = int(lengths.sum())
    if total % cp:
        raise ValueError(f"a pack of {total} tokens cannot be split over {cp} context-parallel ranks; pad it with rows of one token")
    by_keys = cp > 1 and mode == "keys"
    order = deal(lengths, cp) if by_keys else np.arange(total)
    size = total // cp
    own = order[size * cp_rank : size * (cp_rank + 1)]
    position = (np.arange(total) - np.repeat(np.cumsum(lengths) - lengths, lengths))[own]
    angles = (torch.from_numpy(position).to(device).float()[:, None] * frequencies.to(device))[:, None, :]
    bounds = torch.tensor([0, size], dtype=torch.int32, device=device)
    return PackedRows(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=size,
        max_seqlen_kv=size,
        lengths=lengths,
        cos=angles.cos().to(dtype),
        sin=angles.sin().to(dtype),
        share="none" if cp == 1 else mode,
        own=own,
        order=torch.from_numpy(order).to(device) if by_keys else None,
        device=device,
    )
