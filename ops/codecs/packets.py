"""Operations on packets (encoded gradients) in memory, for gradient codecs and their wrappers.

The functions of `thinwire.ops.codecs.packets` decode a block, copy a packet's values out of arrays
that are about to change, and do a step of error feedback with any gradient codec.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from thinwire.ops.codecs.base import Codec, EncodeContext
from thinwire.ops.kernels.base import Kernels
from thinwire.ops.policy import Policy
from thinwire.ops.types import (
    CHUNK_ENTRIES,
    FEW_BITS,
    Block,
    ChunkedValues,
    CodedValues,
    Float32,
    Int64,
    LowRankBlock,
    Packet,
    State,
    where_of,
)
from thinwire.ops.wire.low_rank import expanded, factors


class FeedsInTurn(Policy):
    """Base class of codecs that do an error-feedback step in several passes over the gradients."""

    def feed(
        self: Codec,
        residuals: Sequence[Float32],
        tensors: Sequence[Float32],
        state: State,
        ctx: EncodeContext,
    ) -> tuple[Packet, State]:
        """Do an error-feedback step (see `Codec.feed`) in several passes over the gradients."""
        factors = ctx.factors or (1.0,) * len(tensors)
        for residual, tensor, factor in zip(residuals, tensors, factors, strict=True):
            ctx.kernels.accumulate(residual, tensor, factor, 1.0)
        packet, state = self.encode(residuals, state, without_factors(ctx))
        # Values of a dense block may be views of the residuals, which the following subtraction
        # changes.
        packet = detached(packet, residuals)
        for block in packet.blocks:
            where, values = decoded(block, ctx.kernels)
            residuals[block.slot][where] -= values
        return packet, state


def without_factors(ctx: EncodeContext) -> EncodeContext:
    """Return `ctx` for gradients that are finite and already multiplied by `ctx.factors`."""
    return dataclasses.replace(ctx, factors=None, finite=True)


def encode_multiplied(
    codec: Codec, tensors: Sequence[Float32], state: State, ctx: EncodeContext
) -> tuple[Packet, State]:
    """Encode the gradients times `ctx.factors`, even if the codec does not multiply by factors."""
    if not codec.takes_factors:
        factors = ctx.factors or ()
        if factors:
            scale = ctx.kernels.scale
            tensors = [
                scale(tensor, factor) for tensor, factor in zip(tensors, factors, strict=True)
            ]
        ctx = dataclasses.replace(ctx, factors=None)
    return codec.encode(tensors, state, ctx)


def code_values(
    values: Float32,
    indices: Int64 | None,
    size: int,
    dtype: str,
    kernels: Kernels,
    chunk: int = CHUNK_ENTRIES,
) -> CodedValues:
    """Code the values of a gradient tensor's entries in a given dtype.

    Args:
        values: [k] float32, finite values of k gradient entries, to code in fewer bits.
        indices: [k] int64, ascending positions of the values in the tensor; None: the values are
            all of the tensor's entries.
        size: Number of entries in the gradient tensor.
        dtype: Dtype to code the values in, for example float32, int8 or sign (VALUE_DTYPES,
            FEW_BITS).
        kernels: Kernels (array functions) that code the values.
        chunk: Number of consecutive entries that share scales, used only with a few-bit dtype
            (FEW_BITS).
    """
    if dtype not in FEW_BITS:
        return kernels.quantise(values, dtype)
    from thinwire.ops.kernels.few_bits import edges_of

    edges = edges_of(indices, size, chunk)
    codes, scales = kernels.quantise_chunks(values, edges, dtype)
    return ChunkedValues(dtype, codes, scales=scales, edges=edges, chunk=chunk)


def decoded(block: Block, kernels: Kernels | None = None) -> tuple[Int64 | slice, Float32]:
    """Return positions in the tensor (None: all) and values [k] float32 of a block's entries.

    Args:
        block: Block (coded values of a tensor) to decode: dense, sparse, few-bit or low-rank.
        kernels: Kernels that multiply the factors of a low-rank block, for example on the device;
            None: numpy's kernels.
    """
    from thinwire.ops.kernels.numpy_ops import dequantise

    if kernels is not None and isinstance(block, LowRankBlock):
        return slice(None), kernels.entries(*factors(block), block.first, block.size)
    block = expanded(block)
    return where_of(block.indices), dequantise(block.values)


def detached(packet: Packet, arrays: Sequence[Float32]) -> Packet:
    """Return the packet with copies of those values that are views of `arrays` (one per tensor)."""
    import numpy as np

    blocks = []
    for block in packet.blocks:
        data, array = block.values.data, arrays[block.slot]
        if isinstance(array, np.ndarray) and np.may_share_memory(data, array):
            values = dataclasses.replace(block.values, data=data.copy())
            block = dataclasses.replace(block, values=values)
        blocks.append(block)
    return dataclasses.replace(packet, blocks=tuple(blocks))


def on_host(block: Block) -> Block:
    """Return the gradient block with its values in a numpy array on the host."""
    import numpy as np

    from thinwire.ops.kernels.numpy_ops import is_on_device

    if not is_on_device(block.values.data):
        return block
    values = dataclasses.replace(block.values, data=np.asarray(block.values.data))
    return dataclasses.replace(block, values=values)


def rescaled(block: Block, factor: float) -> Block:
    """Return the gradient block with its decoded values times `factor`, which is above 0.

    The function `rescaled` changes only the scale (factor on all values) of a gradient block. The
    new scale of the block is rounded to float32, the type of scales on the wire, and limited to the
    range of normal float32, so that it becomes neither 0 nor infinite.
    """
    import numpy as np

    limits = np.finfo(np.float32)
    scale = min(max(block.values.scale * factor, float(limits.tiny)), float(limits.max))
    values = dataclasses.replace(block.values, scale=float(np.float32(scale)))
    return dataclasses.replace(block, values=values)
