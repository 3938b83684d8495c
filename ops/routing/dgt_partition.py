"""A shard's part of a packet, cut by what its blocks contribute: the work behind `dgt.Dgt`.

Four passes: score every slot's blocks, rank them, give ranks their channels, cut. Loops are over
slots, never over blocks. A slot's last block is its end: always reliable, never ranked.

The unreliable blocks of a slot in few bits, and what that changes of their values.

Which rank of a block travels on which channel, and in which order blocks are ranked.

Source: DGT's ranking and channel map; docs/methods/dgt.md.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from thinwire.ops.kernels.numpy_ops import contribution_at, dequantise, from_levels, to_levels_at
from thinwire.ops.routing import residuals
from thinwire.ops.routing.base import RouteContext, Routed, UnreliableBlocks, ValueEncoding
from thinwire.ops.types import Block, CodedValues, LowRankBlock, RangedBlock, State

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thinwire.ops.routing.dgt import Dgt
    from thinwire.ops.types import Float32, Int64

#: Bits of a level -> how it travels.
ENCODINGS = {16: ValueEncoding.UINT16, 8: ValueEncoding.UINT8, 4: ValueEncoding.UINT4}
_PIECE = 1 << 16  # entries coded at a time: buffers stay in cache


@dataclasses.dataclass(frozen=True)
class CodedLevels:
    """A slot's values as levels; 0 where a block is not unreliable."""

    data: NDArray[Any]  # [k], or [size] if dense: levels
    lows: Float32  # [n]
    scales: Float32  # [n]
    entries: Int64 | None  # [u]: which of a sparse block's values have errors; None: all of a dense
    errors: Float32  # [u], or [size] if dense: value minus what its level stands for


