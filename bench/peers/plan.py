"""Which runs a table needs, in which order, how long each is, and what is known from those done.

First the learning rates are tuned without a limit, all contenders in turn with one rate, then with
the next. Then rounds: in each, for each link, all contenders in turn, each with its best rate.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bench.peers import curves

NO_LIMIT = "none"
#: At this rate and below a dense method is timed for few steps, and the rest is computed.
_SLOW_MBPS = 10.0
_SLOW_STEPS = 20
#: At this one and below so is one that exchanges the whole model once in a round.
_THIN_MBPS = 1.0
_THIN_ROUNDS = 2  # the first may be exchanged in the background of the second
#: A run that is to reach a score takes so many of the steps that it took without a limit.
_MARGIN = 1.3
_DENSE_SLOWER = 10.0  # at 100 Mbit/s; only for the pace of snapshots and the estimate
_SNAPSHOT_SECONDS, _SNAPSHOTS = 0.5, 300
_THIN_SECONDS = 300.0  # at most
_THIN_ROUND_SECONDS = 40.0  # as a guess: 3.5 MB at 1 Mbit/s, and the steps
_AROUND_SECONDS = 45.0  # to start, to end and to evaluate a run
Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What table is wanted.

    Attributes:
        names: Contenders in turn.
        dense: Which of them are.
        links: "none", or megabits per second.
        learning_rates: To choose from, by the seconds to the highest target.
        rounds: Runs of each contender over each link.
        seconds: Of a run without a limit, and of one that only measures the rate.
        most_seconds: Of a run over a link that is to reach the highest target.
        targets: Scores on the test set, the higher the better.
        round_steps: Peer -> local steps of its rounds, which exchange the whole model. They are
            timed for two over the thinnest links.
        workers: Of each run.
        snapshot_seconds: Between two models that are kept, at least.
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
    """One run to be made; `steps` are those of a worker, 0 for no limit."""

    contender: str
    link: str
    learning_rate: float
    round: int
    seconds: float = 0.0
    steps: int = 0
    snapshot_seconds: float = _SNAPSHOT_SECONDS

    @property
    def key(self) -> tuple[str, str, float, int]:
        """What distinguishes one run of a table from another."""
        return (self.contender, self.link, self.learning_rate, self.round)


def key(record: Record) -> tuple[str, str, float, int]:
    """Return the key of the run that a record is of."""
    return (record["contender"], record["link"], record["learning_rate"], record["round"])


def mbps(link: str) -> float | None:
    """Return a link's rate; None: no limit."""
    return None if link == NO_LIMIT else float(link)


class Known:
    """The records so far; the list may grow."""

    def __init__(self, records: list[Record], targets: Sequence[float]) -> None:
        self._records, self._targets = records, sorted(targets)

    def runs(self, name: str, link: str, learning_rate: float | None = None) -> list[Record]:
        """Return the good runs of a contender over a link, with one rate or any."""
        return [
            record
            for record in self._records
            if record["ok"]
            and (record["contender"], record["link"]) == (name, link)
            and learning_rate in (None, record["learning_rate"])
        ]

    def best_rate(self, name: str) -> float | None:
        """Return the learning rate that reaches most, and that soonest; None: nothing is known.

        Chosen by the first round without a limit.
        """
        runs = [record for record in self.runs(name, NO_LIMIT) if record["round"] == 1]
        tried = {record["learning_rate"] for record in runs}

        def worth(rate: float) -> tuple[float, ...]:
            same = [record for record in runs if record["learning_rate"] == rate]
            best = statistics.median(_best_score(record) for record in same)
            times = [self._median(same, target, "seconds") for target in self._targets[::-1]]
            soon = [-math.inf if seconds is None else -seconds for seconds in times]
            return (*soon, best)

        return max(tried, key=worth, default=None)

    def steps_to(self, name: str, target: float) -> float | None:
        """Return the steps of all workers to a score without a limit, at the best rate."""
        runs = self.runs(name, NO_LIMIT, self.best_rate(name))
        return self._median(runs, target, "steps")

    def cost(self, name: str, link: str, target: float) -> tuple[curves.Point, bool] | None:
        """Return what a score cost over a link, and whether that is computed.

        Medians of the runs at the best rate. None: no run reached it, and none counted its steps.
        """
        runs = self.runs(name, link, self.best_rate(name))
        found = [point for point in (reached(record, target) for record in runs) if point]
        if found:
            values = {
                field: _median_or_none([getattr(point, field) for point in found])
                for field in ("seconds", "steps", "bytes_up", "bytes_down")
            }
            return curves.Point(**values), False
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
        """Return the median of those that reached a target, if most did."""
        found = [point for point in (reached(record, target) for record in runs) if point]
        if not found or 2 * len(found) < len(runs):
            return None
        return statistics.median(getattr(point, field) for point in found)


