"""Adds policies and training methods of a user's own to the registries.

A user's policies have the rights of built-in ones: their names are values of the flags, and their
fields bring flags (`thinwire.ops.policy`). A name that exists is refused, so that no file changes
what a built-in name means.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from thinwire.ops.codecs.registry import CODECS, CodecEntry
from thinwire.ops.downlink.registry import DOWN_CODECS
from thinwire.ops.methods import settings
from thinwire.ops.methods.method import INTERFACES, METHODS
from thinwire.ops.optimizers.outer import OUTER_OPTIMIZERS
from thinwire.ops.options import Option
from thinwire.ops.pacing.registry import PACERS
from thinwire.ops.policy import Policy, options_of
from thinwire.ops.routing.registry import ROUTERS
from thinwire.ops.sync.rule import SYNC_RULES
from thinwire.ops.types import ConfigurationError
from thinwire.ops.weighting.registry import WEIGHTINGS

_REGISTRIES: dict[str, dict[str, Any]] = {
    "pacer": PACERS,
    "codec": CODECS,
    "down_codec": DOWN_CODECS,
    "router": ROUTERS,
    "sync": SYNC_RULES,
    "weighting": WEIGHTINGS,
    "server_optimizer": OUTER_OPTIMIZERS,
}
#: Policy interface -> methods that a policy must define itself.
_VERBS = {
    "pacer": ("push_now",),
    "codec": ("init", "encode", "undelivered"),
    "down_codec": ("init", "gather"),
    "router": ("init", "begin", "cut", "undelivered"),
    "sync": ("ready",),
    "weighting": ("init", "weigh"),
    "server_optimizer": ("init", "step"),
}

Policies = Mapping[str, Mapping[str, type[Policy]]]
Rows = Mapping[str, Mapping[str, Any]]


def register(policies: Policies, methods: Rows) -> tuple[str, ...]:
    """Add policies and training methods to the registries; add all of them, or none.

    Args:
        policies: Policy interface -> name -> class of the policy.
        methods: Name of a training method -> its row: the value of each policy interface, then
            hyper-parameters under the names of their flags.

    Returns:
        What was added, for messages: "sync=quorum", "method=mine".

    Raises:
        ConfigurationError: A name exists already, a class is no policy of its interface, or a row
            has an unknown name.
    """
    names, known = [], _known_options()
    for interface, entries in policies.items():
        if interface not in _REGISTRIES:
            raise _refusal(f"POLICIES has the key {interface!r}", f"one of {', '.join(INTERFACES)}")
        for name, policy in entries.items():
            _check(interface, name, policy, known)
            names.append(f"{interface}={name}")
    for name, row in methods.items():
        _check_row(name, row, policies, known)
        names.append(f"method={name}")
    for interface, entries in policies.items():
        for name, policy in entries.items():
            entry = CodecEntry(policy) if interface == "codec" else policy  # type: ignore[arg-type]
            _REGISTRIES[interface][name] = entry
    METHODS.update({name: dict(row) for name, row in methods.items()})
    return tuple(names)


def _known_options() -> dict[str, Option]:
    options: dict[str, Option] = {}
    for interface in settings.INTERFACES:
        for known in settings.options_by_value(interface).values():
            options |= known
    return options


def _check(interface: str, name: str, policy: Any, known: dict[str, Option]) -> None:
    """Raise an error if a policy's name, class or flags cannot be added; add its flags to known."""
    taken = settings.options_by_value(interface)
    place = f"POLICIES[{interface!r}][{name!r}]"
    if name in taken:
        raise _refusal(f"{place}: --{interface}={name} exists already", "a new name")
    if not name.isidentifier():
        raise _refusal(place, "a name of letters, digits and _")
    if not _is_policy(policy):
        raise _refusal(
            f"{place} is {policy!r:.80}", "a frozen dataclass that inherits a base class"
        )
    for verb in _VERBS[interface]:
        # A base class defines some verbs without a body.
        written = getattr(policy, verb, None)
        if written is None or written.__module__.endswith(".base"):
            raise _refusal(f"{place}: the class {policy.__name__} lacks {verb}", "its definition")
    for option in options_of(policy).values():
        listed = dataclasses.replace(known.setdefault(option.name, option), is_advanced=True)
        if listed != dataclasses.replace(option, is_advanced=True):
            raise _refusal(f"{place}: the flag --{option.name} exists already", "a new flag")


def _is_policy(policy: Any) -> bool:
    """Return True for a class that is a frozen dataclass and inherits Policy."""
    is_dataclass = isinstance(policy, type) and dataclasses.is_dataclass(policy)
    return is_dataclass and Policy in policy.__mro__ and policy.__dataclass_params__.frozen


def _check_row(
    name: str, row: Mapping[str, Any], policies: Policies, known: Mapping[str, Option]
) -> None:
    """Raise an error if a training method's row cannot be added to METHODS."""
    place = f"METHODS[{name!r}]"
    if name in METHODS:
        raise _refusal(f"{place}: --method={name} exists already", "a new name")
    missing = [interface for interface in INTERFACES if interface not in row]
    if missing:
        raise _refusal(
            f"{place} lacks {', '.join(missing)}", 'a row such as METHODS["asgd"] | {...}'
        )
    for key, value in row.items():
        if key in INTERFACES:
            values = {*settings.options_by_value(key), *policies.get(key, {})}
            if value not in values:
                raise _refusal(f"{place}[{key!r}] is {value!r}", f"one of {', '.join(values)}")
        elif key not in known:
            raise _refusal(f"{place} has the key {key!r}", "an interface or the flag of a policy")
        elif (refused := known[key].refusal(value)) is not None:
            raise ConfigurationError(f"{place}: {refused}")


def _refusal(found: str, expected: str) -> ConfigurationError:
    return ConfigurationError(f"{found}; expected {expected}.")
