"""Whether scripts have to wait for the run's first evaluator: a plain object, no threads.

An evaluator runs the same script as the workers, up to `distribute`, and such a script may clear a
folder at its top. So nobody trains before the first evaluator has come there. The Supervisor
reports that it has started the evaluator's process, and when that process ends; the evaluator
itself opens its stream to shard 0 in `distribute`.
"""

from __future__ import annotations

import enum
import math


class _Stage(enum.Enum):
    """UNKNOWN until a Supervisor reports; SETTLED for good, as soon as nobody has to wait."""

    UNKNOWN = enum.auto()
    STARTING = enum.auto()
    SETTLED = enum.auto()


class FirstEvaluator:
    """The start of the run's first evaluator, as shard 0 knows it.

    Args:
        lease_seconds: How long a Supervisor that has not reported is waited for.
    """

    def __init__(self, lease_seconds: float) -> None:
        self._lease_seconds = lease_seconds
        self._stage = _Stage.UNKNOWN
        self._unknown_since = math.inf  # when the first script came, or the Supervisor was lost

    def script_came(self, now: float) -> None:
        """Note that there is a script that may have to wait."""
        self._unknown_since = min(self._unknown_since, now)

    def report(self, is_starting: bool) -> None:
        """Note whether the process of an evaluator is on its way to `distribute`."""
        if self._stage is not _Stage.SETTLED:
            self._stage = _Stage.STARTING if is_starting else _Stage.SETTLED

    def arrive(self) -> None:
        """Note that an evaluator has reached `distribute`."""
        self._stage = _Stage.SETTLED

    def lose_supervisor(self, now: float) -> None:
        """Note that a Supervisor's stream has ended; another may come within a lease."""
        if self._stage is _Stage.STARTING:
            self._stage, self._unknown_since = _Stage.UNKNOWN, now

    def excuse(self, seconds: float) -> None:
        """Do not count a time in which this process stood still."""
        self._unknown_since += seconds

    def waits_until(self, has_supervisor: bool) -> float:
        """Return until when scripts wait, by the shard's clock; -inf: they do not.

        Args:
            has_supervisor: Whether the run is known to have a Supervisor, though none may have
                reported yet.
        """
        if self._stage is _Stage.STARTING:
            return math.inf
        if self._stage is _Stage.UNKNOWN and has_supervisor:
            return self._unknown_since + self._lease_seconds
        return -math.inf
