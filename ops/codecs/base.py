"""What every codec refuses: tensors that are not finite, and settings that mean nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from thinwire.ops.types import VALUE_DTYPES, ConfigurationError, EncodeContext

if TYPE_CHECKING:
    from thinwire.ops.types import Float32


class NonFiniteUpdate(ValueError):
    """A tensor holds NaN or infinity; nothing was encoded and no state has changed."""


def check_finite(tensors: Sequence[Float32], ctx: EncodeContext) -> None:
    """Refuse tensors that are not finite, unless somebody has done so already.

    Raises:
        NonFiniteUpdate: A tensor holds NaN or infinity.
    """
    number = None if ctx.finite else ctx.kernels.first_not_finite(tensors)
    if number is not None:
        raise NonFiniteUpdate(
            f"tensor {number} of the update holds NaN or infinity; expected finite values. "
            "Lower --learning_rate or set --clip_norm."
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


def check_value_dtype(value_dtype: str, flag: str = "value_dtype") -> None:
    """Refuse an unknown value dtype; `flag` set it.

    Raises:
        ConfigurationError: It is none of thinwire.ops.types.VALUE_DTYPES.
    """
    if value_dtype not in VALUE_DTYPES:
        raise ConfigurationError(
            f"--{flag}={value_dtype!r}: expected one of {', '.join(VALUE_DTYPES)}."
        )
