"""Refuses workers' pushes that are too large, and quarantines workers after repeated refusals."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

from thinwire.ops.aggregation.outliers import Guards, norm_of
from thinwire.ops.kernels.numpy_ops import peak
from thinwire.ops.types import State
from thinwire.ps.core import events


class UpdateGuard:
    """Compares the norm and the largest magnitude of each push with limits from earlier pushes."""

    def __init__(self, guards: Guards) -> None:
        self._policy = guards
        self._sizes = guards.init()
        # Worker id -> L2 norm of the worker's push that waits for its round.
        self._waiting: dict[int, float] = {}
        # Worker id -> step of the worker's newest push that was too large.
        self._refused: dict[int, int] = {}

    def check(self, push: events.Push) -> str | None:
        """Return a message why a push's values are too large; None if the push is accepted."""
        if push.head.overflow or push.is_copy:
            return None
        why = self._check_peak(push) or self._check_norm(push)
        if why is not None:
            self._refused[push.worker] = push.head.step
            self._waiting.pop(push.worker, None)
        return why

    def _check_peak(self, push: events.Push) -> str | None:
        largest = push.peak
        if largest is None:
            parts = [push.update] if push.change is None else [push.update, push.change]
            largest = max(peak(part.values) for part in parts)
        limit, source = self._policy.peak_limit(self._sizes)
        if largest > limit:
            return f"the update's largest magnitude {largest:.4g} is above {limit:.4g} ({source})"
        self._sizes = self._policy.record_peak(largest, self._sizes)
        return None

    def _check_norm(self, push: events.Push) -> str | None:
        if not self._policy.measures:
            return None
        norm = norm_of(push.update.values)
        limit, source = self._policy.limit(self._sizes)
        if norm > limit:
            return f"the norm of the update, {norm:.4g}, is above {limit:.4g} ({source})"
        self._waiting[push.worker] = norm
        return None

    @property
    def has_ever_refused(self) -> bool:
        """True if the guard has refused any push as too large."""
        return bool(self._refused)

    def has_refused(self, worker: int, step: int) -> bool:
        """Return whether the guard has refused a worker's push of this step as too large."""
        return self._refused.get(worker) == step

    def applied(self, worker: int) -> None:
        """Record that a worker's push was applied, so that its norm affects the norm limit."""
        # Only norms of applied pushes count for the limit. A push that is accepted and later
        # dropped must not change the limit for the pushes of other workers.
        norm = self._waiting.pop(worker, None)
        if norm is not None:
            self._sizes = self._policy.record(norm, self._sizes)

    def median(self) -> float | None:
        """Return the median norm of the newest applied pushes; None if no push was applied yet."""
        return self._policy.median(self._sizes)

    def state_dict(self, soft: bool) -> State:
        """Return the norms of applied pushes and the steps of refused pushes, or if `soft`, the
        norms of waiting pushes.
        """
        if soft:
            return {"waiting": dict(self._waiting)}
        return {**self._sizes, "refused": _with_text_keys(self._refused)}

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Restore the norms and refused steps of pushes that `state_dict` returned."""
        if soft:
            self._waiting = dict(state["waiting"])
            return
        empty = self._policy.init()
        self._sizes = {name: list(state.get(name) or ()) for name in empty}
        self._refused = _with_number_keys(state["refused"])


class Quarantine:
    """Counts refused pushes, and excludes a worker for some time after too many refused pushes.

    The quarantine has its own clock, which counts the seconds in which this shard ran, summed over
    all restarts. After a restart of the shard, a worker's quarantine continues with its remaining
    seconds.
    """

    def __init__(self, guards: Guards) -> None:
        self._policy = guards
        # Worker id -> times of the worker's recent offences (refused pushes).
        self._offences: dict[int, list[float]] = {}
        self._terms: dict[int, int] = {}  # worker id -> number of the worker's quarantines so far
        # Worker id -> time at which the worker's quarantine ends.
        self._until: dict[int, float] = {}
        # Reason of refusal -> worker id -> number of refused pushes.
        self._counts: dict[str, collections.Counter[int]] = {}
        self._seconds = 0.0  # present time of the quarantine's clock, in seconds
        # Time of the shard's clock at which the quarantine's clock was 0; None before its start.
        self._started: float | None = None

    @property
    def is_on(self) -> bool:
        """True if the run quarantines workers (--quarantine_after)."""
        return bool(self._policy.quarantine_after)

    def elapse(self, now: float) -> None:
        """Advance the quarantine's clock to the time `now` of the shard's clock."""
        if not self.is_on:
            return
        if self._started is None:
            self._started = now - self._seconds
        self._seconds = now - self._started

    def record(self, worker: int, reason: str) -> None:
        """Count a refused push of a worker by the reason of the refusal."""
        self._counts.setdefault(reason, collections.Counter())[worker] += 1

    def offend(self, worker: int) -> bool:
        """Count a worker's refused push (an offence); return whether to quarantine the worker
        now.
        """
        if not self.is_on:
            return False
        recent = self._offences.setdefault(worker, [])
        recent.append(self._seconds)
        since = self._seconds - self._policy.quarantine_seconds
        recent[:] = [moment for moment in recent if moment > since]
        return len(recent) >= self._policy.quarantine_after

    def expel(self, worker: int) -> None:
        """Begin a worker's quarantine; clear the worker's offences (refused pushes)."""
        times = self._terms.get(worker, 0)
        self._until[worker] = self._seconds + self._policy.term_seconds(times)
        self._terms[worker] = times + 1
        self._offences.pop(worker, None)

    def seconds_left(self, worker: int) -> float:
        """Return the remaining seconds of a worker's quarantine; 0 if the worker may join."""
        if worker not in self._until:
            return 0.0
        remaining = self._until[worker] - self._seconds
        if remaining > 0:
            return remaining
        del self._until[worker]
        return 0.0

    def summary(self) -> dict[str, Any]:
        """Return the numbers of refused pushes by reason and worker, and of quarantines by
        worker.
        """
        refused = {reason: _with_text_keys(count) for reason, count in sorted(self._counts.items())}
        return {"refused": refused, "quarantines": _with_text_keys(self._terms)}

    def state_dict(self, soft: bool) -> State:
        """Return the workers' refused pushes and quarantines, or if `soft`, the quarantine clock's
        start.
        """
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
        """Restore the workers' offences, quarantines and refused pushes that `state_dict`
        returned.
        """
        if soft:
            self._started = state["started"]
            return
        self._offences = _with_number_keys(state["offences"], list)
        self._terms = _with_number_keys(state["terms"])
        self._until = _with_number_keys(state["until"])
        self._counts = {
            reason: collections.Counter(_with_number_keys(counts))
            for reason, counts in state["counts"].items()
        }
        self._seconds, self._started = state["seconds"], None


def _same(value: Any) -> Any:
    return value


def _with_text_keys(table: dict[int, Any], copy: Callable[[Any], Any] = _same) -> dict[str, Any]:
    """Return a dict by worker with the ids as text, because JSON objects have only text keys."""
    return {str(worker): copy(value) for worker, value in sorted(table.items())}


def _with_number_keys(table: dict[str, Any], copy: Callable[[Any], Any] = _same) -> dict[int, Any]:
    return {int(worker): copy(value) for worker, value in table.items()}
