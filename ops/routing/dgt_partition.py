"""Divide a shard server's gradient for DGT into blocks sent over gRPC and blocks sent over UDP.

Dense gradient values for the router DGT may be in device (GPU) memory. The router DGT scores, ranks
and codes blocks of dense gradients in device (GPU) memory on the device. The router DGT copies from
device to host only the gradient values to send, and a few bytes for each gradient block.

In the router DGT, a slot is a slice of a variable on the shard server. `Partition` works in four
passes over the variable slices and never loops over gradient blocks in Python. `Partition` scores
the gradient blocks of every variable slice by contribution, ranks the blocks, maps ranks to
channels, and cuts each slice into a part for gRPC and a part for datagrams, which --dgt_low_bits
codes in few bits. The last gradient block of a variable slice is called the slice's end: it is
always sent over gRPC, and is never ranked.

Source: ranking and channel map of Zhou et al., "DGT", Future Generation Computer Systems 121, 2021;
docs/methods/dgt.md.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from thinwire.ops.codecs.packets import on_host
from thinwire.ops.kernels.base import Kernels
from thinwire.ops.kernels.numpy_ops import (
    contribution_at,
    dequantise,
    from_levels,
    is_on_device,
    rows_of,
    to_levels_at,
)
from thinwire.ops.routing import residuals
from thinwire.ops.routing.base import RouteContext, Routed, UnreliableBlocks, ValueEncoding
from thinwire.ops.routing.dgt_choices import DgtChoices
from thinwire.ops.types import (
    Array,
    Block,
    Bool,
    Float32,
    Int64,
    LowRankBlock,
    RangedBlock,
    State,
    UInt8,
)

#: Classes of gradient blocks in order of rank: blocks with NaN or infinity, sent blocks, skipped
#: blocks. Within a class blocks are ranked by score.
_BAD, _SENT, _LEFT_OUT = range(3)


def _no_numbers() -> Any:
    return np.zeros(0, np.int64)


@dataclasses.dataclass
class ScoredBlock:
    """Gradient of one variable slice, divided into blocks with scores (mean contributions)."""

    block: Block
    entries: int  # number E of entries of a gradient block
    scores: Float32  # [n] float32: score (contribution) of each gradient block
    # [n]: True if the gradient block is sent; always True for the last block
    is_sent: Bool
    is_bad: Bool  # [n]: True if the gradient block contains NaN or infinity
    # [n + 1]: index of each gradient block's first value in a sparse slice; [0] if dense
    edges: Int64
    # [m] numbers of the gradient blocks sent in datagrams, most important block first, and [m]
    # their channels.
    numbers: Int64 = dataclasses.field(default_factory=_no_numbers)
    channels: UInt8 = dataclasses.field(default_factory=_no_numbers)

    @property
    def size(self) -> int:
        """Number n of gradient blocks in the variable slice."""
        return self.is_sent.size

    def classes(self) -> UInt8:
        """Return the rank class of each gradient block but the last one, [n - 1] uint8."""
        classes = np.where(self.is_bad[:-1], _BAD, _SENT)
        classes[~self.is_sent[:-1]] = _LEFT_OUT
        return classes.astype(np.uint8)


def all_reliable(choices: DgtChoices, blocks: Sequence[Block], k: float) -> Routed:
    """Return a division that sends all gradient blocks over gRPC; the blocks are not copied."""
    num_blocks = sum(choices.num_blocks(block.size) for block in blocks)
    return Routed(tuple(blocks), k=k, num_blocks=num_blocks, num_reliable=num_blocks)


class Partition:
    """Divides one shard server's gradient into blocks sent over gRPC and blocks in datagrams.

    Args:
        choices: Settings of the router DGT.
        shard: Number of the shard server that receives the gradient.
        state: The shard server's entry in the state of the router DGT; `Partition` changes the
            entry in place.
        context: Training step, loss, random seed and worker of the pushed gradient.
        k: Fraction of gradient blocks to send over gRPC.
    """

    def __init__(
        self, choices: DgtChoices, shard: int, state: State, context: RouteContext, k: float
    ) -> None:
        self._choices, self._shard, self._context, self._k = choices, shard, context, k
        # mean contribution of each gradient block, per variable slice
        self._averages: list[Float32] = state["averages"]
        # number of the tensor and start in the tensor, per variable slice
        self._places: list[Int64] = state["places"]
        # residuals of the shard server; None if DGT keeps no residuals
        self._kept: State | None = state.get("kept")

    def cut(self, blocks: tuple[Block, ...]) -> Routed:
        """Divide the shard server's gradient, with one item of `blocks` per variable slice."""
        if self._kept is not None:
            residuals.begin_push(self._kept)
            owed = residuals.owed_blocks(self._kept, blocks)
            blocks = tuple(sorted((*blocks, *owed), key=lambda block: block.slot))
        ranked: list[ScoredBlock] = []
        plain: list[Block] = []
        for block in blocks:
            if isinstance(block, LowRankBlock):
                plain.append(block)
                continue
            if self._kept is not None:
                block = residuals.compensate(self._kept, block)
            if self._choices.num_blocks(block.size) > 1:
                ranked.append(self._score(block))
            else:
                plain.append(on_host(block))
        self._decay({block.slot for block in blocks})
        unranked = all_reliable(self._choices, plain, self._k)
        self._rank(ranked, unranked)
        return self._routed(ranked, unranked)

    def _decay(self, present: set[int]) -> None:
        """Decay the mean contributions of blocks in variable slices that a push does not have."""
        for slot, averages in enumerate(self._averages):
            if slot not in present:
                self._averages[slot] = averages * np.float32(self._choices.dgt_alpha)

    def _score(self, block: Block) -> ScoredBlock:
        """Update the contributions of gradient blocks; find blocks of zeros, NaN or infinity."""
        choices = self._choices
        entries, averages = choices.block_entries, self._averages[block.slot]
        values = dequantise(block.values)
        edges: Int64 = _no_numbers()
        if block.indices is None:
            averages, sums = self._context.kernels.contribution(
                values, entries, averages, choices.dgt_alpha
            )
            is_sent, is_bad = self._context.kernels.block_flags(sums)
            if not choices.dgt_clear_zero:
                is_sent = np.ones(is_sent.size, bool)
        else:
            marks = np.arange(averages.size + 1) * entries
            edges = np.searchsorted(block.indices, marks)
            averages, sums = contribution_at(
                values, edges, block.size, entries, np.asarray(averages), choices.dgt_alpha
            )
            is_sent = sums != 0 if choices.dgt_clear_zero else edges[1:] > edges[:-1]
            is_bad = ~np.isfinite(sums)
        self._averages[block.slot] = averages
        is_sent[-1] = True
        return ScoredBlock(block, entries, averages, is_sent, is_bad, edges)

    def _rank(self, slots: Sequence[ScoredBlock], rest: Routed) -> None:
        """Choose the gradient blocks to send in datagrams, and the channel of each block."""
        together = self._choices.dgt_scope == "model"
        num_unranked = rest.num_blocks if together else 0
        for group in [slots] if together and slots else [[slot] for slot in slots]:
            classes = np.concatenate([slot.classes() for slot in group])
            num_bad = int(np.count_nonzero(classes == _BAD))
            if self._choices.dgt_random == "0":
                scores = [slot.scores[:-1] for slot in group]
                order = self._context.kernels.best_first(scores, classes)
            else:
                candidates = np.flatnonzero(classes != _LEFT_OUT)
                is_bad = classes[candidates] == _BAD
                order = candidates[at_random(self._seed(group, is_bad.size), is_bad)]
            channels = channels_by_rank(
                order.size,
                len(group) + num_unranked,
                self._k,
                self._choices.dgt_channels,
                num_bad,
            )
            order, channels = order[channels > 0], channels[channels > 0]
            edges = np.cumsum([0, *(slot.size - 1 for slot in group)])
            for number, slot in enumerate(group):
                in_slot = (order >= edges[number]) & (order < edges[number + 1])
                slot.numbers, slot.channels = order[in_slot] - edges[number], channels[in_slot]

    def _seed(self, group: Sequence[ScoredBlock], count: int) -> tuple[int, ...]:
        """Return the seed of the random number generator that orders gradient blocks."""
        if self._choices.dgt_random == "fixed":
            return (count,)
        tensors, starts = self._places
        first = group[0].block.slot
        place = (self._shard,) if len(group) > 1 else (int(tensors[first]), int(starts[first]))
        return (self._context.seed, self._context.worker, self._context.step, *place)

    def _routed(self, slots: Sequence[ScoredBlock], plain: Routed) -> Routed:
        """Cut every variable slice into a gRPC part and a datagram part; count the blocks."""
        is_dropped = self._choices.dgt_send_drop
        reliable, unreliable = list(plain.reliable), []
        num_unreliable = sum(slot.numbers.size for slot in slots)
        for slot in slots:
            if slot.numbers.size and not is_dropped:
                unreliable.append(self._unreliable(slot))
            reliable.append(_reliable(slot, self._context.kernels))
        unreliable.sort(key=lambda part: part.slot)
        reliable.sort(key=lambda block: block.slot)
        if self._kept is not None and self._choices.dgt_error_feedback:
            residuals.remember_sent(self._kept, tuple(unreliable))
        num_sent = sum(int(np.count_nonzero(slot.is_sent)) for slot in slots)
        num_blocks = sum(slot.size for slot in slots)
        return dataclasses.replace(
            plain,
            reliable=tuple(reliable),
            unreliable=tuple(unreliable),
            num_blocks=plain.num_blocks + num_blocks,
            num_skipped=num_blocks - num_sent,
            num_reliable=plain.num_reliable + num_sent - num_unreliable,
            num_dropped=num_unreliable if is_dropped else 0,
            num_nonfinite=sum(int(np.count_nonzero(slot.is_bad)) for slot in slots),
        )

    def _unreliable(self, slot: ScoredBlock) -> UnreliableBlocks:
        """Return the gradient blocks of the variable slice that are sent in datagrams."""
        block, low_bits = slot.block, self._choices.dgt_low_bits
        kernels = self._context.kernels
        if low_bits == 32:
            encoding, data, scales = _as_coded(slot, kernels)
            lows = np.zeros(slot.size, np.float32)
        else:
            code = code_dense if block.indices is None else code_sparse
            coded = code(low_bits, slot, kernels)
            if self._kept is not None:
                residuals.store_errors(self._kept, block, coded.entries, coded.errors)
            encoding, data = ValueEncoding[f"UINT{low_bits}"], coded.data
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


