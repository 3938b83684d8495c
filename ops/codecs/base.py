"""Interface of gradient codecs, which select and encode the gradient entries that workers send.

A gradient codec is an object with hyper-parameters only; its caller stores its state. A codec's
method `encode` takes the gradient tensors and the codec's state, and returns a packet (the data to
send) and the codec's new state. The `EncodeContext` holds the kernels (array functions) that do a
codec's array work. A codec raises `NonFiniteUpdate` for a gradient tensor with a NaN or an
infinity, before the codec's state changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Protocol

from thinwire.ops.kernels.base import Kernels
from thinwire.ops.options import above_zero, choice, number
from thinwire.ops.policy import Policy
from thinwire.ops.types import (
    FEW_BITS,
    VALUE_DTYPES,
    Float32,
    Generator,
    Int64,
    Kind,
    ModelSpec,
    Packet,
    State,
)

#: Flag of the fraction of entries that a codec sends.
COMPRESSION_RATE = number(
    "compression_rate",
    0.01,
    "Fraction of gradient entries that sparsifying codecs KEEP; default for scripts: 0.1.",
    "fraction",
    rule=above_zero("1 or more is dense"),
)
#: Flag of the data type of the values that a codec sends.
VALUE_DTYPE = choice(
    "value_dtype",
    "float32",
    "Data type of the values that workers push; int4, int2, means2 and sign use one scale per "
    "chunk of entries.",
    (*VALUE_DTYPES, *FEW_BITS),
)


@dataclasses.dataclass(frozen=True)
class TouchedRows:
    """The rows of a tensor where an update is not 0, as in the gradient of an embedding.

    Attributes:
        rows: [r] int64, unique numbers of the nonzero rows along the tensor's first axis, in
            ascending order.
        width: Number of entries in one row of the gradient tensor.
    """

    rows: Int64
    width: int

    def entries(self) -> Int64:
        """Return the positions [r * width] of the entries in the nonzero rows, ascending."""
        import numpy as np

        return (self.rows[:, None] * self.width + np.arange(self.width)).reshape(-1)


@dataclasses.dataclass(frozen=True)
class EncodeContext:
    """Inputs of `Codec.encode` other than the gradient tensors and the codec's state."""

    step: int
    learning_rate: float
    rng: Generator
    kernels: Kernels
    # number of examples consumed by the whole run / number of examples in the training set
    epoch: float = 0.0
    # Number of a gradient tensor -> rows where the tensor is not 0. A tensor that is not listed can
    # be nonzero anywhere.
    touched: Mapping[int, TouchedRows] = dataclasses.field(default_factory=dict)
    # True: the codec may leave the values of a dense float32 block on the device (no host copy).
    leaves_dense: bool = False
    # Fraction of gradient entries to send; None: the codec's compression rate. A codec wrapper sets
    # `keep`, `factors` and `finite` for the codec inside the wrapper.
    keep: float | None = None
    # one factor per gradient tensor, by which the codec multiplies it; None: all factors are 1
    factors: tuple[float, ...] | None = None
    finite: bool = False  # True: a check has found neither NaN nor infinity in the gradient tensors


class Codec(Policy, Protocol):
    """Encodes gradients or weight changes of a worker's training step into a packet to send."""

    @property
    def kind(self) -> Kind:
        """The meaning of the values in the codec's packets: gradients or changes of weights."""

    @property
    def value_dtype(self) -> str:
        """Dtype of the packet's values on the wire, for example float32, int8 or sign."""

    @property
    def sends_fraction(self) -> bool:
        """Whether the codec obeys `ctx.keep`, the fraction of gradient entries to send."""

    @property
    def takes_factors(self) -> bool:
        """Whether the codec's `encode` multiplies the gradient tensors by `ctx.factors`."""

    def init(self, spec: ModelSpec, kernels: Kernels) -> State:
        """Return the gradient codec's state before the first training step."""

    def encode(
        self, tensors: Sequence[Float32], state: State, ctx: EncodeContext
    ) -> tuple[Packet, State]:
        """Return the packet for `tensors` (gradients, [n] float32), and the codec's new state."""

    def feed(
        self,
        residuals: Sequence[Float32],
        tensors: Sequence[Float32],
        state: State,
        ctx: EncodeContext,
    ) -> tuple[Packet, State]:
        """Add gradients to residuals, encode the sums, and subtract the packet from residuals.

        Args:
            residuals: Gradient values not sent in earlier steps: one [n] float32 array per tensor,
                which the codec changes in place.
            tensors: One finite [n] float32 gradient per tensor, which the codec multiplies by
                `ctx.factors` before the addition.
            state: State of the gradient codec before the training step.
            ctx: Inputs of the encoding other than the gradient tensors and the codec's state.
        """

    def undelivered(self, packet: Packet, state: State) -> State:
        """Add the newest packet, which shard servers did not apply, to the codec's state again."""


class NonFiniteUpdate(ValueError):
    """A gradient tensor has NaN or infinity; the codec encoded nothing and changed no state."""


def kept_entries(compression_rate: float, size: int) -> int:
    """Return how many of n entries to send at compression rate c: floor(c n + 1e-9), from 1 to n.

    The term 1e-9 corrects products c * n that rounding leaves below a whole number, for example
    0.29 * 100 = 28.999...

    >>> kept_entries(0.29, 100), kept_entries(0.01, 5)
    (29, 1)
    """
    return min(size, max(1, int(compression_rate * size + 1e-9)))


def check_finite(tensors: Sequence[Float32], ctx: EncodeContext) -> None:
    """Raise an error if a gradient tensor holds NaN or infinity, unless `ctx.finite` is True.

    Raises:
        NonFiniteUpdate: A gradient tensor to encode holds NaN or infinity.
    """
    number = None if ctx.finite else ctx.kernels.first_not_finite(tensors)
    if number is not None:
        raise NonFiniteUpdate(
            f"tensor {number} of the update contains NaN or infinity; expected finite values. "
            "Lower the learning rate or set --clip_norm."
        )
