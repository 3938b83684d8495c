"""Composition of a training method from flags: each policy (codec, optimizer ...) is built."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Self

from thinwire.ops import collectives
from thinwire.ops.aggregation.aggregates import AGGREGATES, Mean
from thinwire.ops.codecs.registry import build_codec
from thinwire.ops.collectives import THROUGH_PS
from thinwire.ops.downlink.registry import DOWN_CODECS
from thinwire.ops.methods import settings
from thinwire.ops.methods.method import INTERFACES, METHODS, Method
from thinwire.ops.methods.validation import check_dense, rule_for, validate
from thinwire.ops.offer import CLOCKS, Offer
from thinwire.ops.optimizers.base import LocalStep, ServerUpdate
from thinwire.ops.optimizers.local import LOCAL_OPTIMIZERS
from thinwire.ops.optimizers.outer import OUTER_OPTIMIZERS
from thinwire.ops.optimizers.script import AwaitedUpdate, server_update
from thinwire.ops.optimizers.server import OPTIMIZERS, SCRIPT, OptimizerUpdate
from thinwire.ops.optimizers.slots import Slot
from thinwire.ops.options import above_zero, choice, number, switch
from thinwire.ops.pacing.registry import PACERS
from thinwire.ops.policy import Policy, configured, setting
from thinwire.ops.privacy.central import CentralPrivacy, privacy_of
from thinwire.ops.routing.registry import ROUTERS
from thinwire.ops.sharding import placement
from thinwire.ops.sync.base import SyncRule
from thinwire.ops.sync.drawn import DrawnSync
from thinwire.ops.sync.groups import AutoGroups
from thinwire.ops.sync.rule import make_rule
from thinwire.ops.types import ConfigurationError, Kind
from thinwire.ops.weighting.registry import WEIGHTINGS

#: Learning rate of an adaptive Keras optimizer on the parameter server if neither a flag nor the
#: training method sets a rate.
_ADAPTIVE_RATE = 0.01


@dataclasses.dataclass(frozen=True)
class Choices(Policy):
    """The user's choices that describe a training method; `of` makes an object from all flags.

    Attributes:
        method: Name of the training method, a key of METHODS.
        nb_workers: Number of workers of the run.
        overrides: Policy interface -> the user's value of its flag, which replaces the training
            method's value; None if the user has not given the flag.
        values: Flag of a policy -> its value, for the flags that the user has given. For another
            flag the training method's value counts, or the policy's default if the training method
            has no value.
        auto_groups: Settings for forming worker groups from measured speeds (--groups=auto); None
            if the worker groups do not change.
        seed: Random seed of the run.
        learning_rate: Initial learning rate of the run.
        schedule_clock: Count that is the argument of a script's learning rate schedule.
        bn_sync: True to average the moving statistics of BatchNorm layers over the workers.
        overlap: True to compute the next gradient during an exchange.
        collective: THROUGH_PS, or the name of the all-reduce among the workers.
        aggregate: Name of the statistic that merges the updates of a round.
        placement: Name of the policy that divides the model among the shards.
    """

    method: str
    nb_workers: int
    overrides: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    auto_groups: AutoGroups | None = None
    seed: int = 0
    learning_rate: float = setting(
        number("learning_rate", 0.02, "Initial learning rate.", "factor", rule=above_zero()),
        shown=True,
    )
    overlap: bool = setting(
        switch(
            "overlap",
            "Compute the next gradient during an exchange; the gradient is then one step staler.",
            default=None,
            unset="on where a script's own optimizer steps on its worker",
        ),
        False,
        shown=True,
    )
    collective: str = setting(
        choice(
            "collective",
            THROUGH_PS,
            "Nodes that sum the updates of a round of bsp or esync: the PS, or the workers by an "
            "all-reduce over a ring, a butterfly or blocks.",
            (THROUGH_PS, *collectives.REGISTRY),
        ),
        shown=True,
    )
    schedule_clock: str = setting(
        choice(
            "schedule_clock",
            "batches",
            "Count that is the step of the learning-rate schedule in a script's optimizer: the "
            "script's batches that the run has consumed, or the optimizer's own steps.",
            CLOCKS,
        )
    )
    bn_sync: bool = setting(
        switch(
            "bn_sync",
            "Average the moving statistics of BatchNorm layers over the workers.",
            default=True,
        )
    )
    aggregate: str = setting(
        choice(
            "aggregate",
            Mean.name,
            "Statistic that merges the updates of a synchronous worker group, entry by entry.",
            AGGREGATES,
        ),
        shown=True,
    )
    placement: str = setting(
        choice(
            "placement",
            "hash",
            "Placement of the model on PS shards: hash, large tensors in equal slices, others on "
            "the least loaded shard; speed, blocks of layers by the shards' speed.",
            placement.REGISTRY,
        )
    )

    @classmethod
    def of(
        cls,
        method: str,
        nb_workers: int,
        overrides: Mapping[str, str | None] | None = None,
        **values: Any,
    ) -> Self:
        """Return the choices from the values of flags, and of `auto_groups` and `seed`.

        Raises:
            TypeError: A name in `values` is neither a flag of a policy nor a field.
        """
        own = {field.name for field in dataclasses.fields(cls)}
        fields = {name: values[name] for name in values if name in own and values[name] is not None}
        others = {
            name: value for name, value in values.items() if name not in own and value is not None
        }
        unknown = others.keys() - flags_of_policies()
        if unknown:
            raise TypeError(f"{sorted(unknown)}: expected names of flags of policies")
        return cls(method, nb_workers, overrides or {}, others, **fields)


def flags_of_policies() -> set[str]:
    """Return the names of all flags that fields of policies declare."""
    return {*settings.all_options(), *settings.named(CentralPrivacy)}


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
    chosen = settings.row_with(choices.method, {**choices.values, **policies})
    _check_epochs(choices.values)
    # The values of the training method's row count like the user's.
    values = {**choices.values, **{k: v for k, v in chosen.items() if k not in INTERFACES}}
    aggregate = configured(AGGREGATES[choices.aggregate], values)
    privacy = privacy_of(values.get("dp_clip") or 0.0, values.get("dp_noise") or 0.0)
    rule = rule_for(_sync_rule(chosen["sync"], choices), choices.collective)
    if "weighting" not in policies:
        is_script = chosen["server_optimizer"] == SCRIPT
        counts_all_alike = aggregate.is_robust or privacy.adds_noise
        name = _weighting(chosen["weighting"], rule, counts_all_alike, is_script)
        chosen = chosen | {"weighting": name}
    local = _local(choices, values)
    codec = build_codec(chosen["codec"], values, choices.nb_workers, local.brings_weights)
    pacer = configured(PACERS[chosen["pacer"]], values)
    kind = Kind.DELTA if Kind.DELTA in (pacer.kind, codec.kind) else Kind.GRADIENT
    method = Method(
        name=choices.method,
        pacer=pacer,
        codec=privacy.around(codec),
        down_codec=configured(DOWN_CODECS[chosen["down_codec"]], values),
        router=configured(ROUTERS[chosen["router"]], values),
        sync=rule,
        weighting=configured(WEIGHTINGS[chosen["weighting"]], values),
        server=_server(chosen["server_optimizer"], values, kind),
        choices={name: str(value) for name, value in chosen.items()},
        local=local,
        schedule_clock=choices.schedule_clock,
        bn_sync=choices.bn_sync,
        placement=configured(placement.REGISTRY[choices.placement], values),
        collective=choices.collective,
        overlap=choices.overlap,
        aggregate=aggregate,
        privacy=privacy,
    )
    _refuse_idle(method, chosen, choices)
    return dataclasses.replace(method, warnings=tuple(validate(method)))


def _refuse_idle(method: Method, chosen: Mapping[str, str], choices: Choices) -> None:
    """Raise an error if the user set a flag that no policy of the training method has."""
    used = (
        *(method.pacer, method.down_codec, method.router, method.sync, method.weighting),
        *(method.server, method.local, method.placement, method.aggregate),
        *((choices.auto_groups,) if choices.auto_groups else ()),
    )
    names = {
        **chosen,
        "local_optimizer": method.local.optimizer,
        "aggregate": choices.aggregate,
        "placement": choices.placement,
    }
    settings.refuse_idle(names, [type(policy) for policy in used], choices.values)


def _check_epochs(values: Mapping[str, Any]) -> None:
    """Raise an error for --local_epochs with --local_steps."""
    if values.get("local_epochs") and values.get("local_steps") is not None:
        raise ConfigurationError(
            f"--local_epochs={values['local_epochs']} and --local_steps={values['local_steps']} "
            "were both given, and both set the length of a round; leave one of the two flags out."
        )


def _sync_rule(name: str, choices: Choices) -> SyncRule:
    values = choices.values
    plain = make_rule(name, choices.nb_workers, values, choices.auto_groups, choices.seed)
    if values.get("fraction") in (None, 1.0) and values.get("draws") is None:
        return plain
    if name != "bsp":
        flag = (
            "--draws" if values.get("draws") is not None else f"--fraction={values['fraction']:g}"
        )
        raise ConfigurationError(
            f"{flag} selects the workers that train in each round, but with --sync={name} the "
            f"workers have no common rounds. Use --sync=bsp, or leave {flag} out."
        )
    fraction = values.get("fraction") or 1.0
    return configured(
        DrawnSync, values, nb_workers=choices.nb_workers, fraction=fraction, seed=choices.seed
    )


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


def _local(choices: Choices, values: Mapping[str, Any]) -> LocalStep:
    """Return the optimizer of local steps.

    The optimizer of local steps gets --local_lr as a factor on --learning_rate, so that the
    learning rate schedule (--lr_schedule) also applies to local steps.
    """
    name, rate = values.get("local_optimizer") or "sgd", values.get("local_lr")
    if name not in LOCAL_OPTIMIZERS:
        raise ConfigurationError(
            f"--local_optimizer={name!r}: expected one of {', '.join(LOCAL_OPTIMIZERS)}."
        )
    usual = {"local_momentum": 0.9} if name == "momentum" else {}
    factor = {} if rate is None else {"local_lr": rate / choices.learning_rate}
    return configured(LOCAL_OPTIMIZERS[name], {**usual, **values, **factor})


def _server(name: str, values: Mapping[str, Any], kind: Kind) -> ServerUpdate:
    """Return the optimizer with which the parameter server applies workers' updates.

    If workers send changes of weights, some values of --server_optimizer select an outer optimizer,
    which steps with the mean change of weights.
    """
    if name == SCRIPT:
        return AwaitedUpdate()
    if values.get("global_lr_schedule") and kind is Kind.GRADIENT:
        raise ConfigurationError(
            "--global_lr_schedule applies to changes of weights, but the workers send gradients: "
            "their learning rate is --learning_rate with --lr_schedule. Leave --global_lr_schedule "
            "out, or take local steps (--pacer=esync, or fixed with --local_steps above 1)."
        )
    if name in OUTER_OPTIMIZERS and (kind is Kind.DELTA or name not in OPTIMIZERS):
        return configured(OUTER_OPTIMIZERS[name], values)
    return configured(OptimizerUpdate, {**_usual_rates(name, kind), **values}, optimizer=name)


def _usual_rates(name: str, kind: Kind) -> dict[str, float]:
    """Return the default momentum and outer rate of a Keras optimizer on the parameter server.

    An adaptive optimizer, such as Adam, gets a small default learning rate, because it changes each
    weight by about the rate, for any size of the update.
    """
    is_sgd = OPTIMIZERS[name] == "SGD"
    rate = 1.0 if is_sgd or kind is Kind.GRADIENT else _ADAPTIVE_RATE
    return {"momentum": 0.9 if name == "momentum" else 0.0, "global_lr": rate}


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
