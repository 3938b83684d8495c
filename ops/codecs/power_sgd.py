"""PowerSGD codec: it sends each gradient matrix as the product of two thin matrices."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from thinwire.ops.codecs.base import VALUE_DTYPE, EncodeContext, check_finite
from thinwire.ops.codecs.dense import StatelessCodec
from thinwire.ops.kernels.base import Kernels
from thinwire.ops.options import integer
from thinwire.ops.policy import setting
from thinwire.ops.types import (
    VALUE_DTYPES,
    Block,
    ConfigurationError,
    Float32,
    Kind,
    LowRankBlock,
    ModelSpec,
    Packet,
    State,
    TensorSpec,
)
from thinwire.ops.wire.low_rank import pays


@dataclasses.dataclass(frozen=True)
class PowerSgd(StatelessCodec):
    """PowerSGD: sends a gradient matrix M as ``P Q^T`` of rank r, one power step from the last Q.

    The power step of PowerSGD for a gradient matrix M computes ``P = orthonormal(M Q)``, then
    ``Q = M^T P``. PowerSGD handles a tensor of two or more dimensions as a matrix with the last
    axis as columns: [in, out] for a dense layer, [height * width * in, out] for a convolution.
    PowerSGD sends a tensor whole if its factors P and Q would not be smaller than the tensor (a
    bias, for example), or if the factors leave the range of float32. PowerSGD does not send a
    gradient matrix of zeros.

    PowerSgd drops the difference between a gradient matrix M and its approximation P Q^T, so the
    codec needs a wrapper `ErrorFeedback`.

    Attributes:
        powersgd_rank: r, the number of columns of the factors P and Q, at least 1; limited to the
            smaller side of each matrix.
        value_dtype: Dtype of the entries of the factors P and Q on the wire, for example float32 or
            int8 (VALUE_DTYPES in thinwire.ops.types).

    Source: Vogels, Karimireddy, Jaggi, "PowerSGD: Practical Low-Rank Gradient Compression for
    Distributed Optimization", NeurIPS 2019, algorithm 1. Differences: the paper averages M Q and
    M^T P over the workers, so that all workers share the factors. With a parameter server each
    worker takes the power step alone, and the mean of n updates has up to n times the rank.
    """

    powersgd_rank: int = setting(
        integer(
            "powersgd_rank",
            2,
            "Rank of the two factors that --codec=powersgd sends for a gradient matrix.",
            "columns",
            low=1,
        )
    )
    value_dtype: str = setting(VALUE_DTYPE, shown=True)
    kind: ClassVar[Kind] = Kind.GRADIENT

    def __post_init__(self) -> None:
        """Raise an error if `powersgd_rank` is below 1, or `value_dtype` not in VALUE_DTYPES."""
        super().__post_init__()
        if self.value_dtype not in VALUE_DTYPES:
            raise ConfigurationError(
                f"--value_dtype={self.value_dtype} with --codec=powersgd: expected one of "
                f"{', '.join(VALUE_DTYPES)}."
            )

    def init(self, spec: ModelSpec, kernels: Kernels) -> State:
        """Return each tensor's initial factor Q: zeros, or empty for a tensor sent whole."""
        import numpy as np

        return {"right": [np.zeros(self._shape(tensor), np.float32) for tensor in spec.tensors]}

    def _shape(self, tensor: TensorSpec) -> tuple[int, int]:
        """Return the shape (columns, rank) of a tensor's factor Q; (0, 0) if it is sent whole."""
        if len(tensor.shape) < 2 or not tensor.size:
            return 0, 0
        columns = tensor.shape[-1]
        rows = tensor.size // columns
        rank = min(self.powersgd_rank, rows, columns)
        return (columns, rank) if pays(rank, rows, columns, tensor.size) else (0, 0)

    def encode(
        self, tensors: Sequence[Float32], state: State, ctx: EncodeContext
    ) -> tuple[Packet, State]:
        """Return a packet: low-rank blocks of matrices, and dense blocks of tensors sent whole.

        Raises:
            NonFiniteUpdate: A gradient tensor to encode holds NaN or infinity.
        """
        check_finite(tensors, ctx)
        ctx = dataclasses.replace(ctx, finite=True)
        blocks, rights = [], []
        for slot, (tensor, right) in enumerate(zip(tensors, state["right"], strict=True)):
            block, right = self._approximated(slot, tensor, right, ctx)
            rights.append(right)
            if block is not None:
                blocks.append(block)
        return Packet(tuple(blocks), self.kind), state | {"right": rights}

    def _approximated(
        self, slot: int, tensor: Float32, right: Float32, ctx: EncodeContext
    ) -> tuple[Block | None, Float32]:
        """Return a tensor's block (None for zeros), and its factor Q for the next step."""
        from thinwire.ops.kernels import numpy_ops

        if not right.size:
            return self._whole(slot, tensor, ctx), right
        right = numpy_ops.directed(right, ctx.rng)
        factors = ctx.kernels.power_step(tensor, right)
        if factors is None:
            return self._whole(slot, tensor, ctx), right
        coded = [ctx.kernels.quantise(factor.reshape(-1), self.value_dtype) for factor in factors]
        right = factors[1]
        if not right.any():
            return None, right
        rank = right.shape[1]
        return LowRankBlock(slot, tensor.size, None, coded[0], coded[1], rank, 0), right

    def _whole(self, slot: int, tensor: Float32, ctx: EncodeContext) -> Block:
        return Block(slot, tensor.size, None, ctx.kernels.quantise(tensor, self.value_dtype))
