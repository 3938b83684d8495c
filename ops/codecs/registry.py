"""Registry of gradient codecs: values of --codec, and the wrappers that flags add to a codec."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from thinwire.ops.codecs.base import Codec
from thinwire.ops.codecs.chunked_top_k import ChunkedTopK
from thinwire.ops.codecs.dense import Dense, RandomK, Sparsifier
from thinwire.ops.codecs.error_feedback import ErrorFeedback, MomentumCorrection
from thinwire.ops.codecs.power_sgd import PowerSgd
from thinwire.ops.codecs.top_k import TopK
from thinwire.ops.codecs.wrappers import Clip, DenseBelow, Descend, RateAtSend, WarmUp
from thinwire.ops.types import CHUNK_ENTRIES, ConfigurationError, configured


@dataclasses.dataclass(frozen=True, kw_only=True)
class CodecChoices:
    """Values of the flags of gradient codecs, one field per flag; None: the codec's default."""

    compression_rate: float = 0.01
    value_dtype: str | None = None
    selection: str = "exact"
    chunk: int = CHUNK_ENTRIES
    chunk_k: int | None = None
    error_feedback: bool | None = None
    error_decay: float | None = None
    error_ahead: float = 0.0
    dense_below: int = 0
    warmup_epochs: int | None = None
    dgs_momentum: float | None = None
    dgc_momentum: float | None = None
    dgc_nesterov: bool = False
    dgc_masking: bool = True
    dgc_clip_norm: float = 0.0
    dgc_clip_scope: str = "model"
    powersgd_rank: int = 2


#: Flag -> default momentum of the codec, used if neither the flag nor a script's optimizer sets a
#: momentum.
_MOMENTA = {"dgs_momentum": 0.7, "dgc_momentum": 0.9}

# function of (codec, flags of codecs, number of workers) that returns the wrapped codec
Wrap = Callable[[Codec, CodecChoices, int], Codec]


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
    def heeds(self) -> frozenset[str]:
        """Names of the flags (fields of `CodecChoices`) that have an effect on a --codec value."""
        names = {field.name for field in dataclasses.fields(self.base)} | set(self.own)
        if issubclass(self.base, Sparsifier):
            names.add("warmup_epochs")
        if self.base is not Dense:
            names.add("dense_below")
        if self.wrap is None:
            names |= {"error_feedback", "error_decay", "error_ahead"}
        return frozenset(names)


def _gradient_dropping(codec: Codec, choices: CodecChoices, nb_workers: int) -> Codec:
    """Gradient Dropping: v <- v + eta h, h the gradient; send and zero the largest entries of v."""
    return Descend(ErrorFeedback(codec))


def _dual_way(codec: Codec, choices: CodecChoices, nb_workers: int) -> Codec:
    """DGS: a <- a + eta h, h the gradient; send a's largest entries, then multiply them by m."""
    return Descend(ErrorFeedback(codec, choices.dgs_momentum))


def _deep(codec: Codec, choices: CodecChoices, nb_workers: int) -> Codec:
    """DGC: clip gradient h; u <- m u + h; v <- v + u; send rate * v; zero u and v where sent."""
    codec = MomentumCorrection(
        ErrorFeedback(codec),
        momentum=choices.dgc_momentum,
        nesterov=choices.dgc_nesterov,
        masking=choices.dgc_masking,
    )
    if choices.dgc_clip_norm:
        codec = Clip(codec, choices.dgc_clip_norm / nb_workers**0.5, choices.dgc_clip_scope)
    elif choices.dgc_clip_scope != "model":
        raise ConfigurationError(
            f"--dgc_clip_scope={choices.dgc_clip_scope} without --dgc_clip_norm: no gradient is "
            "clipped. Set --dgc_clip_norm, or leave --dgc_clip_scope out."
        )
    return RateAtSend(codec)


def _low_rank(codec: Codec, choices: CodecChoices, nb_workers: int) -> Codec:
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
    name: str, choices: CodecChoices, nb_workers: int = 1, leaves_momentum: bool = False
) -> Codec:
    """Return the gradient codec `name` with all wrappers that the flags in `choices` add.

    Args:
        name: Name of the gradient codec, a key of CODECS.
        choices: Values of the flags of gradient codecs that the user set.
        nb_workers: Number of workers in the training run.
        leaves_momentum: True: a momentum coefficient that the user did not set stays None, and
            `with_momentum` sets it later. False: the momentum coefficient gets its default.

    Raises:
        ConfigurationError: A flag has an illegal value, or has no effect with this gradient codec.
    """
    row = CODECS[name]
    _refuse_idle(name, row, choices)
    if not leaves_momentum:
        missing: dict[str, Any] = {
            flag: momentum for flag, momentum in _MOMENTA.items() if getattr(choices, flag) is None
        }
        choices = dataclasses.replace(choices, **missing)
    codec = configured(row.base, choices)
    if choices.dense_below:
        codec = DenseBelow(codec, choices.dense_below)
    if choices.error_feedback:
        decay = choices.error_decay
        codec = ErrorFeedback(
            codec, decay=1.0 if decay is None else decay, ahead=choices.error_ahead
        )
    if row.wrap is not None:
        codec = row.wrap(codec, choices, nb_workers)
    epochs = row.warmup_epochs if choices.warmup_epochs is None else choices.warmup_epochs
    if epochs:
        codec = WarmUp(codec, choices.compression_rate, epochs)
    return codec


def _refuse_idle(name: str, row: CodecEntry, choices: CodecChoices) -> None:
    """Raise an error if the user has set a flag that has no effect on the gradient codec."""
    usual = {field.name: field.default for field in dataclasses.fields(CodecChoices)}
    heeded = row.heeds | {"compression_rate", "value_dtype"}
    for setting, default in usual.items():
        value = getattr(choices, setting)
        is_off = value is False and default is None
        if value != default and not is_off and setting not in heeded:
            codecs = [codec for codec, entry in CODECS.items() if setting in entry.heeds]
            raise ConfigurationError(
                f"--{setting}={value} has no effect with --codec={name}; the flag is for "
                f"--codec={', '.join(codecs)}. Leave --{setting} out, or change --codec."
            )
    if choices.error_decay is not None and not choices.error_feedback:
        raise ConfigurationError(
            f"--error_decay={choices.error_decay:g} without --error_feedback: there is no residual "
            "(unsent part of updates) to decay. Set both flags, or leave out --error_decay."
        )
    if choices.error_ahead and not choices.error_feedback:
        raise ConfigurationError(
            f"--error_ahead={choices.error_ahead:g} without --error_feedback: there is no "
            "residual (unsent part of earlier updates) with which local steps could begin. Set "
            "--error_feedback too, or leave out --error_ahead."
        )
    is_exact = choices.value_dtype in (None, "float32")
    if choices.error_feedback and row.base is Dense and is_exact:
        raise ConfigurationError(
            "--error_feedback with --codec=dense and --value_dtype=float32: every entry is sent "
            "exactly, so there is no error to feed back. Leave out --error_feedback, or change "
            "--codec or --value_dtype."
        )
