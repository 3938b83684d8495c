"""What shard 0 knows of the run's evaluator process, and of the Supervisors that start it.

Until the script calls `distribute`, an evaluator process runs the workers' script exactly as a
worker does. A user's training script may clear a folder before it calls `distribute`. To protect
the files that the training writes, no worker trains before the script of the first evaluator has
reached `distribute`. The Supervisor reports the start and the end of the evaluator's process. The
evaluator opens its stream to shard 0 in `distribute`.

If no Supervisor starts an evaluator, or the Supervisor has been disconnected for a lease, no script
waits for an evaluation.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thinwire.ps.service.connections import Connection

#: Seconds for which a requested evaluation waits until an evaluator connects.
START_SECONDS = 600.0
#: Seconds for which a requested evaluation waits for the answer of a connected evaluator or an
#: appointed script.
ANSWER_SECONDS = 3600.0


class Evaluators:
    """State of the run's evaluator and of its Supervisors, which shard 0 stores.

    Attributes:
        supervisors: Streams of the Supervisors that start evaluators.
        is_connected: True while the evaluator has a stream to shard 0.

    Args:
        lease_seconds: Time for which scripts wait for the report of a Supervisor, in seconds.
    """

    def __init__(self, lease_seconds: float) -> None:
        self._lease_seconds = lease_seconds
        self.supervisors: list[Connection] = []
        self.is_connected = False
        # True while scripts wait for the first evaluator, whose process runs; True as soon as no
        # script has to wait for it. Both are False until a Supervisor reports.
        self._first_is_starting = self._first_is_settled = False
        # time at which the first script connected or the Supervisor's stream was lost
        self._unknown_since = math.inf
        self._given_up = ""  # reason why the Supervisor starts no evaluator; else empty
        # time since which no Supervisor is connected; None before the first script
        self._alone_since: float | None = None

    def script_came(self, now: float) -> None:
        """Record that a worker's script has connected; it may have to wait for the evaluator."""
        self._unknown_since = min(self._unknown_since, now)
        if self._alone_since is None:
            self._alone_since = now

    def offer(self, supervisor: Connection, is_starting: bool) -> None:
        """Record that a connected Supervisor starts an evaluator process when scripts need one.

        Args:
            supervisor: Stream of the Supervisor.
            is_starting: True if the evaluator's process already runs, but its script has not called
                `distribute` yet.
        """
        if supervisor not in self.supervisors:
            self.supervisors.append(supervisor)
        self._given_up, self._alone_since = "", None
        self._first_is_starting = is_starting
        self._first_is_settled |= not is_starting

    def withdraw(self, supervisor: Connection, why: str, now: float) -> None:
        """Record that a Supervisor starts no evaluator, and the reason."""
        self._first_is_settled = True
        self._drop(supervisor, why, now)

    def lose(self, supervisor: Connection, now: float) -> None:
        """Record that a Supervisor's stream has ended; it may reconnect within the time of a
        lease.
        """
        if supervisor in self.supervisors and self._first_is_starting:
            self._first_is_starting, self._unknown_since = False, now
        self._drop(supervisor, "", now)

    def _drop(self, supervisor: Connection, why: str, now: float) -> None:
        is_known = supervisor in self.supervisors
        if is_known:
            self.supervisors.remove(supervisor)
        if not self.supervisors and (why or is_known):
            self._given_up, self._alone_since = why, now

    def connect(self) -> None:
        """Record that an evaluator's script has called `distribute` and has opened its stream."""
        self.is_connected = self._first_is_settled = True

    def first_is_awaited_until(self, has_supervisor: bool) -> float:
        """Return the time of the shard's clock until which scripts wait for the first evaluator,
        or -inf.

        Args:
            has_supervisor: True if the run has a Supervisor, even if it has not reported yet.
        """
        if self._first_is_settled:
            return -math.inf
        if self._first_is_starting:
            return math.inf
        return self._unknown_since + self._lease_seconds if has_supervisor else -math.inf

    def given_up_at(self, requested_at: float) -> float:
        """Return the time at which scripts stop waiting for an evaluation that was requested at
        `requested_at`; -inf if they must not wait.
        """
        if self.is_connected or self.supervisors:
            return requested_at + self._patience_seconds
        if self._given_up or self._alone_since is None:
            return -math.inf
        return self._alone_since + self._lease_seconds

    def why_none(self) -> str:
        """Return the reason why an evaluation that was given up has no result."""
        if self.is_connected or self.supervisors:
            action = "answered" if self.is_connected else "connected"
            return f"the evaluator has not {action} within {self._patience_seconds:g} s"
        return self._given_up or "there is no Supervisor"

    @property
    def _patience_seconds(self) -> float:
        return ANSWER_SECONDS if self.is_connected else START_SECONDS
