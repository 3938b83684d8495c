"""Codecs that code or select; what wraps them is in `thinwire.ops.codecs.error_feedback` and
`thinwire.ops.codecs.wrappers`.

A codec holds hyper-parameters only. `encode` takes the tensors and its state and returns a packet
and the new state; the kernels that do the work come in the context. Tensors must be finite: a NaN
or infinity raises `NonFiniteUpdate` before anything has changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from thinwire.ops.codecs.base import check_finite, check_rate, check_value_dtype
from thinwire.ops.types import (
    Block,
    CodedValues,
    EncodeContext,
    Kind,
    ModelSpec,
    Packet,
    State,
    where_of,
)
from thinwire.ops.wire.low_rank import expanded

if TYPE_CHECKING:
    from thinwire.ops.types import Float32, Int64


class StatelessCodec:
    """A codec without a residual: what is not sent, or does not arrive, is dropped.

    Attributes:
        takes_factors: Whether `encode` multiplies the tensors by `ctx.factors` itself.
        sends_fraction: Whether it heeds `ctx.keep`, the fraction of entries to send.
    """

    takes_factors: ClassVar[bool] = False
    sends_fraction: ClassVar[bool] = False

    def init(self, spec: ModelSpec, kernels: Any) -> State:
        """Return the empty state."""
        del spec, kernels
        return {}

    def undelivered(self, packet: Packet, state: State) -> State:
        """Return the state as it is: nothing is kept back."""
        del packet
        return state


@dataclasses.dataclass(frozen=True)
class Dense(StatelessCodec):
    """Send every entry.

    Attributes:
        value_dtype: How values travel, one of thinwire.ops.types.VALUE_DTYPES.
    """

    value_dtype: str = "float32"
    kind: ClassVar[Kind] = Kind.GRADIENT

    def __post_init__(self) -> None:
        """Refuse an unknown value dtype."""
        check_value_dtype(self.value_dtype)

    def encode(
        self, tensors: Sequence[Float32], state: State, ctx: EncodeContext
    ) -> tuple[Packet, State]:
        """Return one dense block per tensor; float32 values are views of the tensors.

        Raises:
            NonFiniteUpdate: A tensor holds NaN or infinity.
        """
        check_finite(tensors, ctx)
        return _whole(tensors, self.value_dtype, self.kind, ctx), state


@dataclasses.dataclass(frozen=True)
class Sparsifier(StatelessCodec):
    """What TopK and RandomK share: of each tensor k entries are sent, the rest is dropped."""

    compression_rate: float = 0.01
    value_dtype: str = "float32"
    kind: ClassVar[Kind] = Kind.GRADIENT
    sends_fraction: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Refuse a rate that keeps nothing, and an unknown value dtype."""
        check_rate(self.compression_rate)
        check_value_dtype(self.value_dtype)

    def encode(
        self, tensors: Sequence[Float32], state: State, ctx: EncodeContext
    ) -> tuple[Packet, State]:
        """Return the selected entries of each tensor; a tensor without any gives no block.

        Raises:
            NonFiniteUpdate: A tensor holds NaN or infinity.
        """
        check_finite(tensors, ctx)
        rate = self.fraction(ctx)
        if rate >= 1:
            return _whole(tensors, self.value_dtype, self.kind, ctx), state
        chosen = self.select(tensors, rate, state, ctx)
        return self.coded(tensors, chosen, ctx), state

    def fraction(self, ctx: EncodeContext) -> float:
        """Return the fraction of entries to send."""
        return self.compression_rate if ctx.keep is None else ctx.keep

    def coded(
        self,
        tensors: Sequence[Float32],
        chosen: Sequence[tuple[Int64, Float32]],
        ctx: EncodeContext,
    ) -> Packet:
        """Code the chosen (positions, values) of each tensor."""
        blocks = [
            Block(slot, tensor.size, indices, ctx.kernels.quantise(values, self.value_dtype))
            for slot, (tensor, (indices, values)) in enumerate(zip(tensors, chosen, strict=True))
            if indices.size
        ]
        return Packet(tuple(blocks), self.kind)

    def select(
        self, tensors: Sequence[Float32], rate: float, state: State, ctx: EncodeContext
    ) -> list[tuple[Int64, Float32]]:
        """Return of each tensor ascending positions and the values there."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class RandomK(Sparsifier):
    """The control of TopK: as many entries, at positions drawn uniformly, zeros included.

    Values are sent as they are, not multiplied by n / k. The estimate of the gradient is
    therefore too small by c, but each entry sent means the same as with TopK, so that the two
    differ in the choice of positions alone.

    Attributes:
        compression_rate: c, the fraction kept, above 0.
        value_dtype: How values travel, one of thinwire.ops.types.VALUE_DTYPES.
    """

    def select(
        self, tensors: Sequence[Float32], rate: float, state: State, ctx: EncodeContext
    ) -> list[tuple[Int64, Float32]]:
        """Return of each tensor random positions, and the values there."""
        chosen = []
        for tensor in tensors:
            count = kept_entries(rate, tensor.size)
            indices = ctx.kernels.random_k(tensor.size, count, ctx.rng)
            chosen.append((indices, tensor[indices]))
        return chosen


# -- what codecs and wrappers use ------------------------------------------------------------------


def kept_entries(compression_rate: float, size: int) -> int:
    """Return k = max(1, floor(c * n + 1e-9)), at most n.

    The small term mends products like 100 * 0.29 = 28.999...

    >>> kept_entries(0.29, 100), kept_entries(0.01, 5)
    (29, 1)
    """
    return min(size, max(1, int(compression_rate * size + 1e-9)))


def feed(
    codec: Any,
    residuals: Sequence[Float32],
    tensors: Sequence[Float32],
    state: State,
    ctx: EncodeContext,
) -> tuple[Packet, State]:
    """Add tensors to residuals in place, encode the sums, take out what their packet decodes to.

    Args:
        codec: Any codec; one that can do all this in fewer passes has a method of this name.
        residuals: [n] float32 each, changed in place.
        tensors: [n] float32 each, finite; times `ctx.factors`.
        state: The codec's.
        ctx: The context.
    """
    at_once = getattr(codec, "feed", None)
    if at_once is None:
        return feed_in_turn(codec, residuals, tensors, state, ctx)
    packet, state = at_once(residuals, tensors, state, ctx)
    return packet, state


def feed_in_turn(
    codec: Any,
    residuals: Sequence[Float32],
    tensors: Sequence[Float32],
    state: State,
    ctx: EncodeContext,
) -> tuple[Packet, State]:
    """Do `feed` step by step, for codecs without a method for it."""
    factors = ctx.factors or (1.0,) * len(tensors)
    for residual, tensor, factor in zip(residuals, tensors, factors, strict=True):
        ctx.kernels.accumulate(residual, tensor, factor)
    packet, state = codec.encode(residuals, state, without_factors(ctx))
    packet = detached(packet, residuals)
    for block in packet.blocks:
        where, values = decoded(block)
        residuals[block.slot][where] -= values
    return packet, state


def without_factors(ctx: EncodeContext) -> EncodeContext:
    """Return the context for tensors that are finite and multiplied already."""
    return dataclasses.replace(ctx, factors=None, finite=True)


def encode_multiplied(
    codec: Any, tensors: Sequence[Float32], state: State, ctx: EncodeContext
) -> tuple[Packet, State]:
    """Encode the tensors times `ctx.factors` with any codec."""
    if not getattr(codec, "takes_factors", False):
        factors = ctx.factors or ()
        if factors:
            scale = ctx.kernels.scale
            tensors = [scale(each, factor) for each, factor in zip(tensors, factors, strict=True)]
        ctx = dataclasses.replace(ctx, factors=None)
    packet, state = codec.encode(tensors, state, ctx)
    return packet, state


def decoded(block: Block) -> tuple[Any, Float32]:
    """Return where a block's values belong (an index into its tensor), and the values [k]."""
    from thinwire.ops.kernels.numpy_ops import dequantise

    block = expanded(block)
    return where_of(block.indices), dequantise(block.values)


