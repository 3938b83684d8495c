"""Plan the runs of a table: their order, their lengths, and the results of the finished runs.

First the learning rates are tuned without a link limit: all contenders run with one rate, then with
the next rate. Then come rounds. In each round, for each link, every contender runs once with its
best learning rate.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.peers import curves

NO_LIMIT = "none"
#: At this link rate and below, a dense method is timed for `_SLOW_STEPS` steps only; the time to a
#: target is computed from these steps.
_SLOW_MBPS = 10.0
_SLOW_STEPS = 20
#: At this link rate and below, a peer that exchanges the whole model once in a round is timed for
#: `_THIN_ROUNDS` rounds only.
_THIN_MBPS = 1.0
_THIN_ROUNDS = 2  # the first round may be exchanged in the background of the second
#: A run to a score gets the number of steps that it took without a limit, times this margin.
_MARGIN = 1.3
_DENSE_SLOWER = 10.0  # guess for 100 Mbit/s; only sets the snapshot interval and the estimate
_SNAPSHOT_SECONDS, _SNAPSHOTS = 0.5, 300
_THIN_SECONDS = 300.0  # maximum length of a run at `_THIN_MBPS`
_THIN_ROUND_SECONDS = 40.0  # guess: 3.5 MB at 1 Mbit/s, and the local steps
_AROUND_SECONDS = 45.0  # guess: time to start, to end and to evaluate a run
Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a table.

    Attributes:
        names: Names of the contenders, in the order of their runs.
        dense: Names of the contenders that send the whole model for each mini-batch.
        links: Links to measure: "none", or megabits per second as text.
        learning_rates: Rates to try; the rate with the least seconds to the highest target is best.
        rounds: Number of runs of each contender over each link.
        seconds: Length of a run without a limit, and of a run that only measures the rate.
        most_seconds: Maximum length of a run over a link to the highest target.
        targets: Scores on the test set, higher is better.
        round_steps: Name of a peer -> local steps in one of its rounds. These peers exchange the
            whole model in each round; over the thinnest links they run only two rounds.
        workers: Number of workers in each run.
        snapshot_seconds: Minimum time between two snapshots, in seconds.
    """

    names: Sequence[str]
    dense: frozenset[str]
    links: Sequence[str]
    learning_rates: Sequence[float]
    rounds: int
    seconds: float
    most_seconds: float
    targets: Sequence[float]
    workers: int = 2
    round_steps: Mapping[str, int] = dataclasses.field(default_factory=dict)
    snapshot_seconds: float = _SNAPSHOT_SECONDS


@dataclasses.dataclass(frozen=True)
class PlannedRun:
    """One run to execute; `steps` is the maximum number of a worker's steps, 0 for no limit."""

    contender: str
    link: str
    learning_rate: float
    round: int
    seconds: float = 0.0
    steps: int = 0
    snapshot_seconds: float = _SNAPSHOT_SECONDS

    @property
    def key(self) -> tuple[str, str, float, int]:
        """The values that identify a run in a table."""
        return (self.contender, self.link, self.learning_rate, self.round)


def key(record: Record) -> tuple[str, str, float, int]:
    """Return the key of a record's run."""
    return (record["contender"], record["link"], record["learning_rate"], record["round"])


def mbps(link: str) -> float | None:
    """Return a link's rate in Mbit/s; None for no limit."""
    return None if link == NO_LIMIT else float(link)


class Known:
    """Queries on the records of finished runs; the caller may append to the list of records."""

    def __init__(self, records: list[Record], targets: Sequence[float]) -> None:
        self._records, self._targets = records, sorted(targets)

    def runs(self, name: str, link: str, learning_rate: float | None = None) -> list[Record]:
        """Return the successful runs of a contender over a link.

        `learning_rate` restricts the runs to one rate; None returns runs with any rate.
        """
        return [
            record
            for record in self._records
            if record["ok"]
            and (record["contender"], record["link"]) == (name, link)
            and learning_rate in (None, record["learning_rate"])
        ]

    def best_rate(self, name: str) -> float | None:
        """Return a contender's best learning rate, or None if it has no run without a link limit.

        Only runs of round 1 without a limit count. The best rate reaches the highest target first;
        ties are decided by the lower targets and then by the best score.
        """
        runs = [record for record in self.runs(name, NO_LIMIT) if record["round"] == 1]
        tried = {record["learning_rate"] for record in runs}

        def worth(rate: float) -> tuple[float, ...]:
            rate_runs = [record for record in runs if record["learning_rate"] == rate]
            best = statistics.median(_best_score(record) for record in rate_runs)
            times = [self._median(rate_runs, target, "seconds") for target in self._targets[::-1]]
            soon = [-math.inf if seconds is None else -seconds for seconds in times]
            return (*soon, best)

        return max(tried, key=worth, default=None)

    def steps_to(self, name: str, target: float) -> float | None:
        """Return the steps of all workers to a score, without a limit and at the best rate.

        None if fewer than half of the runs reached the score.
        """
        runs = self.runs(name, NO_LIMIT, self.best_rate(name))
        return self._median(runs, target, "steps")

    def cost(self, name: str, link: str, target: float) -> tuple[curves.CurvePoint, bool] | None:
        """Return the cost of a score over a link, and True if the cost is computed, not measured.

        The cost has the medians of the runs at the best rate. None if no run over the link reached
        the score and the cost cannot be computed from runs without a limit.
        """
        runs = self.runs(name, link, self.best_rate(name))
        points = [point for point in (reached(record, target) for record in runs) if point]
        if points:
            values = {
                field: _median_or_none([getattr(point, field) for point in points])
                for field in ("seconds", "steps", "bytes_up", "bytes_down")
            }
            return curves.CurvePoint(**values), False
        steps = self.steps_to(name, target)
        if steps is None or not runs or link == NO_LIMIT:
            return None
        return curves.computed(steps, self.rates(runs)), True

    @staticmethod
    def rates(runs: Sequence[Record]) -> curves.Rates:
        """Return the medians of runs' rates."""
        fields = [field.name for field in dataclasses.fields(curves.Rates)]
        return curves.Rates(
            **{field: _median_or_none([run["rates"][field] for run in runs]) for field in fields}
        )

    def _median(self, runs: Sequence[Record], target: float, field: str) -> float | None:
        """Return a field's median over the runs that reached a target, or None if few did."""
        points = [point for point in (reached(record, target) for record in runs) if point]
        if not points or 2 * len(points) < len(runs):
            return None
        return statistics.median(getattr(point, field) for point in points)


