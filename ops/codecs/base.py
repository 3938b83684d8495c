"""The interface of codecs: a codec selects and encodes the part of a step's tensors that is sent.

A codec holds hyper-parameters only. `encode` takes the tensors and the codec's state and returns a
packet and the new state. The `EncodeContext` holds the kernels that do the array work. A tensor
with a NaN or an infinity makes the codec raise `NonFiniteUpdate` before any state changes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from thinwire.ops.kernels.base import Kernels
from thinwire.ops.types import (
    FEW_BITS,
    VALUE_DTYPES,
    ConfigurationError,
    Kind,
    ModelSpec,
    Packet,
    Policy,
    State,
)

if TYPE_CHECKING:
    import numpy as np

    from thinwire.ops.types import Float32, Int64


@dataclasses.dataclass(frozen=True)
class TouchedRows:
    """The rows of a tensor where an update is not 0, as in the gradient of an embedding.

    Attributes:
        rows: [r] int64, unique row numbers along the tensor's first axis, in ascending order.
        width: Number of entries in one row.
    """

    rows: Int64
    width: int

    def entries(self) -> Int64:
        """Return the positions [r * width] of the touched rows' entries, in ascending order."""
        import numpy as np

        return (self.rows[:, None] * self.width + np.arange(self.width)).reshape(-1)


@dataclasses.dataclass(frozen=True)
class EncodeContext:
    """The inputs of `Codec.encode` other than the tensors and the state: no clocks, no globals."""

    step: int
    learning_rate: float
    rng: np.random.Generator
    kernels: Kernels
    epoch: float = 0.0  # examples consumed by the whole run / examples in the training set
    # Tensor number -> rows where the tensor is not 0. An unlisted tensor can be nonzero anywhere.
    touched: Mapping[int, TouchedRows] = dataclasses.field(default_factory=dict)
    # True: the codec may leave the values of a dense float32 block on the device (no host copy).
    leaves_dense: bool = False
    # A wrapper sets `keep`, `factors` and `finite` for the codec inside the wrapper.
    keep: float | None = None  # fraction of entries to send; None: the codec's compression rate
    factors: tuple[float, ...] | None = None  # one per tensor, to multiply it by; None: all are 1
    finite: bool = False  # True: a check has found neither NaN nor infinity in the tensors


class Codec(Policy, Protocol):
    """Encodes the tensors of a worker's step (gradients or changes) into a packet to send."""

    @property
    def kind(self) -> Kind:
        """The meaning of the values in the codec's packets: gradients or changes of weights."""

    @property
    def value_dtype(self) -> str:
        """Dtype of the packet's values on the wire, one of VALUE_DTYPES and FEW_BITS."""

    @property
    def sends_fraction(self) -> bool:
        """Whether the codec obeys `ctx.keep`, the fraction of entries to send."""

    @property
    def takes_factors(self) -> bool:
        """Whether `encode` itself multiplies the tensors by `ctx.factors`."""

    def init(self, spec: ModelSpec, kernels: Kernels) -> State:
        """Return the codec's state before the first step."""

    def encode(
        self, tensors: Sequence[Float32], state: State, ctx: EncodeContext
    ) -> tuple[Packet, State]:
        """Return the packet for `tensors` (one [n] float32 each), and the codec's new state."""

    def feed(
        self,
        residuals: Sequence[Float32],
        tensors: Sequence[Float32],
        state: State,
        ctx: EncodeContext,
    ) -> tuple[Packet, State]:
        """Add tensors to residuals, encode the sums, and subtract the decoded packet from them.

        Args:
            residuals: Values not sent in earlier steps: one [n] float32 array per tensor, which
                the codec changes in place.
            tensors: One finite [n] float32 array per tensor, which the codec multiplies by
                `ctx.factors` before the addition.
            state: State of the codec before the step.
            ctx: Inputs of the step other than the tensors and the state.
        """

    def undelivered(self, packet: Packet, state: State) -> State:
        """Take the newest packet, which the shards did not apply, back into the codec's state."""


class NonFiniteUpdate(ValueError):
    """A tensor to encode holds NaN or infinity; the codec encoded nothing and changed no state."""


def kept_entries(compression_rate: float, size: int) -> int:
    """Return how many of n entries to send at rate c: max(1, floor(c * n + 1e-9)), at most n.

    The term 1e-9 corrects products c * n that rounding leaves below a whole number, for example
    0.29 * 100 = 28.999...

    >>> kept_entries(0.29, 100), kept_entries(0.01, 5)
    (29, 1)
    """
    return min(size, max(1, int(compression_rate * size + 1e-9)))


def check_finite(tensors: Sequence[Float32], ctx: EncodeContext) -> None:
    """Reject tensors that hold NaN or infinity; do nothing if `ctx.finite` is True.

    Raises:
        NonFiniteUpdate: A tensor to encode holds NaN or infinity.
    """
    number = None if ctx.finite else ctx.kernels.first_not_finite(tensors)
    if number is not None:
        raise NonFiniteUpdate(
            f"tensor {number} of the update contains NaN or infinity; expected finite values. "
            "Lower the learning rate or set --clip_norm."
        )


def check_rate(rate: float, flag: str = "compression_rate") -> None:
    """Reject a compression rate of 0 or less; `flag` is the name of the flag that set the rate.

    Raises:
        ConfigurationError: The compression rate is not above 0.
    """
    if not rate > 0:  # `not rate > 0` rejects NaN too, which `rate <= 0` would accept
        raise ConfigurationError(
            f"--{flag}={rate}: the fraction of entries kept must be above 0 "
            "(for example 0.01); 1 or more keeps all entries."
        )


def check_value_dtype(
    value_dtype: str,
    flag: str = "value_dtype",
    known: Iterable[str] = (*VALUE_DTYPES, *FEW_BITS),
) -> None:
    """Reject a value dtype that is not in `known`; `flag` is the name of the flag that set it.

    Raises:
        ConfigurationError: The value dtype is not in `known`.
    """
    if value_dtype not in known:
        raise ConfigurationError(f"--{flag}={value_dtype!r}: expected one of {', '.join(known)}.")
