"""The start of the run's first evaluator process, for which the workers' scripts wait.

Until the script calls `distribute`, an evaluator process runs the workers' script exactly as a
worker does. A user's training script may clear a folder before it calls `distribute`. To protect
the files that the training writes, no worker trains before the script of the first evaluator has
reached `distribute`. The Supervisor reports the start and the end of the evaluator's process. The
evaluator opens its stream to shard 0 in `distribute`.
"""

from __future__ import annotations

import enum
import math


class _Stage(enum.Enum):
    """Stage (unknown, starting or settled) of the start of the run's first evaluator.

    The stage is UNKNOWN until a Supervisor reports, STARTING while scripts wait for the first
    evaluator, and SETTLED as soon as no script has to wait for it.
    """

    UNKNOWN = enum.auto()
    STARTING = enum.auto()
    SETTLED = enum.auto()


class FirstEvaluator:
    """State of the start of the run's first evaluator, which shard 0 stores.

    Args:
        lease_seconds: Time for which scripts wait for the report of a Supervisor, in seconds.
    """

    def __init__(self, lease_seconds: float) -> None:
        self._lease_seconds = lease_seconds
        self._stage = _Stage.UNKNOWN
        # time at which the first script connected or the Supervisor's stream was lost
        self._unknown_since = math.inf

    def script_came(self, now: float) -> None:
        """Record that a worker's script has connected; it may have to wait for the evaluator."""
        self._unknown_since = min(self._unknown_since, now)

    def report(self, is_starting: bool) -> None:
        """Record a Supervisor's report about the evaluator process.

        `is_starting` is True if an evaluator's process runs but its script has not called
        `distribute` yet.
        """
        if self._stage is not _Stage.SETTLED:
            self._stage = _Stage.STARTING if is_starting else _Stage.SETTLED

    def arrive(self) -> None:
        """Record that an evaluator's script has called `distribute`."""
        self._stage = _Stage.SETTLED

    def lose_supervisor(self, now: float) -> None:
        """Record that a Supervisor's stream has ended.

        A Supervisor whose stream to shard 0 has ended may reconnect within the time of a lease.
        """
        if self._stage is _Stage.STARTING:
            self._stage, self._unknown_since = _Stage.UNKNOWN, now

    def excuse(self, seconds: float) -> None:
        """Extend the deadline of scripts by `seconds`, for which the shard's process was
        stalled.
        """
        self._unknown_since += seconds

    def waits_until(self, has_supervisor: bool) -> float:
        """Return the time of the shard's clock until which scripts wait for the evaluator, or -inf.

        Args:
            has_supervisor: True if the run has a Supervisor, even if it has not reported yet.
        """
        if self._stage is _Stage.STARTING:
            return math.inf
        if self._stage is _Stage.UNKNOWN and has_supervisor:
            return self._unknown_since + self._lease_seconds
        return -math.inf
