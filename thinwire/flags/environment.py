"""``THINWIRE_FLAGS``: flags in the environment, for every process of Thinwire that reads flags.

This is the one place that reads the variable. The order of precedence is the same everywhere: the
command line, or what a script gives `distribute`; then this variable; then the place that TF_CONFIG
or a scheduler gives; then the defaults. A process takes the flags of its own role from it, because
one variable is often set for all processes of a job.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

from absl import flags

from thinwire.flags.registration import define
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.flags import Topic

#: Name of the variable.
VARIABLE = "THINWIRE_FLAGS"


def flags_of(environment: Mapping[str, str], topics: Sequence[Topic]) -> dict[str, list[str]]:
    """Return each flag that the variable sets, with the words that set it on a command line.

    Args:
        environment: Environment variables of this process.
        topics: Every flag of every role.

    Raises:
        ConfigurationError: It is no list of flags.
    """
    text = environment.get(VARIABLE, "")
    if not text.strip():
        return {}
    values = flags.FlagValues()
    define(*topics, flag_values=values)
    try:
        rest = values([VARIABLE, *shlex.split(text)])[1:]
    except (flags.Error, ValueError, OSError) as error:
        raise ConfigurationError(f"{VARIABLE}={text}: {error}. {_EXPECTED}") from error
    if rest:
        raise ConfigurationError(f"{VARIABLE}={text}: {rest[0]!r} is no flag. {_EXPECTED}")
    names = [option.name for topic in topics for option in topic.options]
    return {
        name: [word for word in values[name].serialize().split("\n") if word]
        for name in names
        if values[name].present
    }


_EXPECTED = "Expected flags with their values, such as --method=dgs --lease_seconds=7."
