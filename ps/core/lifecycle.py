"""When a run starts, drains and ends on one PS shard, and when the shard saves snapshots."""

from __future__ import annotations

import enum
from collections.abc import Collection

from thinwire.ops.types import State
from thinwire.ps.core import attributes
from thinwire.ps.core.members import CoreConfig
from thinwire.runtime.run.settings import DRAIN_SECONDS

#: Attributes of a `RunLifecycle` that only a journal keeps, in addition to the phase.
_SOFT = (
    *("has_started", "stop_reason", "ended_at", "is_spent", "_drain_reason", "_start_at"),
    *("_drain_until", "_snapshot_at", "_snapshot_version", "_first_exchange_at"),
    *("_last_update_at", "_seconds_before"),
)


class RunPhase(enum.Enum):
    """Phase of a run on a shard, from the wait for workers to the run's end. A run passes through
    the phases WAITING, RUNNING, DRAINING and ENDED in this order, but may skip a phase.
    """

    WAITING = "waiting"  # the shard waits for the workers to join the run
    RUNNING = "running"
    DRAINING = "draining"  # the run ends when the pushes in flight have arrived
    ENDED = "ended"


class RunLifecycle:
    """Phase, limits and deadlines of a run, as times of this shard's clock. A deadline of the run
    that is not set is None.

    Attributes:
        phase: Current phase of the run: waiting for workers, running, draining or ended.
        has_started: True if the training run has started, so that the shard merges rounds of
            pushes. A run may end without having started.
        stop_reason: Why the run has ended; None if the run has not ended.
        ended_at: Time of this shard's clock at which the run ended; None if the run has not ended.
        is_spent: True if this shard is not shard 0 and has applied the run's last update. Only
            shard 0 ends the run, so this shard drops later pushes until shard 0 announces the end.
    """

    def __init__(self, config: CoreConfig, waits_for_start: bool) -> None:
        """Start the run immediately, or wait for all workers to join if `waits_for_start` is
        True.
        """
        self._config = config
        self.phase, self.has_started = RunPhase.WAITING, False
        self.stop_reason: str | None = None
        self.ended_at: float | None = None
        self.is_spent = False
        self._drain_reason: str | None = None
        # Time at which the run starts even if not all workers have joined.
        self._start_at: float | None = None
        self._drain_until: float | None = None
        self._snapshot_at: float | None = None
        self._snapshot_version = 0
        self._first_exchange_at: float | None = None
        self._last_update_at: float | None = None
        # Duration of the run, in seconds, before this shard's last restart.
        self._seconds_before = 0.0
        if not waits_for_start:
            self.start()

    # -- phases -----------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """True if the training run has ended."""
        return self.phase is RunPhase.ENDED

    @property
    def is_ending(self) -> bool:
        """True if the run is draining (waiting for pushes in flight) or has ended."""
        return self.phase in (RunPhase.DRAINING, RunPhase.ENDED)

    @property
    def announced_reason(self) -> str | None:
        """Why the run accepts no more updates, for replies to workers; None if the run
        continues.
        """
        return self._drain_reason or self.stop_reason

    def start(self) -> None:
        """WAITING -> RUNNING: start the training run, so that the shard merges the workers'
        pushes.
        """
        self.has_started, self._start_at = True, None
        if self.phase is RunPhase.WAITING:
            self.phase = RunPhase.RUNNING

    def request_stop(self, reason: str, now: float, waits: bool) -> RunPhase | None:
        """Drain (wait for pushes in flight) or end the run: any RunPhase -> DRAINING -> ENDED.

        Args:
            reason: Reason for the end of the run, in the words of the run's summary.
            now: Current time of this shard's clock, in seconds.
            waits: True to wait for the pushes in flight (drain) before the run ends. A request to
                stop during the drain ends the run immediately, for the reason of the drain: a
                script that Ctrl-C ends reports a failure, but the run was interrupted.

        Returns:
            The phase that the run has entered; None if the run had ended before the request.
        """
        if self.is_over:
            return None
        if waits and self.phase is not RunPhase.DRAINING:
            self.phase = RunPhase.DRAINING
            self._drain_until, self._drain_reason = now + DRAIN_SECONDS, reason
        else:
            self.stop_reason = self._drain_reason or reason
            self.phase, self.ended_at = RunPhase.ENDED, now
            self._drain_until = self._drain_reason = None
        return self.phase

    def present(self, num_present: int, now: float) -> None:
        """Start the run if all workers have joined; limit the wait after the first worker's
        joining.
        """
        if self.has_started:
            return
        if num_present >= self._config.nb_workers:
            self.start()
        elif num_present and self._start_at is None:
            self._start_at = now + self._config.start_timeout_seconds

    # -- deadlines --------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """Return the run's earliest deadline (start, limit, drain or snapshot); None if none is
        set.
        """
        moments = (self._start_at, self._drain_until, self._snapshot_at, self._limit())
        return min((when for when in moments if when is not None), default=None)

    def start_is_due(self, now: float) -> bool:
        """Start the run with the joined workers if the wait for all workers has timed out.

        Returns:
            True if this call has started the run.
        """
        due = self._start_at is not None and now >= self._start_at
        if due:
            self.start()
        return due

    def limit_is_due(self, now: float) -> bool:
        """Return whether the run's duration has reached the time limit --max_seconds."""
        limit = self._limit()
        return limit is not None and now >= limit

    def drain_is_over(self, now: float, live: Collection[int], lags: bool) -> str | None:
        """Return the reason of the run's end if the drain is over; None if the drain continues.

        Args:
            now: Current time of this shard's clock, in seconds.
            live: Ids of the live workers (those with a valid lease).
            lags: True if the workers hold newer weights than this parameter server shard.
        """
        if self._drain_until is None:
            return None
        # A run drains for one of two reasons. An interrupted run waits until all workers have left,
        # because a worker may still push. Any other run waits only for the newest weights.
        done = self._drain_reason != "interrupted" and not lags
        return self._drain_reason if done or not live or now >= self._drain_until else None

    def snapshot_is_due(self, now: float) -> bool:
        """Return whether a snapshot of the shard is due; if so, schedule the next snapshot."""
        due = self._snapshot_at is not None and now >= self._snapshot_at
        if due:
            self._snapshot_at = now + self._config.snapshot_interval_seconds
        return due

    def takes_snapshot(self, version: int, force: bool = False) -> bool:
        """Return whether this version of the weights must be saved; if so, record it as saved.

        A version of the weights must be saved if it is not the last saved version, or if `force` is
        True.
        """
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
        """Start the run's clock and the snapshot timer at the first exchange with a worker."""
        if self._first_exchange_at is None:
            self._first_exchange_at = now
            self._snapshot_at = now + self._config.snapshot_interval_seconds

    def updated(self, now: float) -> None:
        """Record the time at which the shard applied an update."""
        self._last_update_at = now

    def seconds(self) -> float:
        """Return the run's duration, in seconds: first pull to last update, over all restarts."""
        if self._first_exchange_at is None or self._last_update_at is None:
            return self._seconds_before
        return self._seconds_before + max(0.0, self._last_update_at - self._first_exchange_at)

    # -- state ------------------------------------------------------------------------------

    def resumed(self, version: int, waits_for_start: bool) -> None:
        """Continue the run from a saved version; optionally wait until all workers have joined.

        Args:
            version: Version of the weights in the saved state.
            waits_for_start: True if the shard waits until all workers have joined again, because
                groups of several workers were formed before the restart.
        """
        self._snapshot_version = version
        if waits_for_start:
            self.has_started, self.phase = False, RunPhase.WAITING

    def state_dict(self, soft: bool) -> State:
        """Return the run's stop reason and duration, or if `soft`, the RunPhase and the run's
        deadlines.
        """
        if not soft:
            return {"stop_reason": self.stop_reason, "seconds": self.seconds()}
        return {"phase": self.phase.value, **attributes.saved(self, _SOFT)}

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Restore the run's RunPhase, deadlines and duration that `state_dict` returned."""
        # The durable (checkpointed) state restores no stop_reason, because a run that is resumed
        # after its end continues.
        if not soft:
            self._seconds_before = state["seconds"]
            return
        self.phase = RunPhase(state["phase"])
        attributes.restore(self, _SOFT, state)
