"""Reads ``THINWIRE_FLAGS``, an environment variable with flags for every process of Thinwire.

In every process, a flag's value comes from the first of these sources that sets the flag: the
command line or a script's arguments of `distribute`, THINWIRE_FLAGS, TF_CONFIG or a scheduler (role
and addresses only), the default. A process uses only the flags of its role from THINWIRE_FLAGS,
because the variable is often set for all processes of a job.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from absl import flags

from thinwire.flags.registration import define
from thinwire.ops.options import Topic
from thinwire.ops.types import ConfigurationError

#: Name of the environment variable that holds flags.
VARIABLE = "THINWIRE_FLAGS"


def flags_of(environment: Mapping[str, str], topics: Sequence[Topic]) -> dict[str, list[str]]:
    """Return, for each flag that THINWIRE_FLAGS sets, the words that set it on a command line.

    Args:
        environment: Environment variables of this process.
        topics: Tables that define every command-line flag of every role.

    Raises:
        ConfigurationError: The text of THINWIRE_FLAGS is not a list of flags with valid values.
    """
    text = environment.get(VARIABLE, "")
    if not text.strip():
        return {}
    values = flags.FlagValues()
    define(*topics, flag_values=values)
    try:
        words = values([VARIABLE, *shlex.split(text)])[1:]
    except (flags.Error, ValueError, OSError) as error:
        raise ConfigurationError(f"variable {VARIABLE}={text}: {error}. {_EXPECTED}") from error
    if words:
        raise ConfigurationError(f"{VARIABLE}={text}: word {words[0]!r} is not a flag. {_EXPECTED}")
    names = [option.name for topic in topics for option in topic.options]
    return {
        name: [word for word in values[name].serialize().split("\n") if word]
        for name in names
        if values[name].present
    }


def flag_word(name: str, value: Any) -> str:
    """Return the word of a command line that gives a flag a value, which may be a list."""
    if isinstance(value, list | tuple):
        value = ",".join(str(item) for item in value)
    return f"--{name}={value}"


_EXPECTED = "Expected flags with their values, such as --method=dgs --lease_seconds=7."
