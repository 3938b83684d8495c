"""Codecs without a residual: every entry, or a fraction of them at random."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from thinwire.ops.codecs.base import (
    EncodeContext,
    check_finite,
    check_rate,
    check_value_dtype,
    kept_entries,
)
from thinwire.ops.codecs.packets import code_values, feed_in_turn
from thinwire.ops.kernels.base import Kernels
from thinwire.ops.types import CHUNK_ENTRIES, Block, CodedValues, Kind, ModelSpec, Packet, State

if TYPE_CHECKING:
    from thinwire.ops.codecs.base import Codec
    from thinwire.ops.kernels.base import Selected
    from thinwire.ops.types import Float32, Int64


class StatelessCodec:
    """A codec without a residual: what is not sent, or does not arrive, is dropped."""

    takes_factors: ClassVar[bool] = False
    sends_fraction: ClassVar[bool] = False

    def init(self, spec: ModelSpec, kernels: Kernels) -> State:
        """Return the empty state."""
        del spec, kernels
        return {}

    def feed(
        self: Codec,
        residuals: Sequence[Float32],
        tensors: Sequence[Float32],
        state: State,
        ctx: EncodeContext,
    ) -> tuple[Packet, State]:
        """Do one error-feedback step, in passes over memory of their own."""
        return feed_in_turn(self, residuals, tensors, state, ctx)

    def undelivered(self, packet: Packet, state: State) -> State:
        """Return the state as it is: nothing is kept back."""
        del packet
        return state


@dataclasses.dataclass(frozen=True)
class Dense(StatelessCodec):
    """Send every entry, but of tensors with few touched rows these alone.

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
        """Return one block per tensor; float32 values of dense ones are views of the tensors.

        Raises:
            NonFiniteUpdate: A tensor holds NaN or infinity.
        """
        check_finite(tensors, ctx)
        packet = _whole(
            [each for slot, each in enumerate(tensors) if slot not in ctx.touched],
            self.value_dtype,
            self.kind,
            ctx,
        )
        if not ctx.touched:
            return packet, state
        whole = iter(packet.blocks)
        blocks = [
            self._rows(slot, tensor, ctx)
            if slot in ctx.touched
            else dataclasses.replace(next(whole), slot=slot)
            for slot, tensor in enumerate(tensors)
        ]
        return Packet(tuple(blocks), self.kind), state

    def _rows(self, slot: int, tensor: Float32, ctx: EncodeContext) -> Block:
        """Return the block of a tensor's touched rows."""
        indices = ctx.touched[slot].entries()
        values = code_values(tensor[indices], indices, tensor.size, self.value_dtype, ctx.kernels)
        return Block(slot, tensor.size, indices, values)


@dataclasses.dataclass(frozen=True)
class Sparsifier(StatelessCodec):
    """The base of codecs that send k entries of each tensor and drop the rest."""

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
            whole = _whole(tensors, self.value_dtype, self.kind, ctx, self.value_chunk)
            return whole, state
        chosen = self.select(tensors, rate, state, ctx)
        return self.coded(tensors, chosen, ctx), state

    @property
    def kept_fraction(self) -> float:
        """The fraction of entries to send, unless the context has another."""
        return self.compression_rate

    def fraction(self, ctx: EncodeContext) -> float:
        """Return the fraction of entries to send."""
        return self.kept_fraction if ctx.keep is None else ctx.keep

    @property
    def value_chunk(self) -> int:
        """Entries whose values have scales of their own, where values are of few bits."""
        return CHUNK_ENTRIES

    def coded(
        self,
        tensors: Sequence[Float32],
        chosen: Sequence[Selected],
        ctx: EncodeContext,
    ) -> Packet:
        """Code the chosen (positions, values) of each tensor."""
        blocks = [
            Block(slot, tensor.size, indices, self._coded(tensor, indices, values, ctx))
            for slot, (tensor, (indices, values)) in enumerate(zip(tensors, chosen, strict=True))
            if indices.size
        ]
        return Packet(tuple(blocks), self.kind)

    def _coded(
        self, tensor: Float32, indices: Int64, values: Float32, ctx: EncodeContext
    ) -> CodedValues:
        given = tensor.size, self.value_dtype, ctx.kernels, self.value_chunk
        return code_values(values, indices, *given)

    def select(
        self, tensors: Sequence[Float32], rate: float, state: State, ctx: EncodeContext
    ) -> list[Selected]:
        """Return of each tensor ascending positions and the values there."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class FusedSparsifier(Sparsifier):
    """The base of TopK and ChunkedTopK: an error-feedback step is one pass over each tensor."""

    def feed(
        self,
        residuals: Sequence[Float32],
        tensors: Sequence[Float32],
        state: State,
        ctx: EncodeContext,
    ) -> tuple[Packet, State]:
        """Do one error-feedback step, for each tensor in one pass over memory."""
        rate = self.fraction(ctx)
        if rate >= 1:
            return feed_in_turn(self, residuals, tensors, state, ctx)
        chosen = self.take(residuals, tensors, rate, state, ctx)
        packet = self.coded(tensors, chosen, ctx)
        self._keep_errors(residuals, chosen, packet, ctx)
        return packet, state

    def take(
        self,
        residuals: Sequence[Float32],
        tensors: Sequence[Float32],
        rate: float,
        state: State,
        ctx: EncodeContext,
    ) -> list[Selected]:
        """Add tensors to residuals and take out what to send: its positions, the values there."""
        raise NotImplementedError

    def _keep_errors(
        self,
        residuals: Sequence[Float32],
        chosen: Sequence[Selected],
        packet: Packet,
        ctx: EncodeContext,
    ) -> None:
        """Put into residuals, from which the chosen was taken, what coding it has changed."""
        if self.value_dtype == "float32":
            return
        for block in packet.blocks:
            indices, values = chosen[block.slot]
            residuals[block.slot][indices] = values - ctx.kernels.dequantise(block.values)


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
    ) -> list[Selected]:
        """Return of each tensor random positions, and the values there."""
        chosen = []
        for tensor in tensors:
            count = kept_entries(rate, tensor.size)
            indices = ctx.kernels.random_k(tensor.size, count, ctx.rng)
            chosen.append((indices, tensor[indices]))
        return chosen


def _whole(
    tensors: Sequence[Float32],
    value_dtype: str,
    kind: Kind,
    ctx: EncodeContext,
    chunk: int = CHUNK_ENTRIES,
) -> Packet:
    """Return one dense block per tensor; values may be arrays of the device."""
    given = value_dtype, ctx.kernels, chunk
    if ctx.leaves_dense and value_dtype == "float32":
        coded = [CodedValues(value_dtype, tensor[:]) for tensor in tensors]
    else:
        coded = [code_values(tensor, None, tensor.size, *given) for tensor in tensors]
    blocks = [
        Block(slot, tensor.size, None, values)
        for slot, (tensor, values) in enumerate(zip(tensors, coded, strict=True))
    ]
    return Packet(tuple(blocks), kind)
