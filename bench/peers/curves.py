"""The arithmetic of a run: from lines of progress and counted bytes to rates and scores.

Times are monotonic seconds of this machine, steps those of all workers together.
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

#: Left out of the rates: what comes first is slower. At most this share of a run.
_WARM_SECONDS, _WARM_SHARE = 5.0, 0.25


class Steps:
    """How many steps were done when, over all processes that count them.

    Args:
        lines: Of each process, (time, its steps), in order.
        round_steps: Where lines come at the ends of rounds of so many steps of all workers: the
            first step is taken to have been as long before the first line as a round took later.
            0: lines come as steps are done.

    Raises:
        ValueError: Nobody did a step.
    """

    def __init__(self, lines: Iterable[Sequence[tuple[float, int]]], round_steps: int = 0) -> None:
        self._tables = []
        for process in lines:
            # Only where the count changes: a line between two changes adds nothing.
            kept = [
                line
                for number, line in enumerate(process)
                if line[1] > (process[number - 1][1] if number else 0)
            ]
            if kept:
                self._tables.append(np.asarray(_from_the_start(kept, round_steps), np.float64).T)
        if not self._tables:
            raise ValueError("no step was done")
        self.began = float(min(times[0] for times, _ in self._tables))
        self.ended = float(min(times[-1] for times, _ in self._tables))

    def at(self, moment: float) -> float:
        """Return the steps done at a moment, interpolated."""
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
    """What a run did once it was warm.

    Attributes:
        steps_per_second: Of all workers together.
        seconds: Over which it was measured.
        bytes_up, bytes_down: A worker's link for each of its steps; None: not counted.
    """

    steps_per_second: float
    seconds: float
    bytes_up: float | None
    bytes_down: float | None


def rates(steps: Steps, counted: Bytes | None, in_rounds: bool = False) -> Rates:
    """Return a run's rates, without its beginning.

    Args:
        steps: Of the run.
        counted: What the links carried; None: nothing was counted.
        in_rounds: Workers exchange once in many steps: the beginning counts, for without it there
            would be more exchanges for a step than there are.

    Raises:
        ValueError: It was over after its first step.
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
class Point:
    """A model that was kept, and what it had cost.

    Attributes:
        seconds: Since the first step was done.
        bytes_up, bytes_down: Of all workers since the start of the processes; None: not counted.
        score: What its work is measured by, the higher the better; None: not evaluated.
    """

    seconds: float
    steps: float
    bytes_up: float | None
    bytes_down: float | None
    score: float | None = None


def points(
    snapshots: Sequence[tuple[float, Path]], steps: Steps, counted: Bytes | None
) -> list[tuple[Point, Path]]:
    """Return what each snapshot had cost, in order."""
    found = []
    for moment, path in snapshots:
        up, down = counted.at(moment) if counted is not None else (None, None)
        found.append((Point(moment - steps.began, steps.at(moment), up, down), path))
    return found


def evaluated(
    kept: Sequence[tuple[Point, Path]],
    targets: Sequence[float],
    evaluate: Callable[[Path], float],
) -> list[Point]:
    """Evaluate in order until every target is reached, and the last."""
    found: list[Point] = []
    best = -math.inf
    for number, (point, path) in enumerate(kept):
        if best < max(targets) or number == len(kept) - 1:
            score = evaluate(path)
            best = max(best, score)
            found.append(dataclasses.replace(point, score=score))
    return found


def first_at(curve: Iterable[Point], target: float) -> Point | None:
    """Return the first model at or above a score, or None."""
    reached = (point for point in curve if point.score is not None and point.score >= target)
    return next(reached, None)


def computed(target_steps: float, warm: Rates) -> Point:
    """Return what a number of steps costs at a run's rates, where the run itself would be long."""
    up, down = (
        None if each is None else each * target_steps for each in (warm.bytes_up, warm.bytes_down)
    )
    return Point(target_steps / warm.steps_per_second, target_steps, up, down)


def read(folder: Path, round_steps: int = 0) -> tuple[Steps, list[tuple[float, Path]]]:
    """Return the steps and the snapshots of a run's folder; for `round_steps` see `Steps`.

    Raises:
        ValueError: Nobody did a step.
    """
    processes, snapshots = [], []
    for path in sorted(folder.glob("progress-*.jsonl")):
        lines = [_parsed(line) for line in path.read_text().splitlines()]
        processes.append([(e["time"], e["steps"]) for e in lines if e and e["steps"] is not None])
        snapshots += [(e["time"], folder / e["snapshot"]) for e in lines if e and e["snapshot"]]
    return Steps(processes, round_steps), sorted(snapshots)


def _parsed(line: str) -> dict[str, Any] | None:
    """Return a line, or None: whoever was ended while writing leaves half a line."""
    try:
        return dict(json.loads(line))
    except ValueError:
        return None