def _reliable(slot: ScoredBlock, kernels: Kernels) -> Block:
    """Return a variable slice's part for gRPC; not copied if the whole slice is sent over gRPC.

    The part sent over gRPC leaves out all-zero gradient blocks, so that the counters of blocks
    agree with the sent bytes.
    """
    block, stays = slot.block, slot.is_sent.copy()
    stays[slot.numbers] = False
    if stays.all():
        return on_host(block)
    if block.indices is not None:
        chosen = np.repeat(stays, np.diff(slot.edges))
        if chosen.all():
            return block
        some = dataclasses.replace(block.values, data=block.values.data[chosen])
        return Block(block.slot, block.size, block.indices[chosen], some)
    data, numbers = block.values.data, np.flatnonzero(stays[:-1])
    end = np.asarray(data[(slot.size - 1) * slot.entries :])
    body = numbers.size * slot.entries
    on_stream = np.empty(body + end.size, data.dtype)
    kernels.take_blocks(data, numbers, on_stream[:body].reshape(-1, slot.entries))
    on_stream[body:] = end
    coded = dataclasses.replace(block.values, data=on_stream)
    return RangedBlock(block.slot, block.size, None, coded, slot.entries, stays)


def _as_coded(slot: ScoredBlock, kernels: Kernels) -> tuple[ValueEncoding, Array, Float32]:
    """Return encoding, data and scales of values that the gradient codec coded for datagrams."""
    values = slot.block.values
    encoding = ValueEncoding[values.dtype.upper()]
    if is_on_device(values.data):
        numbers, data = np.sort(slot.numbers), np.zeros(slot.block.size, np.float32)
        rows = np.empty((numbers.size, slot.entries), np.float32)
        kernels.take_blocks(values.data, numbers, rows)
        rows_of(data, slot.entries)[numbers] = dequantise(dataclasses.replace(values, data=rows))
        return encoding, data, np.ones(slot.size, np.float32)
    if encoding is ValueEncoding.FLOAT32:
        return encoding, dequantise(values), np.ones(slot.size, np.float32)
    return encoding, values.data, np.full(slot.size, values.scale, np.float32)


