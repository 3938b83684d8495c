"""Adds policies and training methods of a user's own to the registries.

A user's policies have the rights of built-in ones: their names are values of the flags, and their
fields bring flags (`thinwire.ops.policy`). A name that exists is refused, so that no file changes
what a built-in name means.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import traceback
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any

from thinwire.ops.codecs.registry import CodecEntry
from thinwire.ops.methods import settings
from thinwire.ops.methods.method import INTERFACES, METHODS
from thinwire.ops.options import Option
from thinwire.ops.policy import Policy, PolicyFailed, options_of
from thinwire.ops.sync.base import ArrivalToken, Ready, RoundsView
from thinwire.ops.sync.records import RoundRecords
from thinwire.ops.types import ConfigurationError
from thinwire.ops.weighting.base import Arrival

#: Policy interface -> methods that a policy must define itself.
_VERBS = {
    "pacer": ("push_now",),
    "codec": ("init", "encode", "undelivered"),
    "down_codec": ("init", "gather"),
    "router": ("cut",),
    "sync": ("ready",),
    "weighting": ("init", "weigh"),
    "server_optimizer": ("init", "step"),
}

#: Similarity of two names, by difflib, from which one counts as a misspelling of the other.
_SIMILAR = 0.8
#: Verbs that return a pair: a result, and the new state.
_PAIRS = ("encode", "cut", "weigh", "step", "answer")

Policies = Mapping[str, Mapping[str, type[Policy]]]
Rows = Mapping[str, Mapping[str, Any]]


def register(policies: Policies, methods: Rows, taken: Collection[str] = ()) -> tuple[str, ...]:
    """Add policies and training methods to the registries; add all of them, or none.

    Args:
        policies: Policy interface -> name -> class of the policy.
        methods: Name of a training method -> its row: the value of each policy interface, then
            hyper-parameters under the names of their flags.
        taken: Names of the flags of all nodes, which no policy may use for a flag of its own.

    Returns:
        What was added, for messages: "sync=quorum", "method=mine".

    Raises:
        ConfigurationError: A name exists already, a class is no policy of its interface, or a row
            has an unknown name.
    """
    names, known = [], settings.all_options()
    for interface, entries in policies.items():
        if interface not in _VERBS:
            raise _refusal(f"POLICIES has the key {interface!r}", f"one of {', '.join(INTERFACES)}")
        for name, policy in entries.items():
            _check(interface, name, policy, known, taken)
            names.append(f"{interface}={name}")
    for name, row in methods.items():
        _check_row(name, row, policies, known)
        names.append(f"method={name}")
    for interface, entries in policies.items():
        for name, policy in entries.items():
            guard(policy)
            entry = CodecEntry(policy) if interface == "codec" else policy  # type: ignore[arg-type]
            settings.REGISTRIES[interface][name] = entry
    METHODS.update({name: dict(row) for name, row in methods.items()})
    return tuple(names)


def guard(policy: type[Policy]) -> None:
    """Make a policy's methods report their failures as failures of the user's file.

    Without this, a node would take the failure for one of its own and expel the worker whose push
    it was merging.
    """
    for name, function in list(vars(policy).items()):
        if isinstance(function, types.FunctionType) and name[0] != "_":
            setattr(policy, name, _guarded(policy.__name__, function))


def _guarded(policy: str, function: types.FunctionType) -> Callable[..., Any]:
    place = f"{policy}.{function.__name__}"

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        try:
            result = function(*arguments, **named)
        except Exception as error:
            if type(error).__module__.startswith("thinwire."):
                raise  # for example NonFiniteUpdate, which belongs to the interface
            raise PolicyFailed(f"{_line_of(error, function)}, {place}: {_text(error)}.") from error
        expected = _shape(function.__name__, result)
        if expected:
            raise PolicyFailed(f"{place} returned {result!r:.80}; expected {expected}.")
        return result

    return call


def _shape(verb: str, result: Any) -> str | None:
    """Return what a verb must return, if `result` is something else; else None."""
    if verb in _PAIRS and not (isinstance(result, tuple) and len(result) == 2):
        return "a pair: the result and the state"
    if verb == "weigh" and not all(isinstance(each, Arrival) for each in result[0]):
        return "a pair: a list of arrivals and the state"
    if verb == "ready" and not (
        isinstance(result, Ready)
        and all(isinstance(tokens, tuple | list) for tokens in result.releases)
        and all(isinstance(each, ArrivalToken) for tokens in result.releases for each in tokens)
    ):
        return "Ready with a list of releases, each a tuple of pushes"
    return None


def _line_of(error: Exception, function: types.FunctionType) -> str:
    """Return file and line of the user's code in which a method's error was raised."""
    path = function.__code__.co_filename
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == path
    ]
    return f"{path.rpartition('/')[2]}:{lines[-1] if lines else function.__code__.co_firstlineno}"


def _text(error: Exception) -> str:
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, AttributeError) and isinstance(error.obj, RoundRecords):
        names = [name for name in dir(RoundsView) if name[0] != "_"]
        text += f"; a rule may read {', '.join([*names, *RoundsView.__annotations__])}"
    return text


def _check(
    interface: str, name: str, policy: Any, known: dict[str, Option], taken: Collection[str]
) -> None:
    """Raise an error if a policy's name, class or flags cannot be added; add its flags to known."""
    place = f"POLICIES[{interface!r}][{name!r}]"
    if name in settings.options_by_value(interface):
        raise _refusal(f"{place}: --{interface}={name} exists already", "a new name")
    if not name.isidentifier():
        raise _refusal(place, "a name of letters, digits and _")
    if not _is_policy(policy):
        raise _refusal(
            f"{place} is {policy!r:.80}", "a frozen dataclass that inherits a base class"
        )
    place = f"{place}: the class {policy.__name__}"
    for verb in _VERBS[interface]:
        # A base class defines some verbs without a body.
        written = getattr(policy, verb, None)
        if written is None or written.__module__.endswith(".base"):
            raise _refusal(f"{place} lacks {verb}", "its definition")
    fields = {field.name for field in dataclasses.fields(policy)}
    if interface == "sync" and "groups" not in fields:
        raise _refusal(f"{place} lacks the field groups", "`groups: Groups` in its body")
    _check_spelling(place, policy, fields)
    for option in options_of(policy).values():
        other = known.get(option.name)
        shared = other is not None and dataclasses.replace(other, is_advanced=True)
        is_taken = other is not None or option.name in taken
        if is_taken and shared != dataclasses.replace(option, is_advanced=True):
            raise _refusal(f"{place}: the flag --{option.name} exists already", "a new flag")
        known.setdefault(option.name, option)


def _check_spelling(place: str, policy: Any, fields: Collection[str]) -> None:
    """Raise an error for a method or attribute whose name is nearly one of the base class."""
    inherited = {name for base in policy.__mro__[1:] for name in vars(base) if name[0] != "_"}
    for name in vars(policy):
        if name[0] == "_" or name in inherited or name in fields:
            continue
        near = difflib.get_close_matches(name, inherited, 1, _SIMILAR)
        if near:
            raise _refusal(f"{place} has {name}, which nothing calls", f"{near[0]}")


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
