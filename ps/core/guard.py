"""What one shard remembers of outliers and offences; plain data, and time that only it lives by."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

from thinwire.ops.aggregation.outliers import Guards, norm_of
from thinwire.ops.types import State
from thinwire.ps.core import events

#: Why a push was refused, as the summary names it.
OUTLIER = "outlier"


class Guard:
    """Judges the size of pushes, counts offences, keeps workers out for a while.

    Its clock counts the seconds in which this shard ran, over all its lives, so that a term goes
    on after a restart where it was.
    """

    def __init__(self, guards: Guards) -> None:
        """Suspect nobody."""
        self.policy = guards
        self._state = guards.init()
        self._waiting: dict[int, float] = {}  # worker -> norm of its push that is not yet applied
        self._refused: dict[int, int] = {}  # worker -> step of its newest outlier
        self._offences: dict[int, list[float]] = {}  # worker -> when, within the window
        self._terms: dict[int, int] = {}  # worker -> how often it was put out
        self._until: dict[int, float] = {}  # worker -> end of its term
        self._counts: dict[str, collections.Counter[int]] = {}  # reason -> worker -> pushes
        self._seconds = 0.0
        self._started: float | None = None  # the shard's time when this clock stood at 0

    def elapse(self, now: float) -> None:
        """Hear what time it is by the shard's clock, with each event."""
        if not self.policy.quarantine_after:
            return
        if self._started is None:
            self._started = now - self._seconds
        self._seconds = now - self._started

    def excess(self, push: events.Push) -> str | None:
        """Return why a push is too large, for people; None if it is not."""
        if not self.policy.measures:
            return None
        norm = norm_of(push.update.values)
        limit, source = self.policy.limit(self._state)
        if norm > limit:
            return f"its norm {norm:.4g} is above {limit:.4g} ({source})"
        self._waiting[push.worker] = norm
        return None

    def refuse(self, push: events.Push) -> None:
        """Note that a push was refused for its size: it takes part in its round with nothing."""
        self._refused[push.worker] = push.step
        self._waiting.pop(push.worker, None)

    def has_refused(self, worker: int, step: int) -> bool:
        """Return whether this push was refused for its size."""
        return self._refused.get(worker) == step

    def applied(self, worker: int) -> None:
        """Hear that the push of a worker was applied: others are measured by it from now on."""
        norm = self._waiting.pop(worker, None)
        if norm is not None:
            self._state = self.policy.note(norm, self._state)

    # -- offences ---------------------------------------------------------------------------

    def count(self, worker: int, reason: str) -> None:
        """Count a push that was refused."""
        self._counts.setdefault(reason, collections.Counter())[worker] += 1

    def offend(self, worker: int) -> bool:
        """Hear of a member's offence; return whether it is to be put out for it."""
        if not self.policy.quarantine_after:
            return False
        recent = self._offences.setdefault(worker, [])
        recent.append(self._seconds)
        since = self._seconds - self.policy.quarantine_seconds
        recent[:] = [each for each in recent if each > since]
        return len(recent) >= self.policy.quarantine_after

    def put_out(self, worker: int) -> None:
        """Begin a worker's term; its offences are forgotten, but not how often it was put out."""
        times = self._terms.get(worker, 0)
        self._until[worker] = self._seconds + self.policy.term_seconds(times)
        self._terms[worker] = times + 1
        self._offences.pop(worker, None)

    def seconds_left(self, worker: int) -> float:
        """Return how long a worker still stays out; 0: it may come."""
        if worker not in self._until:
            return 0.0
        left = self._until[worker] - self._seconds
        if left > 0:
            return left
        del self._until[worker]
        return 0.0

    # -- the summary, and durable state -----------------------------------------------------

    def summary(self) -> dict[str, Any]:
        """Return what was refused by reason and worker, and who was put out how often.

        With the median of the newest accepted norms; nothing of it where no guard is on.
        """
        if not self.policy.active:
            return {}
        return {
            "refused": {reason: _texts(count) for reason, count in sorted(self._counts.items())},
            "quarantines": _texts(self._terms),
            "median_norm": self.policy.median(self._state),
        }

    def save(self) -> State:
        """Return plain data; what waits for its round is not part of it."""
        return {
            "policy": {"norms": list(self._state["norms"])},
            "refused": _texts(self._refused),
            "offences": _texts(self._offences, list),
            "terms": _texts(self._terms),
            "until": _texts(self._until),
            "counts": {reason: _texts(count) for reason, count in self._counts.items()},
            "seconds": self._seconds,
        }

    def restore(self, state: State) -> None:
        """Take back what `save` gave."""
        self._state = self.policy.init() | {"norms": list(state["policy"]["norms"])}
        self._refused = _numbers(state["refused"])
        self._offences = _numbers(state["offences"], list)
        self._terms = _numbers(state["terms"])
        self._until = _numbers(state["until"])
        counts = state["counts"].items()
        self._counts = {reason: collections.Counter(_numbers(each)) for reason, each in counts}
        self._seconds, self._started = state["seconds"], None


def _same(value: Any) -> Any:
    return value


def _texts(table: dict[int, Any], copy: Callable[[Any], Any] = _same) -> dict[str, Any]:
    """Return a table by worker as documents hold it."""
    return {str(worker): copy(value) for worker, value in sorted(table.items())}


def _numbers(table: dict[str, Any], copy: Callable[[Any], Any] = _same) -> dict[int, Any]:
    return {int(worker): copy(value) for worker, value in table.items()}