def dense(bits: int, slot: Scored, kernels: Any) -> CodedLevels:
    """Code blocks of a dense slot, all of them of full length."""
    size, entries = slot.block.size, slot.entries
    body = (slot.size - 1) * entries
    rows = dequantise(slot.block.values)[:body].reshape(-1, entries)
    data = np.zeros(size, np.uint16 if bits == 16 else np.uint8)
    coded = CodedLevels(
        data,
        np.zeros(slot.size, np.float32),
        np.zeros(slot.size, np.float32),
        None,
        np.zeros(size, np.float32),
    )
    numbers = np.sort(slot.numbers)
    step = max(1, _PIECE // entries)
    for first in range(0, numbers.size, step):
        some = numbers[first : first + step]
        piece = rows[some]
        levels, lows, scales = kernels.to_levels(piece, bits)
        coded.lows[some], coded.scales[some] = lows, scales
        data[:body].reshape(-1, entries)[some] = levels
        piece -= from_levels(levels, lows[:, None], scales[:, None])
        coded.errors[:body].reshape(-1, entries)[some] = piece
    return coded


def sparse(bits: int, slot: Scored, kernels: Any) -> CodedLevels:
    """Code blocks of which only some entries are there; they lie in the host's memory anyway."""
    del kernels
    counts = np.diff(slot.edges)
    is_low = np.zeros(slot.size, bool)
    is_low[slot.numbers] = True
    entries = np.flatnonzero(np.repeat(is_low, counts))
    values = dequantise(slot.block.values)[entries]
    lengths = counts[is_low]
    levels, lows, scales = to_levels_at(values, np.cumsum(lengths) - lengths, bits)
    all_lows, all_scales = np.zeros(slot.size, np.float32), np.zeros(slot.size, np.float32)
    all_lows[is_low], all_scales[is_low] = lows, scales
    data = np.zeros(slot.block.values.data.size, levels.dtype)
    data[entries] = levels
    errors = values - from_levels(levels, np.repeat(lows, lengths), np.repeat(scales, lengths))
    return CodedLevels(data, all_lows, all_scales, entries, errors)


def num_first(num_blocks: int, k: float) -> int:
    """Return R, how many ranks the fraction k makes reliable: k n, rounded half up.

    The product is a float32, as in the original: rounding decides whole blocks.

    >>> num_first(5, 0.5), num_first(90, 0.35)
    (3, 32)
    """
    return math.floor(float(np.float32(k) * np.float32(num_blocks)) + 0.5)


def channels_by_rank(
    num_ranked: int, num_ends: int, k: float, num_channels: int, num_forced: int = 0
) -> NDArray[np.uint8]:
    """Return the channel of each rank, best first: 0 is reliable, then 1 to `num_channels`.

    With ``n = num_ranked + num_ends`` blocks and ``R = floor(k n + 0.5)``, rank j goes to channel 0
    below R, else to ``1 + floor((j - R) C / (n - 1 - R))``. That is for one end; where more blocks
    are reliable because they are ends, as many fewer are for their rank.

    Args:
        num_ranked: Blocks that have a rank.
        num_ends: Last blocks of tensors, which are reliable whatever they hold; at least 1.
        k: Fraction of blocks to be reliable.
        num_channels: C, at least 1.
        num_forced: Best ranks that are reliable in any case.

    >>> "".join(map(str, channels_by_rank(10, 1, 0.0, 3)))
    '1111222333'
    """
    reliable = num_first(num_ranked + num_ends, k) - (num_ends - 1)
    reliable = min(max(reliable, num_forced, 0), num_ranked)
    behind = np.arange(num_ranked - reliable)
    channels = np.zeros(num_ranked, np.uint8)
    channels[reliable:] = 1 + behind * num_channels // max(1, behind.size)
    return channels


def best_first(scores: Float32, is_first: NDArray[np.bool_]) -> Int64:
    """Return positions [m] int64 by descending score, ties by position.

    Args:
        scores: [m] float32, finite.
        is_first: [m] bool: to be put before all others.
    """
    return np.lexsort((-scores, ~is_first))  # lexsort is stable


def at_random(seed: tuple[int, ...], is_first: NDArray[np.bool_]) -> Int64:
    """Return positions [m] int64 in an order that depends on nothing but the seed and m."""
    order = np.random.default_rng(seed).permutation(is_first.size)
    return order[np.argsort(~is_first[order], kind="stable")]


_ENCODINGS = {
    "float32": ValueEncoding.FLOAT32,
    "bfloat16": ValueEncoding.BFLOAT16,
    "float16": ValueEncoding.FLOAT16,
    "int8": ValueEncoding.INT8,
}


def _nothing() -> Any:
    return np.zeros(0, np.int64)


@dataclasses.dataclass
class Scored:
    """One slot's block in the making."""

    block: Block
    entries: int  # E, of a block of the slot
    scores: Float32  # [n] float32
    is_sent: NDArray[np.bool_]  # [n]: travels on some channel; of the end always
    is_bad: NDArray[np.bool_]  # [n]: holds NaN or infinity
    edges: Int64  # [n + 1] of a sparse block: its values by block; of a dense one empty
    numbers: Int64 = dataclasses.field(
        default_factory=_nothing
    )  # [m] unreliable blocks, best rank first
    channels: NDArray[np.uint8] = dataclasses.field(default_factory=_nothing)  # [m] of those

    @property
    def size(self) -> int:
        """How many blocks the slot has."""
        return self.scores.size


def whole(policy: Dgt, blocks: Sequence[Block], k: float) -> Routed:
    """Return everything as reliable, the same objects."""
    num_blocks = sum(policy.num_blocks(block.size) for block in blocks)
    return Routed(tuple(blocks), k=k, num_blocks=num_blocks, num_reliable=num_blocks)


def cut(
    policy: Dgt,
    shard: int,
    blocks: tuple[Block, ...],
    books: State,
    context: RouteContext,
    k: float,
) -> Routed:
    """Part the blocks of one shard; the books are changed in place.

    Args:
        policy: The hyper-parameters.
        shard: Number of the shard.
        blocks: Slots ascending.
        books: The shard's part of the router's state.
        context: Of this exchange.
        k: Fraction of blocks to be reliable.
    """
    kept = books["kept"] if policy.keeps else None
    if kept is not None:
        residuals.begin(kept)
        late = residuals.missing(kept, blocks)
        blocks = tuple(sorted((*blocks, *late), key=lambda block: block.slot))
    ranked: list[Scored] = []
    plain: list[Block] = []
    decay = set(range(len(books["averages"])))
    for block in blocks:
        decay.discard(block.slot)
        if isinstance(block, LowRankBlock):
            plain.append(block)
            continue
        own = residuals.taken(kept, block) if kept is not None else block
        count = policy.num_blocks(own.size)
        if count > 1:
            ranked.append(_scored(policy, own, books, context))
        else:
            plain.append(own)
    for slot in decay:
        books["averages"][slot] = books["averages"][slot] * np.float32(policy.dgt_alpha)
    rest = whole(policy, plain, k)
    _rank(policy, ranked, rest, (shard, *books["places"]), context)
    return _routed(policy, ranked, rest, kept, context)


def _scored(policy: Dgt, block: Block, books: State, context: RouteContext) -> Scored:
    """Carry the contributions of a slot on; find what needs no sending, and what is not finite."""
    entries, averages = policy.entries, books["averages"][block.slot]
    values = dequantise(block.values)
    edges: Int64 = _nothing()
    if block.indices is None:
        averages, sums = context.kernels.contribution(values, entries, averages, policy.dgt_alpha)
        is_sent = sums != 0 if policy.dgt_clear_zero else np.ones(sums.size, bool)
    else:
        marks = np.arange(averages.size + 1) * entries
        edges = np.searchsorted(block.indices, marks)
        averages, sums = contribution_at(
            values, edges, block.size, entries, averages, policy.dgt_alpha
        )
        is_sent = sums != 0 if policy.dgt_clear_zero else edges[1:] > edges[:-1]
    books["averages"][block.slot] = averages
    is_sent[-1] = True
    return Scored(block, entries, averages, is_sent, ~np.isfinite(sums), edges)


def _rank(
    policy: Dgt,
    slots: Sequence[Scored],
    rest: Routed,
    places: tuple[Any, ...],
    context: RouteContext,
) -> None:
    """Give every slot its unreliable blocks and their channels."""
    together = policy.dgt_scope == "model"
    num_others = rest.num_blocks if together else 0
    for group in [slots] if together and slots else [[slot] for slot in slots]:
        candidates = [np.flatnonzero(slot.is_sent[:-1]) for slot in group]
        is_bad = _joined(slot.is_bad[at] for slot, at in zip(group, candidates, strict=True))
        if policy.dgt_random == "0":
            scores = _joined(slot.scores[at] for slot, at in zip(group, candidates, strict=True))
            order = best_first(scores, is_bad)
        else:
            order = at_random(_seed(policy, group, places, context, is_bad.size), is_bad)
        channels = channels_by_rank(
            is_bad.size, len(group) + num_others, rest.k, policy.dgt_channels, int(is_bad.sum())
        )
        order, channels = order[channels > 0], channels[channels > 0]
        edges = np.cumsum([0, *(at.size for at in candidates)])
        for number, slot in enumerate(group):
            mine = (order >= edges[number]) & (order < edges[number + 1])
            slot.numbers = candidates[number][order[mine] - edges[number]]
            slot.channels = channels[mine]


def _joined(parts: Iterable[NDArray[Any]]) -> NDArray[Any]:
    arrays = list(parts)
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _seed(
    policy: Dgt, group: Sequence[Scored], places: tuple[Any, ...], context: RouteContext, count: int
) -> tuple[int, ...]:
    """Return what a random order depends on: fixed, on how many there are; else on the moment."""
    if policy.dgt_random == "fixed":
        return (count,)
    shard, tensors, starts = places
    first = group[0].block.slot
    place = (shard,) if len(group) > 1 else (int(tensors[first]), int(starts[first]))
    return (context.seed, context.worker, context.step, *place)


def _routed(
    policy: Dgt, slots: Sequence[Scored], plain: Routed, kept: State | None, context: RouteContext
) -> Routed:
    """Cut every slot, and count."""
    reliable, unreliable = list(plain.reliable), []
    num_unreliable = sum(slot.numbers.size for slot in slots)
    for slot in slots:
        if slot.numbers.size and not policy.dgt_send_drop:
            unreliable.append(_unreliable(policy, slot, kept, context))
        reliable.append(_reliable(slot, plain.k))
    unreliable.sort(key=lambda part: part.slot)
    reliable.sort(key=lambda block: block.slot)
    if kept is not None and policy.dgt_error_feedback:
        residuals.remember(kept, tuple(unreliable))
    num_sent = sum(int(np.count_nonzero(slot.is_sent)) for slot in slots)
    num_blocks = sum(slot.size for slot in slots)
    return dataclasses.replace(
        plain,
        reliable=tuple(reliable),
        unreliable=tuple(unreliable),
        num_blocks=plain.num_blocks + num_blocks,
        num_skipped=num_blocks - num_sent,
        num_reliable=plain.num_reliable + num_sent - num_unreliable,
        num_dropped=num_unreliable if policy.dgt_send_drop else 0,
        num_nonfinite=sum(int(np.count_nonzero(slot.is_bad)) for slot in slots),
    )


def _reliable(slot: Scored, k: float) -> Block:
    """Return the blocks of the slot that travel on the stream; all: the same object."""
    block, stays = slot.block, slot.is_sent.copy()
    stays[slot.numbers] = False
    if stays.all() or k >= 1:
        return block
    if block.indices is not None:
        chosen = np.repeat(stays, np.diff(slot.edges))
        if chosen.all():
            return block
        return Block(block.slot, block.size, block.indices[chosen], _some(block, chosen))
    body = (slot.size - 1) * slot.entries
    data, numbers = block.values.data, np.flatnonzero(stays[:-1])
    there = np.empty(numbers.size * slot.entries + block.size - body, data.dtype)
    rows = there[: numbers.size * slot.entries].reshape(-1, slot.entries)
    np.take(data[:body].reshape(-1, slot.entries), numbers, axis=0, out=rows, mode="clip")
    there[rows.size :] = data[body:]
    coded = dataclasses.replace(block.values, data=there)
    return RangedBlock(block.slot, block.size, None, coded, slot.entries, stays)


def _some(block: Block, chosen: NDArray[np.bool_]) -> CodedValues:
    return dataclasses.replace(block.values, data=block.values.data[chosen])


def _unreliable(
    policy: Dgt, slot: Scored, kept: State | None, context: RouteContext
) -> UnreliableBlocks:
    """Return the part of the slot that travels in datagrams."""
    block = slot.block
    if policy.dgt_low_bits == 32:
        encoding, data, scales = _as_coded(block.values, slot.size)
        lows = np.zeros(slot.size, np.float32)
    else:
        code = dense if block.indices is None else sparse
        coded = code(policy.dgt_low_bits, slot, context.kernels)
        if kept is not None:
            residuals.keep_errors(kept, block, coded.entries, coded.errors)
        encoding, data = ENCODINGS[policy.dgt_low_bits], coded.data
        scales, lows = coded.scales, coded.lows
    return UnreliableBlocks(
        block.slot,
        block.size,
        slot.entries,
        slot.numbers,
        slot.channels,
        encoding,
        block.indices,
        data,
        scales,
        lows,
    )


def _as_coded(values: CodedValues, count: int) -> tuple[ValueEncoding, NDArray[Any], Float32]:
    """Return encoding, data and scales of values that travel as the codec coded them."""
    encoding = _ENCODINGS[values.dtype]
    if encoding is ValueEncoding.FLOAT32:
        return encoding, dequantise(values), np.ones(count, np.float32)
    return encoding, values.data, np.full(count, values.scale, np.float32)