# -- ranks --------------------------------------------------------------------------------------


def num_first(num_blocks: int, k: float) -> int:
    """Return how many of n gradient blocks are sent over gRPC for a fraction k: k n, rounded.

    `num_first` rounds halves up, so 2.5 gradient blocks become 3. The product k n is a float32, as
    in the original code: the rounding of the product can change R by a whole block.

    >>> num_first(5, 0.5), num_first(90, 0.35)
    (3, 32)
    """
    return math.floor(float(np.float32(k) * np.float32(num_blocks)) + 0.5)


def channels_by_rank(
    num_ranked: int, num_ends: int, k: float, num_channels: int, num_forced: int = 0
) -> UInt8:
    """Return the channel for each importance rank, best first: 0 is gRPC, 1 and more are for UDP.

    With ``n = num_ranked + num_ends`` gradient blocks, C UDP channels and ``R = floor(k n + 0.5)``,
    the block of rank j is sent on channel 0 (gRPC) if j < R, else on channel
    ``1 + floor((j - R) C / (n - 1 - R))``. The formula for the channel of a gradient block's rank
    holds for num_ends = 1. Every additional last block of a tensor is sent over gRPC too, and
    reduces the number of ranks sent over gRPC by one.

    Args:
        num_ranked: Number of gradient blocks that have an importance rank.
        num_ends: Number of last blocks of tensors, which are always sent over gRPC; at least 1.
        k: Fraction of gradient blocks to send over gRPC.
        num_channels: Number C of UDP datagram channels, at least 1.
        num_forced: Number of gradient blocks, the most important ones, that are sent over gRPC even
            if the fraction k is small.

    >>> "".join(map(str, channels_by_rank(10, 1, 0.0, 3)))
    '1111222333'
    """
    reliable = num_first(num_ranked + num_ends, k) - (num_ends - 1)
    reliable = min(max(reliable, num_forced, 0), num_ranked)
    behind = np.arange(num_ranked - reliable)
    channels = np.zeros(num_ranked, np.uint8)
    channels[reliable:] = 1 + behind * num_channels // max(1, behind.size)
    return channels


