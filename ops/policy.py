"""Policies: frozen dataclasses whose fields are hyper-parameters, each declared once.

A field of a policy that users can set declares its command-line flag: help text, unit, default and
legal values. The flags, their help, the checks of values, and the run's fingerprint follow from the
fields of the policies.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol, TypeVar

from thinwire.ops.options import Option
from thinwire.ops.types import ConfigurationError

#: Metadata of a dataclass field of a policy that only one node uses. The run's fingerprint leaves
#: the field out.
OWN: Mapping[str, bool] = {"own": True}
_OPTION = "option"
_FROM_OPTION: Any = object()


def setting(
    option: Option, default: Any = _FROM_OPTION, own: bool = False, shown: bool = False
) -> Any:
    """Return the default of a policy's field that a flag sets.

    Such a field looks like ``window: int = setting(integer("staleness_window", 1024, ...))``.

    Args:
        option: The flag. Its name may differ from the name of the field.
        default: Value of the field if the flag is not given, by default the default of `option`.
            Fields of several policies that share a flag may have different defaults.
        own: True if only one node uses the value. The run's fingerprint leaves the value out.
        shown: True if --help lists the flag; False if only --helpfull lists it.
    """
    option = dataclasses.replace(option, is_advanced=not shown)
    metadata: dict[str, Any] = {_OPTION: option} | (dict(OWN) if own else {})
    value = option.default if default is _FROM_OPTION else default
    return dataclasses.field(default=value, metadata=metadata)


class PolicyFailed(ConfigurationError):
    """Error: a policy of the user's own file failed or broke its interface; the run must end."""


class Policy(Protocol):
    """Interface of all policies: a frozen dataclass whose fields are hyper-parameters."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]

    def __post_init__(self) -> None:
        """Raise ConfigurationError for a value that the option of a field does not allow."""
        for name, option in options_of(type(self)).items():
            value = getattr(self, name)
            refusal = None if value is None else option.refusal(value)
            if refusal is not None:
                raise ConfigurationError(refusal)


@functools.cache
def options_of(policy: type[Policy]) -> dict[str, Option]:
    """Return field -> the flag that sets the field, for the fields that a flag sets."""
    fields = dataclasses.fields(policy)
    return {field.name: field.metadata[_OPTION] for field in fields if _OPTION in field.metadata}


_Policy = TypeVar("_Policy", bound=Policy)


def configured(policy: type[_Policy], values: Mapping[str, Any], **others: Any) -> _Policy:
    """Build a policy from the values of flags.

    Args:
        policy: Class of the policy.
        values: Flag -> its value. A field without a value here, or with the value None, has its
            default.
        others: Field -> value, for fields whose value is not the value of a flag.
    """
    make: Callable[..., _Policy] = policy
    given = {field: values.get(option.name) for field, option in options_of(policy).items()}
    return make(**{field: value for field, value in given.items() if value is not None} | others)


def describe(policy: Any) -> Mapping[str, Any]:
    """Return a policy's hyper-parameters by name, for the run's fingerprint and summary.

    The hyper-parameters of a wrapped policy follow under the name of its class: ``{"inner": "TopK",
    "TopK.compression_rate": 0.01, ...}``.
    """
    fields = (field for field in dataclasses.fields(policy) if not field.metadata.get("own"))
    values = {field.name: getattr(policy, field.name) for field in fields}
    inner = values.get("inner")
    if dataclasses.is_dataclass(inner) and not isinstance(inner, type):
        name = type(inner).__name__
        values["inner"] = name
        for key, value in describe(inner).items():
            values[key if "." in key else f"{name}.{key}"] = value
    return values
