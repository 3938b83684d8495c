"""Start, drain and end of the run on one shard, and the deadlines of the run and its snapshots."""

from __future__ import annotations

import enum
from collections.abc import Collection

from thinwire.ops.types import State
from thinwire.ps.core.members import CoreConfig
from thinwire.runtime.run.settings import DRAIN_SECONDS


class RunPhase(enum.Enum):
    """Phase of a run; a process goes through the phases in this order and may skip one."""

    WAITING = "waiting"  # waits for workers to join
    RUNNING = "running"
    DRAINING = "draining"  # ends when the pushes in flight have arrived
    ENDED = "ended"


class RunLifecycle:
    """Phase, limits and deadlines of a run, by this shard's clock; a deadline of None never comes.

    Attributes:
        phase: Current phase of the run.
        has_started: True if the shard releases rounds. A run may end without having started.
        stop_reason: Why the run has ended; None if the run has not ended.
        ended_at: Time at which the run ended; None if the run has not ended.
        is_spent: True if this following shard has applied its last update. Only shard 0 ends the
            run, so the shard drops further pushes until shard 0 announces the end.
    """

    def __init__(self, config: CoreConfig, waits_for_start: bool) -> None:
        """Start the run immediately, unless the synchronization rule waits for all workers."""
        self._config = config
        self.phase, self.has_started = RunPhase.WAITING, False
        self.stop_reason: str | None = None
        self.ended_at: float | None = None
        self.is_spent = False
        self._drain_reason: str | None = None
        self._start_at: float | None = None  # deadline: start with the present workers
        self._drain_until: float | None = None
        self._snapshot_at: float | None = None
        self._snapshot_version = 0
        self._first_exchange_at: float | None = None
        self._last_update_at: float | None = None
        self._seconds_before = 0.0  # seconds of the run before this shard's last restart
        if not waits_for_start:
            self.start()

    # -- phases -----------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self.phase is RunPhase.ENDED

    @property
    def is_ending(self) -> bool:
        """Whether the run is draining or has ended."""
        return self.phase in (RunPhase.DRAINING, RunPhase.ENDED)

    @property
    def announced_reason(self) -> str | None:
        """Why the run accepts no more updates, as replies state it; None if the run continues."""
        return self._drain_reason or self.stop_reason

    def start(self) -> None:
        """WAITING -> RUNNING: let rounds be released."""
        self.has_started, self._start_at = True, None
        if self.phase is RunPhase.WAITING:
            self.phase = RunPhase.RUNNING

    def request_stop(self, reason: str, now: float, waits: bool) -> RunPhase | None:
        """Any phase -> DRAINING -> ENDED.

        Args:
            reason: Why the run ends, as the run's summary names the reason.
            now: Current time of this shard's clock, in seconds.
            waits: Drain first: wait for the pushes in flight. A second request ends the run
                without waiting.

        Returns:
            The phase that the run has entered; None if the run had ended already.
        """
        if self.is_over:
            return None
        if waits and self.phase is not RunPhase.DRAINING:
            self.phase = RunPhase.DRAINING
            self._drain_until, self._drain_reason = now + DRAIN_SECONDS, reason
        else:
            self.phase, self.stop_reason, self.ended_at = RunPhase.ENDED, reason, now
            self._drain_until = self._drain_reason = None
        return self.phase

    def present(self, num_present: int, now: float) -> None:
        """Start if all workers are present; from the first worker on, limit the wait."""
        if self.has_started:
            return
        if num_present >= self._config.nb_workers:
            self.start()
        elif num_present and self._start_at is None:
            self._start_at = now + self._config.start_timeout_seconds

    # -- deadlines --------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """Return the earliest deadline; None if there is no deadline."""
        moments = (self._start_at, self._drain_until, self._snapshot_at, self._limit())
        return min((when for when in moments if when is not None), default=None)

    def start_is_due(self, now: float) -> bool:
        """Start with the present workers if the wait for all workers is over; return if it is."""
        due = self._start_at is not None and now >= self._start_at
        if due:
            self.start()
        return due

    def limit_is_due(self, now: float) -> bool:
        """Return whether the run has lasted for --max_seconds."""
        limit = self._limit()
        return limit is not None and now >= limit

    def drain_is_over(self, now: float, live: Collection[int], lags: bool) -> str | None:
        """Return the reason of the run's end if a drain is over; None otherwise.

        Args:
            now: Current time of this shard's clock, in seconds.
            live: Ids of the live workers.
            lags: True if the workers hold newer weights than this shard.
        """
        if self._drain_until is None:
            return None
        # A run drains for one of two reasons. An interrupted run waits until all workers have left,
        # because a worker may still push. Any other run waits only for the newest weights.
        done = self._drain_reason != "interrupted" and not lags
        return self._drain_reason if done or not live or now >= self._drain_until else None

    def snapshot_is_due(self, now: float) -> bool:
        """Return whether a snapshot is due; if so, set the time of the next snapshot."""
        due = self._snapshot_at is not None and now >= self._snapshot_at
        if due:
            self._snapshot_at = now + self._config.snapshot_interval_seconds
        return due

    def takes_snapshot(self, version: int, force: bool = False) -> bool:
        """Return whether to save this version now; if so, record it as saved."""
        is_new = force or version != self._snapshot_version
        if is_new:
            self._snapshot_version = version
        return is_new

    def _limit(self) -> float | None:
        first, seconds = self._first_exchange_at, self._config.max_seconds
        if self.is_ending or first is None or not seconds:
            return None
        return first + seconds - self._seconds_before

    # -- time -------------------------------------------------------------------------------

    def exchanged(self, now: float) -> None:
        """Start the run's seconds and the snapshot timer at this shard's first exchange."""
        if self._first_exchange_at is None:
            self._first_exchange_at = now
            self._snapshot_at = now + self._config.snapshot_interval_seconds

    def updated(self, now: float) -> None:
        """Record the time of an applied update."""
        self._last_update_at = now

    def seconds(self) -> float:
        """Return seconds from the first pull to the last applied update, summed over restarts."""
        if self._first_exchange_at is None or self._last_update_at is None:
            return self._seconds_before
        return self._seconds_before + max(0.0, self._last_update_at - self._first_exchange_at)

    # -- state ------------------------------------------------------------------------------

    def resumed(self, version: int, waits_for_start: bool) -> None:
        """Continue from a saved version; optionally wait again for all workers.

        Args:
            version: Saved version.
            waits_for_start: True if the shard waits until all workers have joined again, because
                groups of several workers were formed before the restart.
        """
        self._snapshot_version = version
        if waits_for_start:
            self.has_started, self.phase = False, RunPhase.WAITING

    def state_dict(self, soft: bool) -> State:
        """Return stop reason and seconds (durable), or phase, deadlines and times (soft)."""
        if not soft:
            return {"stop_reason": self.stop_reason, "seconds": self.seconds()}
        return {
            "phase": self.phase.value,
            "has_started": self.has_started,
            "stop_reason": self.stop_reason,
            "ended_at": self.ended_at,
            "is_spent": self.is_spent,
            "drain_reason": self._drain_reason,
            "start_at": self._start_at,
            "drain_until": self._drain_until,
            "snapshot_at": self._snapshot_at,
            "snapshot_version": self._snapshot_version,
            "first_exchange_at": self._first_exchange_at,
            "last_update_at": self._last_update_at,
            "seconds_before": self._seconds_before,
        }

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Restore the state that `state_dict` returned."""
        # The durable state restores no stop_reason: a resumed run continues after its end.
        if not soft:
            self._seconds_before = state["seconds"]
            return
        self.phase, self.has_started = RunPhase(state["phase"]), state["has_started"]
        self.stop_reason, self.ended_at = state["stop_reason"], state["ended_at"]
        self.is_spent, self._drain_reason = state["is_spent"], state["drain_reason"]
        self._start_at, self._drain_until = state["start_at"], state["drain_until"]
        self._snapshot_at = state["snapshot_at"]
        self._snapshot_version = state["snapshot_version"]
        self._first_exchange_at = state["first_exchange_at"]
        self._last_update_at = state["last_update_at"]
        self._seconds_before = state["seconds_before"]
