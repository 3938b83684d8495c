"""Registers tables of flags with absl, as flags of the command line or of another `FlagValues`."""

from __future__ import annotations

import math

from absl import flags

from thinwire.ops.options import FlagRule, Option, Topic

#: The lower and upper bounds of absl's number flags accept NaN, which this rule rejects.
_IS_FINITE = FlagRule(math.isfinite, "must be a finite number")


def define(*topics: Topic, flag_values: flags.FlagValues = flags.FLAGS) -> None:
    """Register all flags of the given topics, and rules for their values, with `flag_values`."""
    for topic in topics:
        for option in topic.options:
            _define(option, flag_values, topic.title)
            if option.kind == "number":
                _enforce(option.name, _IS_FINITE, flag_values)
            if option.rule is not None:
                _enforce(option.name, option.rule, flag_values)


def _define(option: Option, flag_values: flags.FlagValues, topic: str) -> None:
    name, default, text = option.name, option.default, option.text
    if option.kind == "switch":
        flags.DEFINE_boolean(name, default, text, flag_values, topic)
    elif option.kind == "integer":
        low = None if option.low is None else int(option.low)
        high = None if option.high is None else int(option.high)
        flags.DEFINE_integer(name, default, text, low, high, flag_values, module_name=topic)
    elif option.kind == "number":
        flags.DEFINE_float(
            name, default, text, option.low, option.high, flag_values, module_name=topic
        )
    elif option.kind == "choice":
        flags.DEFINE_enum(name, default, list(option.values), text, flag_values, topic)
    elif option.kind == "list":
        flags.DEFINE_list(name, default, text, flag_values, module_name=topic)
    else:
        flags.DEFINE_string(name, default, text, flag_values, module_name=topic)


def _enforce(name: str, rule: FlagRule, flag_values: flags.FlagValues) -> None:
    flags.register_validator(
        name,
        lambda value: value is None or rule.holds(value),
        message=f"--{name} {rule.sentence}",
        flag_values=flag_values,
    )
