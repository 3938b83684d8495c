"""Registry of gradient codecs: values of --codec, and the wrappers that flags add to a codec."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from thinwire.ops.codecs.base import Codec
from thinwire.ops.codecs.chunked_top_k import ChunkedTopK
from thinwire.ops.codecs.dense import Dense, RandomK, Sparsifier
from thinwire.ops.codecs.error_feedback import ErrorFeedback, MomentumCorrection
from thinwire.ops.codecs.power_sgd import PowerSgd
from thinwire.ops.codecs.top_k import TopK
from thinwire.ops.codecs.wrappers import Clip, DenseBelow, Descend, RateAtSend, WarmUp
from thinwire.ops.options import Option, switch
from thinwire.ops.policy import configured, options_of
from thinwire.ops.types import ConfigurationError

#: Flag that adds error feedback to a codec. It belongs to no field, because it adds a wrapper.
_ERROR_FEEDBACK = switch(
    "error_feedback",
    "Add the part of an update that the codec drops or rounds off to the next update.",
)
#: Classes of the wrappers that flags add to a codec.
_WRAPPERS = (ErrorFeedback, MomentumCorrection, Clip, WarmUp, DenseBelow)
#: Flag -> default momentum of the codec, which is used if neither the flag nor a script's optimizer
#: sets a momentum.
_MOMENTA = {"dgs_momentum": 0.7, "dgc_momentum": 0.9}

# function of (codec, flag -> value, number of workers) that returns the wrapped codec
Wrap = Callable[[Codec, Mapping[str, Any], int], Codec]


@dataclasses.dataclass(frozen=True)
class CodecEntry:
    """Description of how to build the gradient codec for one value of the flag --codec.

    Attributes:
        base: Class of the innermost codec, whose fields get the values of the flags with the
            fields' names.
        wrap: Function that adds the codec wrappers that belong to a --codec value; None: the value
            adds no wrappers.
        own: Names of the flags that the function `wrap` reads.
        warmup_epochs: Number of training epochs in which the codec sends more entries (warm-up) if
            the flag --warmup_epochs is not set; 0: no warm-up.
    """

    base: type[Codec]
    wrap: Wrap | None = None
    own: tuple[str, ...] = ()
    warmup_epochs: int = 0

    @property
    def options(self) -> dict[str, Option]:
        """Flag -> its option, for the flags that have an effect on a --codec value."""
        known = {_ERROR_FEEDBACK.name: _ERROR_FEEDBACK}
        for wrapper in _WRAPPERS:
            known |= {option.name: option for option in options_of(wrapper).values()}
        names = [*self.own]
        if issubclass(self.base, Sparsifier):
            names.append("warmup_epochs")
        if self.base is not Dense:
            names.append("dense_below")
        if self.wrap is None:
            names += ["error_feedback", "error_decay", "error_ahead"]
        own = {option.name: option for option in options_of(self.base).values()}
        return own | {name: known[name] for name in names}


def _gradient_dropping(codec: Codec, values: Mapping[str, Any], nb_workers: int) -> Codec:
    """Gradient Dropping: v <- v + eta h, h the gradient; send and zero the largest entries of v."""
    return Descend(ErrorFeedback(codec))


def _dual_way(codec: Codec, values: Mapping[str, Any], nb_workers: int) -> Codec:
    """DGS: a <- a + eta h, h the gradient; send a's largest entries, then multiply them by m."""
    return Descend(ErrorFeedback(codec, values.get("dgs_momentum")))


def _deep(codec: Codec, values: Mapping[str, Any], nb_workers: int) -> Codec:
    """DGC: clip gradient h; u <- m u + h; v <- v + u; send rate * v; zero u and v where sent."""
    momentum = values.get("dgc_momentum")
    codec = configured(MomentumCorrection, values, inner=ErrorFeedback(codec), momentum=momentum)
    norm, scope = values.get("dgc_clip_norm"), values.get("dgc_clip_scope")
    if norm:
        codec = configured(Clip, values, inner=codec, norm=norm / nb_workers**0.5)
    elif scope not in (None, "model"):
        raise ConfigurationError(
            f"--dgc_clip_scope={scope} without --dgc_clip_norm: no gradient is clipped. Set "
            "--dgc_clip_norm, or leave --dgc_clip_scope out."
        )
    return RateAtSend(codec)


def _low_rank(codec: Codec, values: Mapping[str, Any], nb_workers: int) -> Codec:
    """PowerSGD with gradient h: v <- v + h; send the approximation P Q^T of v; v <- v - P Q^T."""
    return ErrorFeedback(codec)


_DGC_CHOICES = (
    *("dgc_momentum", "dgc_nesterov", "dgc_masking"),
    *("dgc_clip_norm", "dgc_clip_scope"),
)

#: Value of the flag --codec -> how to build the gradient codec.
CODECS: dict[str, CodecEntry] = {
    "dense": CodecEntry(Dense),
    "topk": CodecEntry(TopK),
    "random_k": CodecEntry(RandomK),
    "chunked_topk": CodecEntry(ChunkedTopK),
    "gd": CodecEntry(TopK, _gradient_dropping),
    "dgc": CodecEntry(TopK, _deep, _DGC_CHOICES, warmup_epochs=4),
    "dgs": CodecEntry(TopK, _dual_way, ("dgs_momentum",)),
    "powersgd": CodecEntry(PowerSgd, _low_rank),
}


def build_codec(
    name: str, values: Mapping[str, Any], nb_workers: int = 1, leaves_momentum: bool = False
) -> Codec:
    """Return the gradient codec `name` with all wrappers that flags add.

    Args:
        name: Name of the gradient codec, a key of CODECS.
        values: Flag -> its value. A flag without a value here, or with the value None, has its
            default.
        nb_workers: Number of workers in the training run.
        leaves_momentum: True: a momentum coefficient that the user did not set stays None, and
            `with_momentum` sets it later. False: the momentum coefficient gets its default.

    Raises:
        ConfigurationError: A flag has an illegal value, or has no effect with this gradient codec.
    """
    row = CODECS[name]
    _check_error_feedback(row, values)
    if not leaves_momentum:
        given = {flag: value for flag, value in values.items() if value is not None}
        values = _MOMENTA | given
    codec = configured(row.base, values)
    if values.get("dense_below"):
        codec = configured(DenseBelow, values, inner=codec)
    if values.get("error_feedback"):
        codec = configured(ErrorFeedback, values, inner=codec, carry=0.0)
    if row.wrap is not None:
        codec = row.wrap(codec, values, nb_workers)
    epochs = values.get("warmup_epochs")
    epochs = row.warmup_epochs if epochs is None else epochs
    return configured(WarmUp, values, inner=codec, epochs=epochs) if epochs else codec


def _check_error_feedback(row: CodecEntry, values: Mapping[str, Any]) -> None:
    """Raise an error for flags of a residual (unsent part of updates) without a residual."""
    if not values.get("error_feedback"):
        for name in ("error_decay", "error_ahead"):
            value = values.get(name)
            if row.options.get(name, _ERROR_FEEDBACK).is_given(value):
                raise ConfigurationError(
                    f"--{name}={value:g} without --error_feedback: there is no residual (unsent "
                    f"part of updates). Set --error_feedback too, or leave --{name} out."
                )
    elif row.base is Dense and values.get("value_dtype") in (None, "float32"):
        raise ConfigurationError(
            "--error_feedback with --codec=dense and --value_dtype=float32: every entry is sent "
            "exactly, so there is no error to feed back. Leave out --error_feedback, or change "
            "--codec or --value_dtype."
        )
