"""Barriers at which the workers' scripts wait for each other, as typed values with a name.

Scripts and shard 0 exchange the name of a barrier. Only this module builds and parses names.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import re


class Point(enum.Enum):
    """Point of a script at which all scripts wait, in the order in which a script passes them.

    The points START and START_WITH_SUPERVISOR come before the first call of fit. A script uses the
    second one if the run has a Supervisor, because scripts then wait for an evaluator, too. All
    other points belong to one call of fit. A phase (another model) may begin at BEGIN and at LEFT:
    one script offers its model before the point OFFERED, and all scripts have joined at the point
    JOINED.
    """

    START = "start"
    START_WITH_SUPERVISOR = "start-with-supervisor"
    BEGIN = "begin"  # before the first step of a fit
    BEGIN_OFFERED = "begin-offered"
    BEGIN_JOINED = "begin-joined"
    END = "end"  # after the last step of a fit
    LEFT = "left"  # after the last callback of a fit
    LEFT_OFFERED = "left-offered"
    LEFT_JOINED = "left-joined"
    LOOP = "loop"  # before the script's own training loop that follows a fit
    SAVED = "saved"  # after a saved file; numbered

    @property
    def is_of_fit(self) -> bool:
        """True if each call of fit has this point."""
        return self not in _STARTS

    @property
    def place(self) -> int:
        """Number of the point among the points of a call of fit, from 0; 0 at the start."""
        return _PLACES[self]


_STARTS = (Point.START, Point.START_WITH_SUPERVISOR)
_OF_FIT = tuple(point for point in Point if point not in _STARTS)
_PLACES = {point: number for number, point in enumerate(_OF_FIT)} | dict.fromkeys(_STARTS, 0)
#: Point at which a phase may begin -> number of this phase, counted from the first one of the fit.
_CHANGING = {Point.BEGIN: 0, Point.LEFT: 1}
_NAMED = re.compile(
    rf"fit-(\d{{1,9}})-({'|'.join(point.value for point in _OF_FIT)})(?:-(\d{{1,9}}))?"
)


@dataclasses.dataclass(frozen=True)
class Barrier:
    """Barrier of one run, which the scripts of all workers pass in ascending order.

    Attributes:
        fit: Number of the call of fit, from 1; 0 at the start.
        point: Point of the call of fit.
        number: Number of the saved file, from 1; 0 at all other points.
    """

    fit: int
    point: Point
    number: int = 0

    @property
    def name(self) -> str:
        """Name of the barrier in messages.

        >>> Barrier(3, Point.BEGIN_JOINED).name, Barrier(1, Point.SAVED, 2).name
        ('fit-3-begin-joined', 'fit-1-saved-2')
        """
        if not self.point.is_of_fit:
            return self.point.value
        return f"fit-{self.fit}-{self.point.value}{f'-{self.number}' if self.number else ''}"

    @property
    def position(self) -> tuple[float, int, int]:
        """Sort key of the barrier; scripts pass barriers in ascending order of this key."""
        return self.fit, self.point.place, self.number

    @property
    def phase(self) -> int:
        """Number of the phase that may begin at the barrier; 0 if no phase may begin there."""
        return 2 * self.fit + _CHANGING[self.point] if self.point in _CHANGING else 0


#: Sort key after the keys of all barriers, for a name that no version of a script uses.
LAST = (math.inf, 0, 0)


def position_of(name: str) -> tuple[float, int, int]:
    """Return the sort key of a barrier by its name; `LAST` if no barrier has the name.

    >>> position_of("fit-2-begin") < position_of("fit-2-end") < position_of("fit-10-begin")
    True
    >>> position_of("fit-1-end") < position_of("fit-1-saved-2") < position_of("fit-1-saved-10")
    True
    >>> position_of("start") < position_of("fit-1-begin") < position_of("unknown")
    True
    """
    barrier = parse(name)
    return LAST if barrier is None else barrier.position


@functools.lru_cache(maxsize=4096)
def parse(name: str) -> Barrier | None:
    """Return the barrier with a name; None if no barrier has the name.

    >>> parse("fit-2-left-joined").phase, parse("fit-2-left").phase, parse("nothing")
    (0, 5, None)
    """
    for point in _STARTS:
        if name == point.value:
            return Barrier(0, point)
    match = _NAMED.fullmatch(name)
    if match is None:
        return None
    return Barrier(int(match[1]), Point(match[2]), int(match[3] or 0))
