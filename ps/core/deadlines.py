"""When a shard has to do something though nobody asks: starts, limits, drains, snapshots."""

from __future__ import annotations

from collections.abc import Collection

from thinwire.ops.run.settings import DRAIN_SECONDS
from thinwire.ps.core.counters import Accounts
from thinwire.ps.core.members import CoreConfig


class Deadlines:
    """Moments of one shard's clock; None is never."""

    def __init__(self, config: CoreConfig, accounts: Accounts) -> None:
        """Set nothing yet."""
        self._config, self._accounts = config, accounts
        self.start: float | None = None  # begin with those who are present
        self.drain: float | None = None  # a run ends without what is on its way
        self.drain_reason: str | None = None  # why it ends
        self.snapshot: float | None = None

    def next(self) -> float | None:
        """Return the first of them."""
        moments = (self.start, self.drain, self.snapshot, self.limit())
        return min((when for when in moments if when is not None), default=None)

    def limit(self) -> float | None:
        """Return when the run has used up --max_seconds."""
        first, seconds = self._accounts.first_pull_at, self._config.max_seconds
        over = self._accounts.ended_at is not None or self.drain is not None
        if over or first is None or not seconds:
            return None
        return first + seconds - self._accounts.seconds_before

    def limit_is_due(self, now: float) -> bool:
        """Return whether the run has used up its seconds."""
        limit = self.limit()
        return limit is not None and now >= limit

    def begin(self, now: float) -> None:
        """Count seconds and snapshots from the first exchange of this life on."""
        if self._accounts.first_pull_at is None:
            self._accounts.first_pull_at = now
            self.snapshot = now + self._config.snapshot_interval_seconds

    def begin_drain(self, reason: str, now: float) -> None:
        """Give what is on its way a little time before the run ends for `reason`."""
        self.drain, self.drain_reason = now + DRAIN_SECONDS, reason

    def end_drain(self) -> None:
        """Wait no longer."""
        self.drain = self.drain_reason = None

    def drain_is_over(self, now: float, live: Collection[int], lags: bool) -> str | None:
        """Return why the run ends now, or None if it does not.

        Args:
            now: By this shard's clock.
            live: The workers that are left.
            lags: The workers' newest weights have not come yet.
        """
        if self.drain is None:
            return None
        done = self.drain_reason != "interrupted" and not lags
        return self.drain_reason if done or not live or now >= self.drain else None

    def start_is_due(self, now: float) -> bool:
        """Return whether to begin with those present; once."""
        due = self.start is not None and now >= self.start
        if due:
            self.start = None
        return due

    def snapshot_is_due(self, now: float) -> bool:
        """Return whether it is time for a snapshot, and set the next one."""
        due = self.snapshot is not None and now >= self.snapshot
        if due:
            self.snapshot = now + self._config.snapshot_interval_seconds
        return due
