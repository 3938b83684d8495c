"""Codecs without residuals (unsent values): `Dense`, `RandomK`, and base classes of sparsifiers."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from thinwire.ops.codecs.base import (
    COMPRESSION_RATE,
    VALUE_DTYPE,
    EncodeContext,
    check_finite,
    kept_entries,
)
from thinwire.ops.codecs.packets import FeedsInTurn, code_values
from thinwire.ops.kernels.base import Kernels, Selected
from thinwire.ops.policy import setting
from thinwire.ops.types import (
    CHUNK_ENTRIES,
    Block,
    CodedValues,
    Float32,
    Int64,
    Kind,
    ModelSpec,
    Packet,
    State,
)


class StatelessCodec(FeedsInTurn):
    """Base class of codecs without residuals, which drop gradient values that are not sent."""

    takes_factors: ClassVar[bool] = False
    sends_fraction: ClassVar[bool] = False

    def init(self, spec: ModelSpec, kernels: Kernels) -> State:
        """Return the empty state of a codec without residuals."""
        return {}

    def undelivered(self, packet: Packet, state: State) -> State:
        """Return the codec's state unchanged, because the codec stores no unsent values."""
        return state


@dataclasses.dataclass(frozen=True)
class Dense(StatelessCodec):
    """Codec that sends all gradient entries, or only nonzero rows of a tensor with few such rows.

    Attributes:
        value_dtype: Dtype of the sent gradient values on the wire, for example float32, int8 or
            sign (VALUE_DTYPES and FEW_BITS in thinwire.ops.types).
    """

    value_dtype: str = setting(VALUE_DTYPE, shown=True)
    kind: ClassVar[Kind] = Kind.GRADIENT

    def encode(
        self, tensors: Sequence[Float32], state: State, ctx: EncodeContext
    ) -> tuple[Packet, State]:
        """Return a packet with one block per gradient tensor; float32 values are views.

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
        """Return a sparse block with the entries in a gradient tensor's nonzero rows."""
        indices = ctx.touched[slot].entries()
        values = code_values(tensor[indices], indices, tensor.size, self.value_dtype, ctx.kernels)
        return Block(slot, tensor.size, indices, values)


@dataclasses.dataclass(frozen=True)
class Sparsifier(StatelessCodec):
    """Base class of codecs that send k entries of each gradient tensor and drop all others."""

    compression_rate: float = setting(COMPRESSION_RATE, shown=True)
    value_dtype: str = setting(VALUE_DTYPE, shown=True)
    kind: ClassVar[Kind] = Kind.GRADIENT
    sends_fraction: ClassVar[bool] = True

    def encode(
        self, tensors: Sequence[Float32], state: State, ctx: EncodeContext
    ) -> tuple[Packet, State]:
        """Return a packet of the selected gradient entries; a tensor without any has no block.

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
        """The fraction of gradient entries to send if the caller sets no `EncodeContext.keep`."""
        return self.compression_rate

    def fraction(self, ctx: EncodeContext) -> float:
        """Return the fraction of a gradient tensor's entries to send in a training step."""
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
        """Code the selected entries, one (positions, values) pair per tensor, as a packet."""
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
    """Base class of TopK and ChunkedTopK: error feedback takes one pass over a gradient tensor."""

    def feed(
        self,
        residuals: Sequence[Float32],
        tensors: Sequence[Float32],
        state: State,
        ctx: EncodeContext,
    ) -> tuple[Packet, State]:
        """Do one error-feedback step (see `Codec.feed`), in one pass over each gradient tensor."""
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
        """Add gradients to the residuals (unsent values); remove and return entries to send.

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

        Before `_keep_errors` is called, `take` has set the residuals of the sent entries to 0.
        """
        if self.value_dtype == "float32":
            return
        for block in packet.blocks:
            indices, values = chosen[block.slot]
            residuals[block.slot][indices] = values - ctx.kernels.dequantise(block.values)


@dataclasses.dataclass(frozen=True)
class RandomK(Sparsifier):
    """Control experiment for TopK: send as many entries as TopK, at uniformly drawn positions.

    The codec RandomK can draw gradient entries that are zero, and sends them. RandomK, which sends
    k of n gradient entries, does not multiply the sent values by n / k. The expected value of a
    gradient entry that RandomK sends is c (the compression rate) times the entry. RandomK sends
    each value unscaled, as TopK does, so the two codecs differ only in the choice of positions.

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
    """Return one dense block per gradient tensor, on the device if `ctx.leaves_dense` is True."""
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
