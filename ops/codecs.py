"""The Codec seam: what of a step's dense tensors is sent?

A codec holds hyper-parameters only. `encode` takes the tensors and its state and returns a packet
and the new state; the kernels that do the work come in the context. Tensors must be finite: a NaN
or infinity raises `NonFiniteUpdate` before anything has changed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from ops.types import (
    VALUE_DTYPES,
    Block,
    ConfigurationError,
    EncodeContext,
    Kind,
    ModelSpec,
    Packet,
    State,
)

if TYPE_CHECKING:
    from ops.types import Float32, Int64


class NonFiniteUpdate(ValueError):
    """A tensor holds NaN or infinity; nothing was encoded and no state has changed."""


class _Forgetful:
    """A codec without state: what is not sent, or does not arrive, is dropped."""

    def init(self, spec: ModelSpec, kernels: Any) -> State:
        """Return the empty state."""
        del spec, kernels
        return {}

    def undelivered(self, packet: Packet, state: State) -> State:
        """Return the state as it is: nothing is kept back."""
        del packet
        return state


@dataclasses.dataclass(frozen=True)
class Dense(_Forgetful):
    """Send every entry.

    Attributes:
        value_dtype: How values travel, one of ops.types.VALUE_DTYPES.
    """

    value_dtype: str = "float32"
    kind: ClassVar[Kind] = Kind.GRADIENT

    def __post_init__(self) -> None:
        """Refuse an unknown value dtype."""
        _check_value_dtype(self.value_dtype)

    def encode(
        self, tensors: Sequence[Float32], state: State, ctx: EncodeContext
    ) -> tuple[Packet, State]:
        """Return one dense block per tensor; float32 values are views of the tensors.

        Raises:
            NonFiniteUpdate: A tensor holds NaN or infinity.
        """
        _check_finite(tensors)
        blocks = [
            _dense_block(slot, values, self.value_dtype, ctx) for slot, values in enumerate(tensors)
        ]
        return Packet(tuple(blocks), self.kind), state


@dataclasses.dataclass(frozen=True)
class _Selecting(_Forgetful):
    """What TopK and RandomK share: of each tensor k entries are sent, the rest is dropped."""

    compression_rate: float = 0.01
    value_dtype: str = "float32"
    kind: ClassVar[Kind] = Kind.GRADIENT

    def __post_init__(self) -> None:
        """Refuse a rate that keeps nothing, and an unknown value dtype."""
        _check_rate(self.compression_rate)
        _check_value_dtype(self.value_dtype)

    def encode(
        self, tensors: Sequence[Float32], state: State, ctx: EncodeContext
    ) -> tuple[Packet, State]:
        """Return the selected entries of each tensor; a tensor without any gives no block.

        Raises:
            NonFiniteUpdate: A tensor holds NaN or infinity.
        """
        _check_finite(tensors)
        blocks = []
        for slot, tensor in enumerate(tensors):
            if self.compression_rate >= 1:
                blocks.append(_dense_block(slot, tensor, self.value_dtype, ctx))
                continue
            count = kept_entries(self.compression_rate, tensor.size)
            indices, values = self._select(tensor, count, ctx)
            if indices.size:
                coded = ctx.kernels.quantise(values, self.value_dtype)
                blocks.append(Block(slot, tensor.size, indices, coded))
        return Packet(tuple(blocks), self.kind), state

    def _select(self, tensor: Float32, count: int, ctx: EncodeContext) -> tuple[Int64, Float32]:
        """Return at most `count` ascending positions and the values there."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class TopK(_Selecting):
    """AdaComp's selection: of each tensor the k entries of largest magnitude; the rest is dropped.

    ``k = max(1, floor(c * n + 1e-9))``, ties to the lowest index. Zeros are never sent: an
    all-zero tensor gives no block. With c >= 1 every entry is sent.

    Attributes:
        compression_rate: c, the fraction kept, above 0.
        value_dtype: How values travel, one of ops.types.VALUE_DTYPES.

    Source: Hardy et al. (arXiv 1702.04683) and their published code; docs/METHOD.md, AdaComp.
    """

    def _select(self, tensor: Float32, count: int, ctx: EncodeContext) -> tuple[Int64, Float32]:
        indices, values = ctx.kernels.top_k(tensor, count)
        return indices, values


@dataclasses.dataclass(frozen=True)
class RandomK(_Selecting):
    """The control of TopK: as many entries, at positions drawn uniformly, zeros included.

    Values are sent as they are, not multiplied by n / k. The estimate of the gradient is
    therefore too small by c, but each entry sent means the same as with TopK, so that the two
    differ in the choice of positions alone.

    Attributes:
        compression_rate: c, the fraction kept, above 0.
        value_dtype: How values travel, one of ops.types.VALUE_DTYPES.
    """

    def _select(self, tensor: Float32, count: int, ctx: EncodeContext) -> tuple[Int64, Float32]:
        indices = ctx.kernels.random_k(tensor.size, count, ctx.rng)
        return indices, tensor[indices]


def kept_entries(compression_rate: float, size: int) -> int:
    """Return k = max(1, floor(c * n + 1e-9)), at most n.

    The small term mends products like 100 * 0.29 = 28.999...

    >>> kept_entries(0.29, 100), kept_entries(0.01, 5)
    (29, 1)
    """
    return min(size, max(1, int(compression_rate * size + 1e-9)))


def _dense_block(slot: int, tensor: Float32, value_dtype: str, ctx: EncodeContext) -> Block:
    return Block(slot, tensor.size, None, ctx.kernels.quantise(tensor, value_dtype))


def _check_rate(rate: float) -> None:
    if not rate > 0:  # refuses NaN too
        raise ConfigurationError(
            f"--compression_rate={rate}: it is the fraction of entries kept; expected above 0 "
            "(for example 0.01), and 1 or more for all entries."
        )


def _check_value_dtype(value_dtype: str) -> None:
    if value_dtype not in VALUE_DTYPES:
        raise ConfigurationError(
            f"--value_dtype={value_dtype!r}: expected one of {', '.join(VALUE_DTYPES)}."
        )


def _check_finite(tensors: Sequence[Float32]) -> None:
    from ops.wire import all_finite

    for number, tensor in enumerate(tensors):
        if not all_finite(tensor):
            raise NonFiniteUpdate(
                f"tensor {number} of the update holds NaN or infinity; expected finite values. "
                "Lower --learning_rate or set --clip_norm."
            )


Codec = Dense | TopK | RandomK

#: --codec value -> policy.
REGISTRY: dict[str, type[Dense] | type[TopK] | type[RandomK]] = {
    "dense": Dense,
    "topk": TopK,
    "random_k": RandomK,
}
