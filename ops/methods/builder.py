"""From what the command line says to a method: six policies with their hyper-parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from thinwire.ops.aggregation import base as aggregation_base
from thinwire.ops.codecs.registry import CodecChoices, build_codec
from thinwire.ops.collectives import THROUGH_PS
from thinwire.ops.downlink.registry import DOWN_CODECS, refuse_idle
from thinwire.ops.methods.method import METHODS, Method
from thinwire.ops.methods.validation import rule_for
from thinwire.ops.optimizers.local import LocalUpdate
from thinwire.ops.optimizers.server import ServerUpdate
from thinwire.ops.pacing import pacers
from thinwire.ops.routing.dgt_choices import DgtChoices
from thinwire.ops.routing.registry import ROUTERS
from thinwire.ops.sharding import placement
from thinwire.ops.sync.groups import AutoGroups
from thinwire.ops.sync.rule import SYNC_RULES, GroupSync, make_rule
from thinwire.ops.types import ConfigurationError, Kind
from thinwire.ops.weighting.base import WEIGHTINGS

#: Bound of --sync=ssp when neither flag nor method says otherwise.
DEFAULT_SSP_BOUND = 3


@dataclasses.dataclass(frozen=True)
class Choices(CodecChoices, DgtChoices):
    """What the command line says about the method; None means "as the method has it"."""

    method: str
    nb_workers: int
    overrides: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    down_ratio: float | None = None  # of down codecs sparse and auto, like the next two
    down_value_dtype: str = "float32"
    resync_every: int = 0
    max_staleness: int = 0
    local_steps: int = 1
    eps: str = "auto"  # of pacer esync, like the next three
    query: str = "blocking"
    smoothing: str = "ema:0.5"
    max_local_steps: int = 0
    groups: tuple[tuple[int, ...], ...] | None = None
    auto_groups: AutoGroups | None = None
    bound: int | None = None
    window: int = 1024
    beyond_window: str = "count"
    dcasgd_lambda: float | None = None
    dcasgd_variant: str = "constant"
    dcasgd_decay: float | None = None
    dcasgd_backup: str = "per_worker"
    momentum: float | None = None
    weight_decay: float = 0.0
    global_lr: float = 1.0
    local_optimizer: str = "sgd"
    local_momentum: float | None = None
    local_opt_state: str = "keep"
    local_lr: float | None = None  # if given, `learning_rate` is what it is compared with
    learning_rate: float = 0.02
    bn_sync: bool = True
    placement: str = "hash"
    ps_speeds: tuple[float, ...] = ()
    collective: str = THROUGH_PS
    overlap: bool = False
    aggregate: str = aggregation_base.Mean.name
    trim_fraction: float | None = None  # of trimmed_mean


def compose(choices: Choices) -> Method:
    """Build the method that the choices ask for.

    Raises:
        ConfigurationError: Unknown names, illegal values, or choices that exclude each other.
    """
    if choices.method not in METHODS:
        raise ConfigurationError(
            f"--method={choices.method!r}: expected one of {', '.join(METHODS)}."
        )
    given = {seam: value for seam, value in choices.overrides.items() if value is not None}
    seams = METHODS[choices.method] | given
    refuse_idle(seams["down_codec"], vars(choices))
    _refuse_idle("router", ROUTERS, seams["router"], choices)
    _refuse_idle("weighting", WEIGHTINGS, seams["weighting"], choices)
    codec = build_codec(seams["codec"], choices, choices.nb_workers, choices.learning_rate)
    # Changes that hold the learning rate are added: an optimizer would apply a rate once more.
    feeds = "server_optimizer" in given and codec.kind is Kind.GRADIENT
    method = Method(
        name=choices.method,
        pacer=_pick(pacers.PACERS, seams["pacer"], choices),
        codec=codec,
        down_codec=_pick(DOWN_CODECS, seams["down_codec"], choices),
        router=_pick(ROUTERS, seams["router"], choices),
        sync=rule_for(_sync_rule(seams["sync"], choices), choices.collective),
        weighting=_pick(WEIGHTINGS, seams["weighting"], choices),
        server=_server(seams["server_optimizer"], choices, feeds),
        seams=seams,
        local=_local(choices),
        bn_sync=choices.bn_sync,
        placement=_placement(choices),
        collective=choices.collective,
        overlap=choices.overlap,
        aggregate=_aggregate(choices),
    )
    return method


def _pick(registry: Mapping[str, type], name: str, choices: Choices) -> Any:
    """Make the policy `name`, giving its fields the choices of the same name."""
    policy = registry[name]
    fields = {field.name for field in dataclasses.fields(policy)}
    return policy(**{key: value for key, value in vars(choices).items() if key in fields})


def _refuse_idle(seam: str, registry: Mapping[str, type], name: str, choices: Choices) -> None:
    """Refuse settings with the prefix of a policy that was not chosen."""
    usual = {field.name: field.default for field in dataclasses.fields(Choices)}
    for other, policy in registry.items():
        prefix = other.replace("_", "") + "_"
        own = [field.name for field in dataclasses.fields(policy) if other != name]
        for setting in (setting for setting in own if setting.startswith(prefix)):
            value = getattr(choices, setting)
            if value != usual[setting]:
                raise ConfigurationError(
                    f"--{setting}={value} is for --{seam}={other}, and this is --{seam}={name}; "
                    "change one."
                )


def _sync_rule(name: str, choices: Choices) -> GroupSync:
    takes_default = SYNC_RULES[name].needs_bound and choices.bound is None
    bound = DEFAULT_SSP_BOUND if takes_default else choices.bound
    return make_rule(name, choices.nb_workers, choices.groups, bound, choices.auto_groups)


def _placement(choices: Choices) -> placement.Placement:
    if choices.ps_speeds and choices.placement != "speed":
        raise ConfigurationError(
            f"--ps_speeds={','.join(f'{speed:g}' for speed in choices.ps_speeds)} is for "
            f"--placement=speed, and this is --placement={choices.placement}; change one."
        )
    return _pick(placement.REGISTRY, choices.placement, choices)  # type: ignore[no-any-return]


def _aggregate(choices: Choices) -> aggregation_base.Aggregate:
    name, fraction = choices.aggregate, choices.trim_fraction
    if name not in aggregation_base.AGGREGATES:
        raise ConfigurationError(
            f"--aggregate={name!r}: expected one of {', '.join(aggregation_base.AGGREGATES)}."
        )
    if fraction is None:
        return aggregation_base.AGGREGATES[name]()
    if name != aggregation_base.TrimmedMean.name:
        raise ConfigurationError(
            f"--trim_fraction={fraction:g} is for --aggregate=trimmed_mean, and this is "
            f"--aggregate={name}; change one."
        )
    return aggregation_base.TrimmedMean(fraction)


def _local(choices: Choices) -> LocalUpdate:
    """A local rate of its own follows the schedule: it is kept as a factor of the scheduled one."""
    default_momentum = 0.9 if choices.local_optimizer == "momentum" else 0.0
    momentum, rate = choices.local_momentum, choices.local_lr
    return LocalUpdate(
        optimizer=choices.local_optimizer,
        momentum=default_momentum if momentum is None else momentum,
        opt_state=choices.local_opt_state,
        rate_factor=1.0 if rate is None else rate / choices.learning_rate,
    )


def _server(name: str, choices: Choices, feeds_deltas: bool) -> ServerUpdate:
    default_momentum = 0.9 if name == "momentum" else 0.0
    return ServerUpdate(
        optimizer=name,
        momentum=default_momentum if choices.momentum is None else choices.momentum,
        weight_decay=choices.weight_decay,
        global_lr=choices.global_lr,
        feeds_deltas=feeds_deltas,
    )
