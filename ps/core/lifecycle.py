"""The run of one shard from its start to its end, and the moments at which something is due."""

from __future__ import annotations

import enum
from collections.abc import Collection

from thinwire.ops.types import State
from thinwire.ps.core.members import CoreConfig
from thinwire.runtime.run.settings import DRAIN_SECONDS


class RunPhase(enum.Enum):
    """How far a run is; it never goes back."""

    WAITING = "waiting"  # for its workers
    RUNNING = "running"
    DRAINING = "draining"  # it ends as soon as the pushes that are under way have arrived
    ENDED = "ended"


class RunLifecycle:
    """Phase, limits and deadlines of a run by this shard's clock; None is never.

    Attributes:
        phase: Of now.
        has_started: Rounds are released; an ended run may never have started.
        stop_reason: Why the run has ended; None: it has not.
        ended_at: When.
        is_spent: A following shard has applied all updates of the budget; shard 0 ends the run.
    """

    def __init__(self, config: CoreConfig, waits_for_start: bool) -> None:
        """Begin; without a wait for the workers the run has started."""
        self._config = config
        self.phase, self.has_started = RunPhase.WAITING, False
        self.stop_reason: str | None = None
        self.ended_at: float | None = None
        self.is_spent = False
        self._drain_reason: str | None = None
        self._start_at: float | None = None  # begin with those who are present
        self._drain_until: float | None = None
        self._snapshot_at: float | None = None
        self._snapshot_version = 0
        self._first_exchange_at: float | None = None
        self._last_update_at: float | None = None
        self._seconds_before = 0.0  # of earlier incarnations of this shard
        if not waits_for_start:
            self.start()

    # -- phases -----------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        return self.phase is RunPhase.ENDED

    @property
    def is_ending(self) -> bool:
        """Whether the run has ended, or is about to."""
        return self.phase in (RunPhase.DRAINING, RunPhase.ENDED)

    @property
    def announced_reason(self) -> str | None:
        """Why no more updates are wanted, as workers are notified; None: they are."""
        return self._drain_reason or self.stop_reason

    def start(self) -> None:
        """WAITING -> RUNNING."""
        self.has_started, self._start_at = True, None
        if self.phase is RunPhase.WAITING:
            self.phase = RunPhase.RUNNING

    def request_stop(self, reason: str, now: float, waits: bool) -> RunPhase | None:
        """Any phase -> DRAINING -> ENDED.

        Args:
            reason: As the summary names it.
            now: By this shard's clock.
            waits: Pushes that are under way are wanted first; a second request does not wait.

        Returns:
            The phase that was entered; None: the run has ended before.
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
        """Start when everybody is present; while some are, wait for the others, not for ever."""
        if self.has_started:
            return
        if num_present >= self._config.nb_workers:
            self.start()
        elif num_present and self._start_at is None:
            self._start_at = now + self._config.start_timeout_seconds

    # -- what is due ------------------------------------------------------------------------

    def next_deadline(self) -> float | None:
        """Return the first moment at which something is due."""
        moments = (self._start_at, self._drain_until, self._snapshot_at, self._limit())
        return min((when for when in moments if when is not None), default=None)

    def start_is_due(self, now: float) -> bool:
        """Start with those present if the wait for the others is over; return whether it is."""
        due = self._start_at is not None and now >= self._start_at
        if due:
            self.start()
        return due

    def limit_is_due(self, now: float) -> bool:
        """Return whether the run has used up --max_seconds."""
        limit = self._limit()
        return limit is not None and now >= limit

    def drain_is_over(self, now: float, live: Collection[int], lags: bool) -> str | None:
        """Return why the run ends now; None if it does not.

        Args:
            now: By this shard's clock.
            live: The workers that are left.
            lags: The workers' newest weights have not arrived yet.
        """
        if self._drain_until is None:
            return None
        done = self._drain_reason != "interrupted" and not lags
        return self._drain_reason if done or not live or now >= self._drain_until else None

    def snapshot_is_due(self, now: float) -> bool:
        """Return whether it is time for a snapshot, and set the next one."""
        due = self._snapshot_at is not None and now >= self._snapshot_at
        if due:
            self._snapshot_at = now + self._config.snapshot_interval_seconds
        return due

    def takes_snapshot(self, version: int, force: bool = False) -> bool:
        """Return whether this version is to be saved, and note that it is being saved."""
        wanted = force or version != self._snapshot_version
        if wanted:
            self._snapshot_version = version
        return wanted

    def _limit(self) -> float | None:
        first, seconds = self._first_exchange_at, self._config.max_seconds
        if self.is_ending or first is None or not seconds:
            return None
        return first + seconds - self._seconds_before

    # -- time -------------------------------------------------------------------------------

    def exchanged(self, now: float) -> None:
        """Count seconds and snapshots from this shard's first exchange on."""
        if self._first_exchange_at is None:
            self._first_exchange_at = now
            self._snapshot_at = now + self._config.snapshot_interval_seconds

    def updated(self, now: float) -> None:
        """Note that an update was applied."""
        self._last_update_at = now

    def seconds(self) -> float:
        """Return seconds from the first pull to the last applied update, restarts included."""
        if self._first_exchange_at is None or self._last_update_at is None:
            return self._seconds_before
        return self._seconds_before + max(0.0, self._last_update_at - self._first_exchange_at)

    # -- state ------------------------------------------------------------------------------

    def resumed(self, version: int, waits_for_start: bool) -> None:
        """Go on from a saved version; groups formed before it wait for their workers again."""
        self._snapshot_version = version
        if waits_for_start:
            self.has_started, self.phase = False, RunPhase.WAITING

    def state_dict(self, soft: bool) -> State:
        """Return why the run ended and its seconds, which outlive a restart, or the rest."""
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
        """Take back what `state_dict` gave; without the soft state the run goes on."""
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