def at_random(seed: tuple[int, ...], is_first: Bool) -> Int64:
    """Return [m] int64 block positions in random order, but blocks with `is_first` come first."""
    order = np.random.default_rng(seed).permutation(is_first.size)
    return order[np.argsort(~is_first[order], kind="stable")]


# -- few bits -----------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class CodedLevels:
    """Quantized gradient values of one variable slice; entries of blocks sent over gRPC are 0."""

    data: Array  # [k], or [size] if dense: quantization level of each gradient value
    lows: Float32  # [n] float32: value at quantization level 0 of each gradient block
    # [n] float32: difference between two consecutive quantization levels, per gradient block
    scales: Float32
    # [u]: indices of the quantized values in a sparse gradient; None if dense
    entries: Int64 | None
    # [u], or [size] if dense: quantization error of each value (original minus quantized value)
    errors: Float32


def code_dense(bits: int, slot: ScoredBlock, kernels: Kernels) -> CodedLevels:
    """Quantize the full-length gradient blocks of a dense slice that are sent in datagrams."""
    size, numbers = slot.block.size, np.sort(slot.numbers)
    values = dequantise(slot.block.values)
    levels, lows, scales, errors = kernels.code_blocks(values, numbers, slot.entries, bits)
    data = np.zeros(size, levels.dtype)
    rows_of(data, slot.entries)[numbers] = levels
    all_lows, all_scales = np.zeros((2, slot.size), np.float32)
    all_lows[numbers], all_scales[numbers] = lows, scales
    return CodedLevels(data, all_lows, all_scales, None, errors)


def code_sparse(bits: int, slot: ScoredBlock, kernels: Kernels) -> CodedLevels:
    """Quantize the gradient blocks of a sparse slice that are sent in datagrams, in host memory."""
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
