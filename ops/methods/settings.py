"""Flags of all policies, by policy interface, read from the fields of the policies' dataclasses."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from thinwire.ops.aggregation.aggregates import AGGREGATES
from thinwire.ops.codecs.registry import CODECS
from thinwire.ops.downlink.registry import DOWN_CODECS
from thinwire.ops.methods.method import METHODS
from thinwire.ops.optimizers.local import LOCAL_OPTIMIZERS
from thinwire.ops.optimizers.outer import OUTER_OPTIMIZERS
from thinwire.ops.optimizers.server import OPTIMIZERS, SCRIPT, OptimizerUpdate
from thinwire.ops.options import Option
from thinwire.ops.pacing.registry import PACERS
from thinwire.ops.policy import Policy, options_of
from thinwire.ops.routing.registry import ROUTERS
from thinwire.ops.sharding import placement
from thinwire.ops.sync.drawn import DrawnSync
from thinwire.ops.sync.groups import AutoGroups
from thinwire.ops.sync.rule import SYNC_RULES
from thinwire.ops.types import ConfigurationError
from thinwire.ops.weighting.registry import WEIGHTINGS

#: Hyper-parameter of a row of METHODS -> the hyper-parameter that owns it, for those that no policy
#: interface owns.
_OWNED = {"error_decay": "error_feedback", "local_weight_decay": "local_optimizer"}
#: Hyper-parameters of a worker's local steps, which the pacer owns.
_OF_LOCAL_STEPS = ("local_optimizer", "prox_mu")
#: Flags that every run may set, so that training methods can be compared with the same flags.
_FREE = ("compression_rate", "value_dtype")


#: Policy interface with flags, in the order of the help text -> its registry: the value of the
#: interface's flag -> class of the policy.
REGISTRIES: dict[str, dict[str, Any]] = {
    "pacer": PACERS,
    "local_optimizer": LOCAL_OPTIMIZERS,
    "codec": CODECS,
    "down_codec": DOWN_CODECS,
    "router": ROUTERS,
    "sync": SYNC_RULES,
    "weighting": WEIGHTINGS,
    "server_optimizer": OUTER_OPTIMIZERS,
    "aggregate": AGGREGATES,
    "placement": placement.REGISTRY,
}
INTERFACES = tuple(REGISTRIES)


def policies_of(interface: str) -> dict[str, tuple[type[Policy], ...]]:
    """Return the value of a policy interface's flag -> classes whose fields declare its flags."""
    if interface == "sync":
        more = {"bsp": (DrawnSync,), "gsp": (AutoGroups,)}
        return {name: (policy, *more.get(name, ())) for name, policy in SYNC_RULES.items()}
    if interface == "server_optimizer":
        known: dict[str, tuple[type[Policy], ...]] = dict.fromkeys(OPTIMIZERS, (OptimizerUpdate,))
        for name, policy in OUTER_OPTIMIZERS.items():
            known[name] = (*known.get(name, ()), policy)
        return known | {SCRIPT: ()}
    return {name: (policy,) for name, policy in REGISTRIES[interface].items()}


def options_by_value(interface: str) -> dict[str, dict[str, Option]]:
    """Return value of a policy interface's flag -> flag -> option, for the policy's own flags."""
    if interface == "codec":
        return {name: entry.options for name, entry in CODECS.items()}
    return {name: named(*policies) for name, policies in policies_of(interface).items()}


def named(*policies: type[Policy]) -> dict[str, Option]:
    """Return flag -> option, for all flags that the fields of some policies declare."""
    options = (option for policy in policies for option in options_of(policy).values())
    return {option.name: option for option in options}


def options(interface: str) -> dict[str, Option]:
    """Return flag -> option, for all flags of the policies of an interface."""
    found = _of_all(options_by_value(interface))
    return {name: _as_flag(option) for name, option in found.items()}


def _of_all(known: Mapping[str, Mapping[str, Option]]) -> dict[str, Option]:
    """Return flag -> option, from the first policy that declares the flag."""
    found: dict[str, Option] = {}
    for own in known.values():
        found |= {name: option for name, option in own.items() if name not in found}
    return found


def all_options() -> dict[str, Option]:
    """Return flag -> option as declared, for the flags of the policies of all interfaces."""
    return _of_all({interface: _of_all(options_by_value(interface)) for interface in INTERFACES})


def _as_flag(option: Option) -> Option:
    """Return the option as a flag: without a default if a row of METHODS may set the value."""
    rows = of_methods(option.name)
    if not rows:
        return option
    usual = option.unset or dataclasses.replace(option, values=(), unit="").values_and_default
    usual = usual.rpartition("default ")[2]
    unset = rows + (usual if " with " in usual else f"else {usual}")
    return dataclasses.replace(option, default=None, unset=unset)


def of_methods(name: str) -> str:
    """Return help text with a hyper-parameter's value in training methods, like "5 with a, "."""
    rows = ((method, row[name]) for method, row in METHODS.items() if name in row)
    return "".join(f"{'on' if value is True else value} with {method}, " for method, value in rows)


def owner_of(name: str) -> str | None:
    """Return the interface or hyper-parameter that owns a hyper-parameter; None if unknown.

    The value of a hyper-parameter in a row of METHODS counts only if the owner of the
    hyper-parameter has the row's value too.
    """
    if name in _OF_LOCAL_STEPS:
        return "pacer"
    return _OWNED.get(name) or next(
        (i for i in INTERFACES if name in _of_all(options_by_value(i))), None
    )


def row_with(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a training method's entry in METHODS, with the user's values.

    The user's values replace the values of a training method's entry in METHODS.

    Args:
        method: Name of the training method (a key of METHODS).
        given: Policy interface or hyper-parameter -> the user's value; None if the user has given
            no value.

    Returns:
        The value of each interface, and the row's hyper-parameters that the user has given or that
        count by the rule at `owner_of`.
    """
    row = METHODS[method]
    values: dict[str, Any] = {}
    for key, value in row.items():
        owner = owner_of(key)
        if given.get(key) is not None:
            values[key] = given[key]
        elif owner is None or values.get(owner) == row[owner]:
            values[key] = value
    return values


def refuse_idle(
    chosen: Mapping[str, str], used: Iterable[type[Policy]], given: Mapping[str, Any]
) -> None:
    """Raise an error if the user has set a flag that none of the run's policies has.

    Args:
        chosen: Policy interface -> value of its flag in this run.
        used: Classes of the run's policies.
        given: Flag -> the user's value; None or the default if the user has given no value.

    Raises:
        ConfigurationError: A flag has no effect in this run.
    """
    heeded = {*_FREE, *chosen, *named(*used), *CODECS[chosen["codec"]].options}
    for interface in INTERFACES:
        known = options_by_value(interface)
        for name, option in _of_all(known).items():
            value = given.get(name)
            if name in heeded or not option.is_given(value):
                continue
            users = [user for user, options in known.items() if name in options]
            shown = f"={value}" if isinstance(value, str | int | float) else ""
            raise ConfigurationError(
                f"--{name}{shown} is for --{interface}={', '.join(users)}, but this run has "
                f"--{interface}={chosen[interface]}{_why(interface, chosen, users)}. Leave "
                f"--{name} out, or change --{interface}."
            )


def _why(interface: str, chosen: Mapping[str, str], users: Iterable[str]) -> str:
    """Return why a flag has no effect although its policy is chosen, as the end of a message."""
    if interface == "server_optimizer" and chosen[interface] in users:
        return " (Keras' optimizer for gradients, FedOpt's for changes of weights)"
    return ""