def _median_or_none(values: Sequence[float | None]) -> Any:
    return None if None in values else statistics.median(v for v in values if v is not None)


def reached(record: Record, target: float) -> curves.CurvePoint | None:
    """Return the first point of a run whose score is at least `target`, or None."""
    return curves.first_at([curves.CurvePoint(**point) for point in record["curve"]], target)


def _best_score(record: Record) -> float:
    return max((point["score"] for point in record["curve"]), default=-math.inf)


def pending(settings: Settings, records: list[Record]) -> Iterator[PlannedRun]:
    """Yield the runs that have no record; the caller appends each run's record before the next.

    The record of a failed run counts as done; remove the record to repeat the run.
    """
    known = Known(records, settings.targets)

    def is_done(run: PlannedRun) -> bool:
        return run.key in {key(record) for record in records}

    if len(settings.learning_rates) > 1 or NO_LIMIT in settings.links:
        for rate in settings.learning_rates:
            for name in settings.names:
                interval = settings.snapshot_seconds
                run = PlannedRun(name, NO_LIMIT, rate, 1, settings.seconds, 0, interval)
                if not is_done(run):
                    yield run
    for number in range(1, settings.rounds + 1):
        for link in settings.links:
            for name in settings.names:
                tried = known.best_rate(name)
                rate = settings.learning_rates[0] if tried is None else tried
                run = PlannedRun(
                    name, link, rate, number, snapshot_seconds=settings.snapshot_seconds
                )
                run = _sized(settings, known, run)
                if not is_done(run):
                    yield run


def _sized(settings: Settings, known: Known, run: PlannedRun) -> PlannedRun:
    """Return the run with its length and its snapshot interval set."""
    rate = mbps(run.link)
    dense = run.contender in settings.dense
    if rate is None:
        return dataclasses.replace(run, seconds=settings.seconds)
    if dense and rate <= _SLOW_MBPS:
        return dataclasses.replace(run, seconds=settings.most_seconds, steps=_SLOW_STEPS)
    round_steps = settings.round_steps.get(run.contender, 0)
    if rate <= _THIN_MBPS and round_steps:
        steps = _THIN_ROUNDS * round_steps + 1  # the extra step starts after the last exchange
        return dataclasses.replace(run, seconds=_THIN_SECONDS, steps=steps)
    needed = known.steps_to(run.contender, max(settings.targets))
    if run.round > 1 or needed is None:
        return dataclasses.replace(run, seconds=settings.seconds)
    steps = math.ceil(_MARGIN * needed / settings.workers)
    if round_steps:
        steps = math.ceil(steps / round_steps) * round_steps + 1
    expected = min(settings.most_seconds, _expected_seconds(settings, dense, rate))
    return dataclasses.replace(
        run,
        seconds=settings.most_seconds,
        steps=steps,
        snapshot_seconds=max(settings.snapshot_seconds, expected / _SNAPSHOTS),
    )


def _expected_seconds(settings: Settings, dense: bool, rate: float) -> float:
    """Estimate the seconds of a run over a link to the highest target."""
    if not dense:
        return settings.seconds
    if rate <= _SLOW_MBPS:
        return _SLOW_STEPS * 8.0  # a step sends 4.8 MB up, then down
    return _DENSE_SLOWER * settings.seconds


def estimated_seconds(settings: Settings, records: Sequence[Record]) -> float:
    """Estimate the seconds of all pending runs, if every run reaches the highest target in time."""
    planned, total = list(records), 0.0
    for run in pending(settings, planned):
        length = run.seconds
        rate = mbps(run.link)
        if run.steps and rate is not None:
            dense = run.contender in settings.dense
            length = min(length, _expected_seconds(settings, dense, rate))
            if rate <= _THIN_MBPS and run.contender in settings.round_steps:
                length = _THIN_ROUNDS * _THIN_ROUND_SECONDS
        total += _AROUND_SECONDS + length
        curve = [dataclasses.asdict(curves.CurvePoint(0.7 * length, 1.0, None, None, 1.0))]
        planned.append(record_of(run, {"rates": {}, "curve": curve}))
    return total


def record_of(run: PlannedRun, found: Record | None, **more: Any) -> Record:
    """Return the record of a run with its results; `found` is None for a failed run."""
    return dataclasses.asdict(run) | {"ok": found is not None} | (found or {}) | more
