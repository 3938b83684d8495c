"""Groups of workers: read, written, judged, and proposed from measured speeds."""

from __future__ import annotations

from collections.abc import Iterable

from ops.types import ConfigurationError

#: Every worker id once.
Groups = tuple[tuple[int, ...], ...]

#: The largest group has so many times the smallest one's members: worth a warning.
_UNEVEN = 4


def parse_groups(text: str) -> tuple[tuple[int, ...], ...]:
    """Read ``"1,2|3,4"``.

    >>> parse_groups("1, 2|3")
    ((1, 2), (3,))

    Raises:
        ConfigurationError: A token is not a worker id.
    """
    try:
        return tuple(
            tuple(sorted(int(token) for token in group.replace(",", " ").split()))
            for group in text.split("|")
        )
    except ValueError as error:
        raise ConfigurationError(
            f"--groups={text!r}: expected worker ids like '1,2|3,4' ({error})."
        ) from error


def parse_groups_file(text: str, path: str) -> tuple[tuple[int, ...], ...]:
    """Read one group a line; ``#`` starts a comment, blank lines are skipped.

    Raises:
        ConfigurationError: The file has no group, or a token is not a worker id.
    """
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    groups = "|".join(line for line in lines if line)
    if not groups:
        raise ConfigurationError(f"--groups_file={path}: holds no group; one line of ids a group.")
    return parse_groups(groups)


def format_groups(groups: Iterable[Iterable[int]]) -> str:
    """Write groups as parse_groups reads them."""
    return "|".join(",".join(map(str, group)) for group in groups)


def uneven(groups: Groups) -> str | None:
    """Return a warning where one update stands for far more workers than another."""
    smallest, largest = min(groups, key=len), max(groups, key=len)
    if len(largest) < _UNEVEN * len(smallest):
        return None
    return (
        f"group {format_groups([largest])} has {len(largest)} workers, group "
        f"{format_groups([smallest])} {len(smallest)}: an update is the mean of its group, so each "
        f"of the {len(largest)} counts {len(largest) / len(smallest):.3g} times less than one of "
        f"the {len(smallest)}."
    )