def _median_or_none(values: Sequence[float | None]) -> Any:
    return None if None in values else statistics.median(v for v in values if v is not None)


def reached(record: Record, target: float) -> curves.Point | None:
    """Return the first point of a run at or above a score."""
    return curves.first_at([curves.Point(**point) for point in record["curve"]], target)


def _best_score(record: Record) -> float:
    return max((point["score"] for point in record["curve"]), default=-math.inf)


def pending(settings: Settings, records: list[Record]) -> Iterator[PlannedRun]:
    """Yield what is left to be run; the caller adds each one's record before the next.

    A run that failed is done; leave its record out to have it made again.
    """
    known = Known(records, settings.targets)

    def is_done(run: PlannedRun) -> bool:
        return run.key in {key(record) for record in records}

    if len(settings.learning_rates) > 1 or NO_LIMIT in settings.links:
        for rate in settings.learning_rates:
            for name in settings.names:
                kept = settings.snapshot_seconds
                run = PlannedRun(name, NO_LIMIT, rate, 1, settings.seconds, 0, kept)
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
    """Give a run its length and the pace of its snapshots."""
    rate = mbps(run.link)
    dense = run.contender in settings.dense
    if rate is None:
        return dataclasses.replace(run, seconds=settings.seconds)
    if dense and rate <= _SLOW_MBPS:
        return dataclasses.replace(run, seconds=settings.most_seconds, steps=_SLOW_STEPS)
    round_steps = settings.round_steps.get(run.contender, 0)
    if rate <= _THIN_MBPS and round_steps:
        steps = _THIN_ROUNDS * round_steps + 1  # done when they are exchanged
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
    """Guess how long a run over a link takes that is to reach the highest target."""
    if not dense:
        return settings.seconds
    if rate <= _SLOW_MBPS:
        return _SLOW_STEPS * 8.0  # 4.8 MB up and down, one after the other
    return _DENSE_SLOWER * settings.seconds


def estimated_seconds(settings: Settings, records: Sequence[Record]) -> float:
    """Guess how long what is left takes, if every run reaches the highest target in time."""
    made, total = list(records), 0.0
    for run in pending(settings, made):
        length = run.seconds
        rate = mbps(run.link)
        if run.steps and rate is not None:
            dense = run.contender in settings.dense
            length = min(length, _expected_seconds(settings, dense, rate))
            if rate <= _THIN_MBPS and run.contender in settings.round_steps:
                length = _THIN_ROUNDS * _THIN_ROUND_SECONDS
        total += _AROUND_SECONDS + length
        curve = [dataclasses.asdict(curves.Point(0.7 * length, 1.0, None, None, 1.0))]
        made.append(record_of(run, {"rates": {}, "curve": curve}))
    return total


def record_of(run: PlannedRun, found: Record | None, **more: Any) -> Record:
    """Return the record of a run: what it found, or, for None, that it failed."""
    return dataclasses.asdict(run) | {"ok": found is not None} | (found or {}) | more
