"""The interface of codecs: what of a step's dense tensors is sent?

A codec holds hyper-parameters only. `encode` takes the tensors and its state and returns a packet
and the new state; the kernels that do the work come in the context. Tensors must be finite: a NaN
or infinity raises `NonFiniteUpdate` before anything has changed.
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
    """The rows of a tensor that an update is not 0 in, as embeddings have it.

    Attributes:
        rows: [r] int64 ascending, unique numbers along the first axis.
        width: Entries of a row.
    """

    rows: Int64
    width: int

    def entries(self) -> Int64:
        """Return the positions [r * width] of their entries, ascending."""
        import numpy as np

        return (self.rows[:, None] * self.width + np.arange(self.width)).reshape(-1)


@dataclasses.dataclass(frozen=True)
class EncodeContext:
    """What a codec may know besides the tensors; no clocks, no globals."""

    step: int
    learning_rate: float
    rng: np.random.Generator
    kernels: Kernels
    epoch: float = 0.0  # examples the whole run has consumed / examples of the training set
    # Tensor's number -> where it is not 0; left out: anywhere.
    touched: Mapping[int, TouchedRows] = dataclasses.field(default_factory=dict)
    # Float32 values of whole tensors may stay on the device, if they are there.
    leaves_dense: bool = False
    # From a wrapper to the codec inside it:
    keep: float | None = None  # fraction of entries to send, instead of the codec's own
    factors: tuple[float, ...] | None = None  # of the tensors; for codecs with takes_factors
    finite: bool = False  # checked already: the tensors hold neither NaN nor infinity


class Codec(Policy, Protocol):
    """What makes a packet of a step's tensors."""

    @property
    def kind(self) -> Kind:
        """What the values of its packets mean."""

    @property
    def value_dtype(self) -> str:
        """How values travel, one of VALUE_DTYPES and FEW_BITS of thinwire.ops.types."""

    @property
    def sends_fraction(self) -> bool:
        """Whether it heeds `ctx.keep`, the fraction of entries to send."""

    @property
    def takes_factors(self) -> bool:
        """Whether `encode` multiplies the tensors by `ctx.factors` itself."""

    def init(self, spec: ModelSpec, kernels: Kernels) -> State:
        """Return the state before the first step."""

    def encode(
        self, tensors: Sequence[Float32], state: State, ctx: EncodeContext
    ) -> tuple[Packet, State]:
        """Return what is sent of the tensors, one [n] float32 for each of the model's."""

    def feed(
        self,
        residuals: Sequence[Float32],
        tensors: Sequence[Float32],
        state: State,
        ctx: EncodeContext,
    ) -> tuple[Packet, State]:
        """Add tensors to residuals, encode the sums, take out what their packet decodes to.

        Args:
            residuals: [n] float32 each, changed in place.
            tensors: [n] float32 each, finite; times `ctx.factors`.
            state: The codec's.
            ctx: The context.
        """

    def undelivered(self, packet: Packet, state: State) -> State:
        """Take back what of the newest packet did not arrive."""


class NonFiniteUpdate(ValueError):
    """A tensor holds NaN or infinity; nothing was encoded and no state has changed."""


def kept_entries(compression_rate: float, size: int) -> int:
    """Return k = max(1, floor(c * n + 1e-9)), at most n.

    The small term mends products like 100 * 0.29 = 28.999...

    >>> kept_entries(0.29, 100), kept_entries(0.01, 5)
    (29, 1)
    """
    return min(size, max(1, int(compression_rate * size + 1e-9)))


def check_finite(tensors: Sequence[Float32], ctx: EncodeContext) -> None:
    """Refuse tensors that are not finite, unless they were checked before.

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
    """Refuse a rate that keeps nothing; `flag` set it.

    Raises:
        ConfigurationError: It is not above 0.
    """
    if not rate > 0:  # refuses NaN too
        raise ConfigurationError(
            f"--{flag}={rate}: it is the fraction of entries kept; expected above 0 "
            "(for example 0.01), and 1 or more for all entries."
        )


def check_value_dtype(
    value_dtype: str,
    flag: str = "value_dtype",
    known: Iterable[str] = (*VALUE_DTYPES, *FEW_BITS),
) -> None:
    """Refuse a value dtype that is not known here; `flag` set it.

    Raises:
        ConfigurationError: It is none of those known.
    """
    if value_dtype not in known:
        raise ConfigurationError(f"--{flag}={value_dtype!r}: expected one of {', '.join(known)}.")
