"""The interface of codecs: a codec selects and encodes the part of a step's tensors that is sent.

A codec holds hyper-parameters only. `encode` takes the tensors and the codec's state and returns a
packet and the new state. The kernels that do the array work come in the context. Tensors must be
finite: a NaN or an infinity raises `NonFiniteUpdate` before any state changes.
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
        """Return the positions [r * width] of the rows' entries, in ascending order."""
        import numpy as np

        return (self.rows[:, None] * self.width + np.arange(self.width)).reshape(-1)


@dataclasses.dataclass(frozen=True)
class EncodeContext:
    """The inputs of a codec other than the tensors and the state; no clocks, no globals."""

    step: int
    learning_rate: float
    rng: np.random.Generator
    kernels: Kernels
    epoch: float = 0.0  # examples consumed by the whole run / examples in the training set
    # Tensor number -> rows where the tensor is not 0. An unlisted tensor may be nonzero anywhere.
    touched: Mapping[int, TouchedRows] = dataclasses.field(default_factory=dict)
    # True: a dense float32 block may hold arrays on the device, without a copy to the host.
    leaves_dense: bool = False
    # A wrapper sets the next three fields for the codec inside the wrapper.
    keep: float | None = None  # fraction of entries to send; None: the codec's own fraction
    factors: tuple[float, ...] | None = None  # one per tensor; for codecs with takes_factors
    finite: bool = False  # True: a check has found neither NaN nor infinity in the tensors


class Codec(Policy, Protocol):
    """Encodes the tensors of one step into a packet."""

    @property
    def kind(self) -> Kind:
        """The meaning of the values in the codec's packets."""

    @property
    def value_dtype(self) -> str:
        """Dtype of values on the wire, one of thinwire.ops.types.VALUE_DTYPES and FEW_BITS."""

    @property
    def sends_fraction(self) -> bool:
        """Whether the codec obeys `ctx.keep`, the fraction of entries to send."""

    @property
    def takes_factors(self) -> bool:
        """Whether `encode` itself multiplies the tensors by `ctx.factors`."""

    def init(self, spec: ModelSpec, kernels: Kernels) -> State:
        """Return the state before the first step."""

    def encode(
        self, tensors: Sequence[Float32], state: State, ctx: EncodeContext
    ) -> tuple[Packet, State]:
        """Return the packet for `tensors`, one [n] float32 array per tensor, and the new state."""

    def feed(
        self,
        residuals: Sequence[Float32],
        tensors: Sequence[Float32],
        state: State,
        ctx: EncodeContext,
    ) -> tuple[Packet, State]:
        """Add tensors to residuals, encode the sums, and subtract the decoded packet from them.

        Args:
            residuals: One [n] float32 array per tensor, changed in place.
            tensors: One finite [n] float32 array per tensor; added after the multiplication by
                `ctx.factors`.
            state: State of the codec.
            ctx: Context of the step.
        """

    def undelivered(self, packet: Packet, state: State) -> State:
        """Take the newest packet, which was not applied, back into the state."""


class NonFiniteUpdate(ValueError):
    """A tensor holds NaN or infinity; nothing was encoded and no state has changed."""


def kept_entries(compression_rate: float, size: int) -> int:
    """Return k = max(1, floor(c * n + 1e-9)), at most n.

    The term 1e-9 corrects products that rounding leaves below a whole number, for example
    100 * 0.29 = 28.999...

    >>> kept_entries(0.29, 100), kept_entries(0.01, 5)
    (29, 1)
    """
    return min(size, max(1, int(compression_rate * size + 1e-9)))


def check_finite(tensors: Sequence[Float32], ctx: EncodeContext) -> None:
    """Reject tensors that hold NaN or infinity, unless `ctx.finite` shows an earlier check.

    Raises:
        NonFiniteUpdate: A tensor holds NaN or infinity.
    """
    number = None if ctx.finite else ctx.kernels.first_not_finite(tensors)
    if number is not None:
        raise NonFiniteUpdate(
            f"tensor {number} of the update holds NaN or infinity; expected finite values. "
            "Lower the learning rate or set --clip_norm."
        )


def check_rate(rate: float, flag: str = "compression_rate") -> None:
    """Reject a rate that keeps nothing; `flag` is the name of the flag that set the rate.

    Raises:
        ConfigurationError: The rate is not above 0.
    """
    if not rate > 0:  # rejects NaN too
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
