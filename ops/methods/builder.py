"""Composition of a training method from flags: each policy (codec, optimizer ...) is built."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.ops.aggregation.aggregates import Mean, TrimmedMean
from thinwire.ops.aggregation.base import Aggregate
from thinwire.ops.aggregation.registry import AGGREGATES
from thinwire.ops.codecs.registry import CodecChoices, build_codec
from thinwire.ops.collectives import THROUGH_PS
from thinwire.ops.downlink.registry import DOWN_CODECS, refuse_idle
from thinwire.ops.methods.method import BELONGS_TO, METHODS, Method, row_with
from thinwire.ops.methods.validation import check_dense, rule_for, validate
from thinwire.ops.offer import Offer
from thinwire.ops.optimizers.base import LocalStep, ServerUpdate
from thinwire.ops.optimizers.local import LOCAL_FLAGS, LOCAL_OPTIMIZERS, LocalUpdate
from thinwire.ops.optimizers.outer import OUTER_OPTIMIZERS
from thinwire.ops.optimizers.script import AwaitedUpdate, server_update
from thinwire.ops.optimizers.server import OPTIMIZERS, SCRIPT, OptimizerUpdate
from thinwire.ops.optimizers.slots import Slot
from thinwire.ops.pacing.registry import PACERS
from thinwire.ops.privacy.central import privacy_of
from thinwire.ops.routing.dgt_choices import DgtChoices
from thinwire.ops.routing.registry import ROUTERS
from thinwire.ops.sharding import placement
from thinwire.ops.sync.base import SyncRule
from thinwire.ops.sync.drawn import DrawnSync
from thinwire.ops.sync.groups import AutoGroups
from thinwire.ops.sync.rule import SYNC_RULES, make_rule
from thinwire.ops.types import ConfigurationError, Kind, Policy, configured
from thinwire.ops.weighting.registry import WEIGHTINGS

#: Staleness bound of --sync=ssp, in steps, if neither a flag nor the training method sets a bound.
DEFAULT_SSP_BOUND = 3
#: Learning rate of an adaptive Keras optimizer on the parameter server if neither a flag nor the
#: training method sets a rate.
_ADAPTIVE_RATE = 0.01


@dataclasses.dataclass(frozen=True)
class Choices(CodecChoices, DgtChoices):
    """Values of the flags that describe a training method.

    If a setting is None, the user has not given the flag: the training method's value counts, or
    the policy's default if the training method has no value.
    """

    method: str
    nb_workers: int
    overrides: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    # Settings of the downlink codecs (codecs of the shard servers' replies) sparse and auto.
    down_ratio: float | None = None
    down_value_dtype: str = "float32"
    resync_every: int = 0
    max_staleness: int = 0
    local_steps: int | None = None
    local_epochs: int = 0
    # Settings of the pacer esync (extra local steps while the slowest worker finishes).
    eps: str = "auto"
    query: str = "blocking"
    smoothing: str = "ema:0.5"
    max_local_steps: int = 0
    groups: tuple[tuple[int, ...], ...] | None = None
    auto_groups: AutoGroups | None = None
    bound: int | None = None
    fraction: float = 1.0
    draws: tuple[tuple[int, ...], ...] | None = None
    seed: int = 0
    window: int = 1024
    beyond_window: str = "count"
    dcasgd_lambda: float | None = None
    dcasgd_variant: str = "constant"
    dcasgd_decay: float | None = None
    dcasgd_backup: str = "per_worker"
    momentum: float | None = None
    weight_decay: float = 0.0
    global_lr: float | None = None
    global_lr_schedule: str | None = None
    server_beta_1: float | None = None
    server_beta_2: float | None = None
    server_tau: float | None = None
    server_v_start: str | None = None
    bias_correction: bool | None = None
    local_optimizer: str | None = None
    local_momentum: float | None = None
    local_weight_decay: float | None = None
    prox_mu: float | None = None
    local_opt_state: str = "keep"
    local_lr: float | None = None
    # learning rate of the run, by which the method divides `local_lr` to get a factor
    learning_rate: float = 0.02
    schedule_clock: str = "batches"
    bn_sync: bool = True
    placement: str = "hash"
    ps_speeds: tuple[float, ...] = ()
    collective: str = THROUGH_PS
    overlap: bool = False
    aggregate: str = Mean.name
    # Trimmed fraction of the aggregate trimmed_mean; None: the flag is not given.
    trim_fraction: float | None = None
    dp_clip: float = 0.0
    dp_noise: float = 0.0


def compose(choices: Choices) -> Method:
    """Build a training method from the flags' values, and check that its policies fit together.

    Raises:
        ConfigurationError: A policy's name is unknown, a flag's value is illegal, or two flags
            exclude each other.
    """
    if choices.method not in METHODS:
        raise ConfigurationError(
            f"--method={choices.method!r}: expected one of {', '.join(METHODS)}."
        )
    policies = {name: value for name, value in choices.overrides.items() if value is not None}
    settings = {name: getattr(choices, name) for name in BELONGS_TO}
    chosen = row_with(choices.method, settings | policies)
    _check_epochs(chosen["pacer"], choices)
    choices = dataclasses.replace(
        choices, **{name: chosen[name] for name in settings if name in chosen}
    )
    aggregate = _aggregate(choices)
    privacy = privacy_of(choices.dp_clip, choices.dp_noise)
    rule = rule_for(_sync_rule(chosen["sync"], choices), choices.collective)
    if "weighting" not in policies:
        is_script = chosen["server_optimizer"] == SCRIPT
        counts_all_alike = aggregate.is_robust or privacy.adds_noise
        name = _weighting(chosen["weighting"], rule, counts_all_alike, is_script)
        chosen = chosen | {"weighting": name}
    refuse_idle(chosen["down_codec"], vars(choices))
    _refuse_idle("router", ROUTERS, chosen["router"], choices)
    _refuse_idle("weighting", WEIGHTINGS, chosen["weighting"], choices)
    local = _local(choices)
    codec = build_codec(chosen["codec"], choices, choices.nb_workers, local.brings_weights)
    pacer = configured(PACERS[chosen["pacer"]], choices)
    kind = Kind.DELTA if Kind.DELTA in (pacer.kind, codec.kind) else Kind.GRADIENT
    method = Method(
        name=choices.method,
        pacer=pacer,
        codec=privacy.around(codec),
        down_codec=configured(DOWN_CODECS[chosen["down_codec"]], choices),
        router=configured(ROUTERS[chosen["router"]], choices),
        sync=rule,
        weighting=configured(WEIGHTINGS[chosen["weighting"]], choices),
        server=_server(chosen["server_optimizer"], choices, kind),
        choices={name: str(value) for name, value in chosen.items()},
        local=local,
        schedule_clock=choices.schedule_clock,
        bn_sync=choices.bn_sync,
        placement=_placement(choices),
        collective=choices.collective,
        overlap=choices.overlap,
        aggregate=aggregate,
        privacy=privacy,
    )
    return dataclasses.replace(method, warnings=tuple(validate(method)))


def _refuse_idle(
    interface: str, registry: Mapping[str, type[Policy]], name: str, choices: Choices
) -> None:
    """Raise an error if settings belong to a policy that the training method does not use."""
    defaults = {field.name: field.default for field in dataclasses.fields(Choices)}
    for other, policy in registry.items():
        prefix = other.replace("_", "") + "_"
        fields = [field.name for field in dataclasses.fields(policy) if other != name]
        for setting in (setting for setting in fields if setting.startswith(prefix)):
            value = getattr(choices, setting)
            if value != defaults[setting]:
                raise ConfigurationError(
                    f"--{setting}={value} is for --{interface}={other}, but this run has "
                    f"--{interface}={name}; change one of the two flags."
                )


def _check_epochs(pacer: str, choices: Choices) -> None:
    """Raise an error for --local_epochs with --local_steps, or with a pacer without epochs."""
    if choices.local_epochs and choices.local_steps is not None:
        raise ConfigurationError(
            f"--local_epochs={choices.local_epochs} and --local_steps={choices.local_steps} were "
            "both given, and both set the length of a round; leave one of the two flags out."
        )
    if choices.local_epochs and pacer != "fixed":
        raise ConfigurationError(
            f"--local_epochs={choices.local_epochs} is for --pacer=fixed, but this run has "
            f"--pacer={pacer}; change one of the two flags."
        )


def _sync_rule(name: str, choices: Choices) -> SyncRule:
    if choices.fraction != 1.0 or choices.draws is not None:
        return _drawn_rule(name, choices)
    takes_default = SYNC_RULES[name].needs_bound and choices.bound is None
    bound = DEFAULT_SSP_BOUND if takes_default else choices.bound
    return make_rule(name, choices.nb_workers, choices.groups, bound, choices.auto_groups)


def _drawn_rule(name: str, choices: Choices) -> SyncRule:
    """Return a rule with random workers in each round; reject a --sync without common rounds."""
    if name != "bsp":
        flag = "--draws" if choices.draws is not None else f"--fraction={choices.fraction:g}"
        raise ConfigurationError(
            f"{flag} selects the workers that train in each round, but with --sync={name} the "
            f"workers have no common rounds. Use --sync=bsp, or leave {flag} out."
        )
    make_rule(name, choices.nb_workers, choices.groups, choices.bound, choices.auto_groups)
    return DrawnSync(choices.nb_workers, choices.fraction, choices.seed, choices.draws)


def _weighting(name: str, rule: SyncRule, counts_all_alike: bool, is_script: bool) -> str:
    """Return the name of the policy that scales the workers' updates, usually `name`.

    A script's optimizer averages gradients over all examples, so the updates of a round are
    weighted by their numbers of examples. With a robust aggregate, or with noise for privacy, all
    updates get equal weights, so that a worker cannot count more by reporting more examples.
    """
    if counts_all_alike:
        return "none" if name == "samples" else name
    merges_several = rule.waits_for_start or rule.auto is not None
    return "samples" if is_script and name == "none" and merges_several else name


def _placement(choices: Choices) -> placement.Placement:
    if choices.ps_speeds and choices.placement != "speed":
        raise ConfigurationError(
            f"--ps_speeds={','.join(f'{speed:g}' for speed in choices.ps_speeds)} is for "
            f"--placement=speed, but this run has --placement={choices.placement}; change one."
        )
    return configured(placement.REGISTRY[choices.placement], choices)


def _aggregate(choices: Choices) -> Aggregate:
    name, fraction = choices.aggregate, choices.trim_fraction
    if name not in AGGREGATES:
        raise ConfigurationError(f"--aggregate={name!r}: expected one of {', '.join(AGGREGATES)}.")
    if fraction is None:
        return AGGREGATES[name]()
    if name != TrimmedMean.name:
        raise ConfigurationError(
            f"--trim_fraction={fraction:g} is for --aggregate=trimmed_mean, but this run has "
            f"--aggregate={name}; change one of the two flags."
        )
    return TrimmedMean(fraction)


def _local(choices: Choices) -> LocalStep:
    """Return the optimizer of local steps; raise an error for settings that the optimizer lacks.

    The optimizer of local steps gets --local_lr as a factor on --learning_rate, so that the
    learning rate schedule (--lr_schedule) also applies to local steps.
    """
    name = choices.local_optimizer or LocalUpdate.optimizer
    default_momentum = 0.9 if name == "momentum" else 0.0
    momentum, rate = choices.local_momentum, choices.local_lr
    values = {
        "optimizer": name,
        "momentum": default_momentum if momentum is None else momentum,
        "opt_state": choices.local_opt_state,
        "rate_factor": 1.0 if rate is None else rate / choices.learning_rate,
        "weight_decay": choices.local_weight_decay,
        "prox_mu": choices.prox_mu or 0.0,
    }
    if name not in LOCAL_OPTIMIZERS:
        raise ConfigurationError(
            f"--local_optimizer={name!r}: expected one of {', '.join(LOCAL_OPTIMIZERS)}."
        )
    policy: Any = LOCAL_OPTIMIZERS[name]
    accepted = {field.name for field in dataclasses.fields(policy)}
    for field in dataclasses.fields(LocalUpdate):
        if field.name not in accepted and values[field.name] != field.default:
            flag = LOCAL_FLAGS[field.name]
            raise ConfigurationError(
                f"--{flag}={getattr(choices, flag)} has no effect with --local_optimizer={name}: "
                f"workers take steps with the script's compiled optimizer. Leave --{flag} out, "
                "and set the equivalent argument of the compiled optimizer."
            )
    local: LocalStep = policy(**{key: value for key, value in values.items() if key in accepted})
    return local


def _server(name: str, choices: Choices, kind: Kind) -> ServerUpdate:
    """Return the optimizer with which the parameter server applies workers' updates.

    If workers send changes of weights, some values of --server_optimizer select an outer optimizer,
    which steps with the mean change of weights.
    """
    if name == SCRIPT:
        return _awaited(choices)
    if choices.global_lr_schedule and kind is Kind.GRADIENT:
        raise ConfigurationError(
            "--global_lr_schedule applies to changes of weights, but the workers send gradients: "
            "their learning rate is --learning_rate with --lr_schedule. Leave --global_lr_schedule "
            "out, or take local steps (--pacer=esync, or fixed with --local_steps above 1)."
        )
    if name in OUTER_OPTIMIZERS and (kind is Kind.DELTA or name not in OPTIMIZERS):
        policy = OUTER_OPTIMIZERS[name]
    else:
        policy, choices = OptimizerUpdate, _with_usual_rates(name, choices, kind)
    _refuse_others(name, policy, choices)
    named = {} if policy is not OptimizerUpdate else {"optimizer": name}
    return configured(policy, types.SimpleNamespace(**vars(choices) | named))


def _with_usual_rates(name: str, choices: Choices, kind: Kind) -> Choices:
    """Set the default momentum and learning rate of a Keras optimizer if no flag gives them.

    An adaptive optimizer, such as Adam, gets a small default learning rate, because it changes each
    weight by about the rate, for any size of the update.
    """
    is_sgd = OPTIMIZERS[name] == "SGD"
    momentum, rate = choices.momentum, choices.global_lr
    if momentum is None:
        momentum = 0.9 if name == "momentum" else 0.0
    if rate is None:
        rate = 1.0 if is_sgd or kind is Kind.GRADIENT else _ADAPTIVE_RATE
    return dataclasses.replace(choices, momentum=momentum, global_lr=rate)


def _refuse_others(name: str, policy: type[ServerUpdate], choices: Choices) -> None:
    """Raise an error if the user gives a setting that the chosen server optimizer lacks."""
    policies: dict[str, type[ServerUpdate]] = {"sgd": OptimizerUpdate, **OUTER_OPTIMIZERS}
    fields = {cls: {f.name for f in dataclasses.fields(cls)} for cls in policies.values()}
    for setting in sorted(set().union(*fields.values()) - fields[policy] - {"optimizer"}):
        value = getattr(choices, setting)
        if value:
            users = [other for other, cls in policies.items() if setting in fields[cls]]
            raise ConfigurationError(
                f"--{setting}={value} has no effect with --server_optimizer={name}; it is for "
                f"--server_optimizer={', '.join(users)} (an optimizer that Keras has too: only "
                f"with changes of weights). Leave --{setting} out, or change --server_optimizer."
            )


def _awaited(choices: Choices) -> AwaitedUpdate:
    """Return a placeholder for a script's optimizer; reject flags for settings of the script."""
    for flag, value in (("momentum", choices.momentum), ("weight_decay", choices.weight_decay)):
        if value:
            raise ConfigurationError(
                f"--{flag}={value:g}: the PS applies the script's compiled optimizer with its own "
                f"{flag}. Leave --{flag} out, and give it to that optimizer."
            )
    return AwaitedUpdate()


def adopt(method: Method, offer: Offer, initial: Sequence[Sequence[Slot]] = ()) -> Method:
    """Return the training method with the script's optimizers, if the PS steps with them.

    Workers and parameter server divide the model with the training method that `adopt` returns:
    `adopt(method, offer).place(spec, num_shards)`. Workers and servers compare the fingerprints of
    the training method before `adopt`, not of the method that `adopt` returns.

    Args:
        method: Training method from the flags.
        offer: A worker's description of its script.
        initial: Optimizer slots with which a shard server's optimizers start, for `server_update`.

    Raises:
        ConfigurationError: The offer (a worker's description of its script) names a class that is
            not on the allow-list, has no optimizer, or has an optimizer that cannot step with the
            codec's updates.
    """
    if not method.awaits_offer:
        return method
    adopted = dataclasses.replace(method, server=server_update(offer, initial))
    check_dense(adopted)
    return adopted
