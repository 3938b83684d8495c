"""Finds --policy among the words of a command line, before any flag is registered.

The file of --policy may bring flags, so it must be loaded before the command line is parsed.
"""

from __future__ import annotations

import contextlib
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence

from thinwire.flags.environment import VARIABLE
from thinwire.ops.options import Topic
from thinwire.runtime.run import own_policies
from thinwire.runtime.run.files import read_bounded

FLAG = "policy"
_FLAG_FILE = "flagfile"
#: Largest number of flag files of a command line; a flag file may name itself.
_MOST_FILES = 20


def load_named(
    words: Sequence[str], environment: Mapping[str, str], topics: Iterable[Topic]
) -> own_policies.OwnPolicies | None:
    """Load the file of policies that --policy names, if the flag is given.

    Args:
        words: Words of a command line: flags and, after them, a script and its arguments.
        environment: Environment variables of this process; THINWIRE_FLAGS may hold --policy.
        topics: Topics with all flags, by which the value of a flag differs from the script.

    Raises:
        ConfigurationError: The file cannot be loaded.
    """
    kinds = kinds_of(topics)
    own: list[str] = []
    with contextlib.suppress(ValueError):  # the parser of THINWIRE_FLAGS reports a bad text
        own = shlex.split(environment.get(VARIABLE, ""))
    path = value_of(FLAG, words, kinds) or value_of(FLAG, own, kinds)
    return own_policies.load(path, kinds) if path else None


def kinds_of(topics: Iterable[Topic]) -> dict[str, str]:
    """Return flag -> its kind ("switch", "text", ...)."""
    return {option.name: option.kind for topic in topics for option in topic.options}


def value_of(name: str, words: Sequence[str], kinds: Mapping[str, str]) -> str | None:
    """Return the last value of a flag before the first word that is no flag; None if not given.

    Args:
        name: Name of a flag with a value.
        words: Words of a command line.
        kinds: Flag -> its kind ("switch", "text", ...), for the flags known so far.
    """
    found, rest, num_files = None, list(words), 0
    while rest and rest[0].startswith("-") and rest[0] not in ("--", "-m"):
        flag, equals, value = rest.pop(0).lstrip("-").partition("=")
        if not equals and _takes_next(flag, rest, {**kinds, _FLAG_FILE: "text"}):
            value = rest.pop(0)
        if flag == name:
            found = value
        elif flag == _FLAG_FILE and num_files < _MOST_FILES:
            num_files += 1
            rest = [*_lines_of(value), *rest]
    return found


def _lines_of(path: str) -> list[str]:
    """Return the flags in a flag file; the command line's parser reports a file that is bad."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        lines = read_bounded(os.path.expanduser(path)).decode().splitlines()
        return [line.strip() for line in lines if line.strip().startswith("-")]
    return []


def _takes_next(flag: str, rest: Sequence[str], kinds: Mapping[str, str]) -> bool:
    """Return True if the next word is the value of a flag that is written without "="."""
    if not rest or rest[0].startswith("-"):
        return False
    if flag in kinds:
        return kinds[flag] != "switch"
    # A flag of the file itself may be a switch before a script.
    return flag.removeprefix("no") not in kinds and not os.path.isfile(rest[0])
