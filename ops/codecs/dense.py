"""Codecs without residuals: `Dense` (all entries), `RandomK`, and base classes of sparsifiers."""

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
from thinwire.ops.codecs.packets import FeedsInTurn, code_values
from thinwire.ops.kernels.base import Kernels
from thinwire.ops.types import CHUNK_ENTRIES, Block, CodedValues, Kind, ModelSpec, Packet, State

if TYPE_CHECKING:
    from thinwire.ops.kernels.base import Selected
    from thinwire.ops.types import Float32, Int64


class StatelessCodec(FeedsInTurn):
    """Base of codecs without residuals, which drop gradient values not sent or lost."""

    takes_factors: ClassVar[bool] = False
    sends_fraction: ClassVar[bool] = False

    def init(self, spec: ModelSpec, kernels: Kernels) -> State:
        """Return the empty state of a codec without residuals."""
        return {}

    def undelivered(self, packet: Packet, state: State) -> State:
        """Return the state unchanged, because the codec has no residuals."""
        return state


@dataclasses.dataclass(frozen=True)
class Dense(StatelessCodec):
    """Codec that sends every gradient entry, or only the nonzero rows of a tensor with few of them.

    Attributes:
        value_dtype: Dtype of the sent gradient values on the wire, for example float32, int8 or
            sign (VALUE_DTYPES and FEW_BITS in thinwire.ops.types).
    """

    value_dtype: str = "float32"
    kind: ClassVar[Kind] = Kind.GRADIENT

    def __post_init__(self) -> None:
        """Raise an error if `value_dtype` is unknown (neither in VALUE_DTYPES nor in FEW_BITS)."""
        check_value_dtype(self.value_dtype)

    def encode(
        self, tensors: Sequence[Float32], state: State, ctx: EncodeContext
    ) -> tuple[Packet, State]:
        """Return a packet of one block per tensor; dense float32 values are views of the tensors.

        Raises:
            NonFiniteUpdate: A gradient tensor to encode holds NaN or infinity.
        """
        check_finite(tensors, ctx)
        packet = _whole(
            [dense for slot, dense in enumerate(tensors) if slot not in ctx.touched],
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
        """Return the block with the entries of a gradient tensor's nonzero rows."""
        indices = ctx.touched[slot].entries()
        values = code_values(tensor[indices], indices, tensor.size, self.value_dtype, ctx.kernels)
        return Block(slot, tensor.size, indices, values)


@dataclasses.dataclass(frozen=True)
class Sparsifier(StatelessCodec):
    """Base of codecs that send k entries of each gradient tensor and drop the other entries."""

    compression_rate: float = 0.01
    value_dtype: str = "float32"
    kind: ClassVar[Kind] = Kind.GRADIENT
    sends_fraction: ClassVar[bool] = True

    def __post_init__(self) -> None:
        """Raise an error if the compression rate is 0 or less, or the value dtype is unknown."""
        check_rate(self.compression_rate)
        check_value_dtype(self.value_dtype)

    def encode(
        self, tensors: Sequence[Float32], state: State, ctx: EncodeContext
    ) -> tuple[Packet, State]:
        """Return a packet of the selected entries; a tensor without a selected entry has no block.

        Raises:
            NonFiniteUpdate: A gradient tensor to encode holds NaN or infinity.
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
        """The fraction of gradient entries to send if `EncodeContext.keep` is None."""
        return self.compression_rate

    def fraction(self, ctx: EncodeContext) -> float:
        """Return the fraction of each tensor's entries to send in this step."""
        return self.kept_fraction if ctx.keep is None else ctx.keep

    @property
    def value_chunk(self) -> int:
        """Number of consecutive entries that share the scales of values quantized to few bits."""
        return CHUNK_ENTRIES

    def coded(
        self,
        tensors: Sequence[Float32],
        chosen: Sequence[Selected],
        ctx: EncodeContext,
    ) -> Packet:
        """Return the packet of the selected entries, one (positions, values) pair per tensor."""
        blocks = [
            Block(slot, tensor.size, indices, self._coded(tensor, indices, values, ctx))
            for slot, (tensor, (indices, values)) in enumerate(zip(tensors, chosen, strict=True))
            if indices.size
        ]
        return Packet(tuple(blocks), self.kind)

    def _coded(
        self, tensor: Float32, indices: Int64, values: Float32, ctx: EncodeContext
    ) -> CodedValues:
        settings = tensor.size, self.value_dtype, ctx.kernels, self.value_chunk
        return code_values(values, indices, *settings)

    def select(
        self, tensors: Sequence[Float32], rate: float, state: State, ctx: EncodeContext
    ) -> list[Selected]:
        """Return the gradient entries to send: ascending positions and values per tensor."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class FusedSparsifier(Sparsifier):
    """Base of TopK and ChunkedTopK: error feedback takes one pass over each gradient tensor."""

    def feed(
        self,
        residuals: Sequence[Float32],
        tensors: Sequence[Float32],
        state: State,
        ctx: EncodeContext,
    ) -> tuple[Packet, State]:
        """Do one error-feedback step (see `Codec.feed`), in one pass over each tensor's memory."""
        rate = self.fraction(ctx)
        if rate >= 1:
            return super().feed(residuals, tensors, state, ctx)
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
        """Add gradients to the residuals, then remove and return the entries to send.

        Returns:
            One (positions, values) pair per tensor.
        """
        raise NotImplementedError

    def _keep_errors(
        self,
        residuals: Sequence[Float32],
        chosen: Sequence[Selected],
        packet: Packet,
        ctx: EncodeContext,
    ) -> None:
        """Store the rounding errors of the sent gradient entries in the residuals.

        `take` has set the residuals of the sent entries to 0.
        """
        if self.value_dtype == "float32":
            return
        for block in packet.blocks:
            indices, values = chosen[block.slot]
            residuals[block.slot][indices] = values - ctx.kernels.dequantise(block.values)


@dataclasses.dataclass(frozen=True)
class RandomK(Sparsifier):
    """Control experiment for TopK: send as many entries as TopK, at uniformly drawn positions.

    RandomK can draw entries that are zero, and sends them. RandomK sends values unscaled, not
    multiplied by n / k. The gradient estimate of RandomK is therefore too small by the factor c
    (the compression rate). But each sent entry has the same meaning with RandomK as with TopK, so
    the two codecs differ only in the choice of positions.

    Attributes:
        compression_rate: c, the fraction of gradient entries sent, above 0.
        value_dtype: Dtype of the sent gradient values on the wire, for example float32, int8 or
            sign (VALUE_DTYPES and FEW_BITS in thinwire.ops.types).
    """

    def select(
        self, tensors: Sequence[Float32], rate: float, state: State, ctx: EncodeContext
    ) -> list[Selected]:
        """Return gradient entries at random positions, one (positions, values) pair per tensor."""
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
    """Return one dense block per tensor, on the device if `ctx.leaves_dense` allows it."""
    settings = value_dtype, ctx.kernels, chunk
    if ctx.leaves_dense and value_dtype == "float32":
        coded = [CodedValues(value_dtype, tensor[:]) for tensor in tensors]
    else:
        coded = [code_values(tensor, None, tensor.size, *settings) for tensor in tensors]
    blocks = [
        Block(slot, tensor.size, None, values)
        for slot, (tensor, values) in enumerate(zip(tensors, coded, strict=True))
    ]
    return Packet(tuple(blocks), kind)