def detached(packet: Packet, arrays: Sequence[Float32]) -> Packet:
    """Return the packet without views of arrays that are about to change, one for each slot."""
    import numpy as np

    blocks = []
    for block in packet.blocks:
        data, array = block.values.data, arrays[block.slot]
        if isinstance(array, np.ndarray) and np.may_share_memory(data, array):
            values = dataclasses.replace(block.values, data=data.copy())
            block = dataclasses.replace(block, values=values)
        blocks.append(block)
    return dataclasses.replace(packet, blocks=tuple(blocks))


def rescaled(block: Block, factor: float) -> Block:
    """Return a block whose values decode to `factor` > 0 times as much; its bytes stay.

    The product is rounded to float32, as it travels, and kept from becoming 0 or infinite.
    """
    import numpy as np

    limits = np.finfo(np.float32)
    scale = min(max(block.values.scale * factor, float(limits.tiny)), float(limits.max))
    values = CodedValues(block.values.dtype, block.values.data, float(np.float32(scale)))
    return dataclasses.replace(block, values=values)


def _whole(tensors: Sequence[Float32], value_dtype: str, kind: Kind, ctx: EncodeContext) -> Packet:
    """Return one dense block per tensor."""
    blocks = [
        Block(slot, tensor.size, None, ctx.kernels.quantise(tensor, value_dtype))
        for slot, tensor in enumerate(tensors)
    ]
    return Packet(tuple(blocks), kind)
