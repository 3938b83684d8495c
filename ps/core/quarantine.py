"""Pushes that are too large, and workers that keep on offending."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

from thinwire.ops.aggregation.outliers import Guards, norm_of
from thinwire.ops.kernels.numpy_ops import peak
from thinwire.ops.types import State
from thinwire.ps.core import events


class UpdateGuard:
    """Compares the norm of each push with those accepted before."""

    def __init__(self, guards: Guards) -> None:
        """Suspect nobody."""
        self._policy = guards
        self._sizes = guards.init()
        self._waiting: dict[int, float] = {}  # worker -> norm of its push that is not yet applied
        self._refused: dict[int, int] = {}  # worker -> step of its newest outlier

    def check(self, push: events.Push) -> str | None:
        """Return why a push is too large, for people; None if it is not.

        One that is takes part in its round with nothing.
        """
        if push.overflow or push.is_copy:
            return None
        why = self._check_peak(push) or self._check_norm(push)
        if why is not None:
            self._refused[push.worker] = push.step
            self._waiting.pop(push.worker, None)
        return why

    def _check_peak(self, push: events.Push) -> str | None:
        largest = push.peak
        if largest is None:
            parts = [push.update] if push.change is None else [push.update, push.change]
            largest = max(peak(part.values) for part in parts)
        limit, source = self._policy.peak_limit(self._sizes)
        if largest > limit:
            return f"its largest magnitude {largest:.4g} is above {limit:.4g} ({source})"
        self._sizes = self._policy.record_peak(largest, self._sizes)
        return None

    def _check_norm(self, push: events.Push) -> str | None:
        if not self._policy.measures:
            return None
        norm = norm_of(push.update.values)
        limit, source = self._policy.limit(self._sizes)
        if norm > limit:
            return f"its norm {norm:.4g} is above {limit:.4g} ({source})"
        self._waiting[push.worker] = norm
        return None

    @property
    def has_ever_refused(self) -> bool:
        """Whether any push was refused for its size."""
        return bool(self._refused)

    def has_refused(self, worker: int, step: int) -> bool:
        """Return whether this push was refused for its size."""
        return self._refused.get(worker) == step

    def applied(self, worker: int) -> None:
        """Note that the push of a worker was applied: others are measured by it from now on."""
        norm = self._waiting.pop(worker, None)
        if norm is not None:
            self._sizes = self._policy.record(norm, self._sizes)

    def median(self) -> float | None:
        """Return the median of the newest accepted norms."""
        return self._policy.median(self._sizes)

    def state_dict(self, soft: bool) -> State:
        """Return norms and refused steps, which outlive a restart, or what waits for its round."""
        if soft:
            return {"waiting": dict(self._waiting)}
        return {**self._sizes, "refused": _with_text_keys(self._refused)}

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Take back what `state_dict` gave."""
        if soft:
            self._waiting = dict(state["waiting"])
            return
        none = self._policy.init()
        self._sizes = {name: list(state.get(name) or ()) for name in none}
        self._refused = _with_number_keys(state["refused"])


class Quarantine:
    """Counts refused pushes, and keeps workers out for a term that offend too often.

    Its clock counts the seconds in which this shard ran, over all restarts, so that a term goes on
    after a restart where it was.
    """

    def __init__(self, guards: Guards) -> None:
        """Suspect nobody."""
        self._policy = guards
        self._offences: dict[int, list[float]] = {}  # worker -> when, within the window
        self._terms: dict[int, int] = {}  # worker -> how often it was in quarantine
        self._until: dict[int, float] = {}  # worker -> end of its term
        self._counts: dict[str, collections.Counter[int]] = {}  # reason -> worker -> pushes
        self._seconds = 0.0
        self._started: float | None = None  # the shard's time when this clock stood at 0

    @property
    def is_on(self) -> bool:
        """Whether offences have consequences (--quarantine_after)."""
        return bool(self._policy.quarantine_after)

    def elapse(self, now: float) -> None:
        """Move this clock to the shard's time."""
        if not self.is_on:
            return
        if self._started is None:
            self._started = now - self._seconds
        self._seconds = now - self._started

    def record(self, worker: int, reason: str) -> None:
        """Count a push that was refused."""
        self._counts.setdefault(reason, collections.Counter())[worker] += 1

    def offend(self, worker: int) -> bool:
        """Record a member's offence; return whether its term is to begin."""
        if not self.is_on:
            return False
        recent = self._offences.setdefault(worker, [])
        recent.append(self._seconds)
        since = self._seconds - self._policy.quarantine_seconds
        recent[:] = [each for each in recent if each > since]
        return len(recent) >= self._policy.quarantine_after

    def expel(self, worker: int) -> None:
        """Begin a worker's term; its offences are forgotten, but not the number of its terms."""
        times = self._terms.get(worker, 0)
        self._until[worker] = self._seconds + self._policy.term_seconds(times)
        self._terms[worker] = times + 1
        self._offences.pop(worker, None)

    def seconds_left(self, worker: int) -> float:
        """Return how long a worker's term still lasts; 0: it may join."""
        if worker not in self._until:
            return 0.0
        left = self._until[worker] - self._seconds
        if left > 0:
            return left
        del self._until[worker]
        return 0.0

    def summary(self) -> dict[str, Any]:
        """Return the refused pushes by reason and worker, and each worker's number of terms."""
        refused = {reason: _with_text_keys(count) for reason, count in sorted(self._counts.items())}
        return {"refused": refused, "quarantines": _with_text_keys(self._terms)}

    def state_dict(self, soft: bool) -> State:
        """Return everything, which outlives a restart, or since when the clock runs."""
        if soft:
            return {"started": self._started}
        return {
            "offences": _with_text_keys(self._offences, list),
            "terms": _with_text_keys(self._terms),
            "until": _with_text_keys(self._until),
            "counts": {reason: _with_text_keys(count) for reason, count in self._counts.items()},
            "seconds": self._seconds,
        }

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Take back what `state_dict` gave."""
        if soft:
            self._started = state["started"]
            return
        self._offences = _with_number_keys(state["offences"], list)
        self._terms = _with_number_keys(state["terms"])
        self._until = _with_number_keys(state["until"])
        self._counts = {
            reason: collections.Counter(_with_number_keys(each))
            for reason, each in state["counts"].items()
        }
        self._seconds, self._started = state["seconds"], None


def _same(value: Any) -> Any:
    return value


def _with_text_keys(table: dict[int, Any], copy: Callable[[Any], Any] = _same) -> dict[str, Any]:
    """Return a table by worker as documents hold it."""
    return {str(worker): copy(value) for worker, value in sorted(table.items())}


def _with_number_keys(table: dict[str, Any], copy: Callable[[Any], Any] = _same) -> dict[int, Any]:
    return {int(worker): copy(value) for worker, value in table.items()}
