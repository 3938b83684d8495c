"""Compute rates and scores of a run from its lines of progress and its counted bytes.

Times are seconds of the monotonic clock. Steps are the steps of all workers together.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.peers.lab import Bytes

#: Rates exclude the first seconds of a run, which are slower, but at most this share of the run.
_WARM_SECONDS, _WARM_SHARE = 5.0, 0.25


class Steps:
    """Number of steps over time, summed over all processes that count steps.

    Args:
        lines: For each process its (time, steps) lines, in order of time.
        round_steps: Steps of all workers in a round, if a process writes a line only at the end of
            a round. The first step is then placed one mean duration of a round before the first
            line. 0 if processes write lines as they step.

    Raises:
        ValueError: No process did a step.
    """

    def __init__(self, lines: Iterable[Sequence[tuple[float, int]]], round_steps: int = 0) -> None:
        self._tables = []
        for process in lines:
            # Keep only lines at which the count changes; interpolation needs no other lines.
            changes = [
                line
                for number, line in enumerate(process)
                if line[1] > (process[number - 1][1] if number else 0)
            ]
            if changes:
                self._tables.append(np.asarray(_from_the_start(changes, round_steps), np.float64).T)
        if not self._tables:
            raise ValueError("no step was done")
        self.began = float(min(times[0] for times, _ in self._tables))
        self.ended = float(min(times[-1] for times, _ in self._tables))

    def at(self, moment: float) -> float:
        """Return the number of steps done at a moment, interpolated linearly."""
        total = 0.0
        for times, steps in self._tables:
            if moment >= times[0]:
                total += float(np.interp(moment, times, steps))
        return total


def _from_the_start(
    lines: Sequence[tuple[float, int]], round_steps: int
) -> Sequence[tuple[float, int]]:
    (first, steps), (last, all_steps) = lines[0], lines[-1]
    if not round_steps or steps == all_steps:
        return lines
    return [(first - round_steps * (last - first) / (all_steps - steps), 1), *lines]


@dataclasses.dataclass(frozen=True)
class Rates:
    """Rates of a run after its warm-up.

    Attributes:
        steps_per_second: Steps per second of all workers together.
        seconds: Length of the measured part of the run.
        bytes_up: Bytes on a worker's uplink per step of the worker; None if not counted.
        bytes_down: Bytes on a worker's downlink per step of the worker; None if not counted.
    """

    steps_per_second: float
    seconds: float
    bytes_up: float | None
    bytes_down: float | None


def rates(steps: Steps, counted: Bytes | None, in_rounds: bool = False) -> Rates:
    """Return a run's rates, without the run's warm-up.

    Args:
        steps: Steps of the run over time.
        counted: Bytes that the links carried; None if bytes were not counted.
        in_rounds: True if workers exchange once in many steps. The warm-up is then included: a part
            of a run could contain more exchanges per step than the whole run.

    Raises:
        ValueError: The run ended after its first step.
    """
    warm = 0.0 if in_rounds else min(_WARM_SECONDS, _WARM_SHARE * (steps.ended - steps.began))
    start, end = steps.began + warm, steps.ended
    num_steps = steps.at(end) - steps.at(start)
    if num_steps <= 0:
        raise ValueError("the run was over after its first step: give it more seconds")
    up = down = None
    if counted is not None:
        before, after = counted.at(start), counted.at(end)
        up, down = ((late - early) / num_steps for early, late in zip(before, after, strict=True))
    return Rates(num_steps / (end - start), end - start, up, down)


@dataclasses.dataclass(frozen=True)
class CurvePoint:
    """A snapshot of the model, and the cost of the run until the snapshot.

    Attributes:
        seconds: Seconds since the first step ended.
        steps: Steps of all workers until the snapshot.
        bytes_up: Bytes sent by all workers since the processes started; None if not counted.
        bytes_down: Bytes received by all workers since the processes started; None if not counted.
        score: Score on the test set, higher is better; None if not evaluated.
    """

    seconds: float
    steps: float
    bytes_up: float | None
    bytes_down: float | None
    score: float | None = None


def points(
    snapshots: Sequence[tuple[float, Path]], steps: Steps, counted: Bytes | None
) -> list[tuple[CurvePoint, Path]]:
    """Return a point without a score, and the path, for each snapshot, in order."""
    costs = []
    for moment, path in snapshots:
        up, down = counted.at(moment) if counted is not None else (None, None)
        costs.append((CurvePoint(moment - steps.began, steps.at(moment), up, down), path))
    return costs


def evaluated(
    kept: Sequence[tuple[CurvePoint, Path]],
    targets: Sequence[float],
    evaluate: Callable[[Path], float],
) -> list[CurvePoint]:
    """Return the evaluated points: in order until every target is reached, and the last point."""
    curve: list[CurvePoint] = []
    best = -math.inf
    for number, (point, path) in enumerate(kept):
        if best < max(targets) or number == len(kept) - 1:
            score = evaluate(path)
            best = max(best, score)
            curve.append(dataclasses.replace(point, score=score))
    return curve


def first_at(curve: Iterable[CurvePoint], target: float) -> CurvePoint | None:
    """Return the first point whose score is at least `target`, or None if no point has it."""
    reached = (point for point in curve if point.score is not None and point.score >= target)
    return next(reached, None)


def computed(target_steps: float, warm: Rates) -> CurvePoint:
    """Return the cost of a number of steps, computed from the rates of a shorter run."""
    up, down = (
        None if num_bytes is None else num_bytes * target_steps
        for num_bytes in (warm.bytes_up, warm.bytes_down)
    )
    return CurvePoint(target_steps / warm.steps_per_second, target_steps, up, down)


def read(folder: Path, round_steps: int = 0) -> tuple[Steps, list[tuple[float, Path]]]:
    """Return the steps and the snapshots of a run's folder.

    Args:
        folder: Folder of the run, with its progress files and snapshots.
        round_steps: Argument of `Steps`.

    Raises:
        ValueError: No process did a step.
    """
    processes, snapshots = [], []
    for path in sorted(folder.glob("progress-*.jsonl")):
        lines = [_parsed(line) for line in path.read_text().splitlines()]
        processes.append([(e["time"], e["steps"]) for e in lines if e and e["steps"] is not None])
        snapshots += [(e["time"], folder / e["snapshot"]) for e in lines if e and e["snapshot"]]
    return Steps(processes, round_steps), sorted(snapshots)


def _parsed(line: str) -> dict[str, Any] | None:
    """Return a line's record, or None for the incomplete last line of a killed process."""
    try:
        return dict(json.loads(line))
    except ValueError:
        return None
