"""Simulated devices: step times (constant, random or from a trace), and outages of workers.

`parse_speeds` parses --sim_step_seconds, and `parse_outages` parses --sim_failures.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.files import read_bounded
from thinwire.runtime.run.settings import per_worker

_LONGEST_SECONDS = 86_400.0
_WIDEST_SIGMA = 5.0
_FLAG = "sim_step_seconds"
_MOST_TRACE_BYTES = 1 << 28


@dataclasses.dataclass(frozen=True)
class Distribution:
    """A distribution of step times: parameter names, and a function that draws a step time."""

    parameters: tuple[str, ...]
    # Function of a random generator and the parameters that returns a step time in seconds.
    draw: Callable[[Any, Sequence[float]], float]


#: Name in --sim_step_seconds -> distribution of step times. The parameter `mean` of lognormal is
#: the mean of the seconds, not the mean of their logarithm.
SHAPES = {
    "constant": Distribution(("seconds",), lambda rng, v: v[0]),
    "uniform": Distribution(("low", "high"), lambda rng, v: float(rng.uniform(v[0], v[1]))),
    "exponential": Distribution(("mean",), lambda rng, v: float(rng.exponential(v[0]))),
    "lognormal": Distribution(
        ("mean", "sigma"),
        lambda rng, v: float(v[0] * math.exp(v[1] * rng.standard_normal() - v[1] ** 2 / 2)),
    ),
}


@dataclasses.dataclass(frozen=True)
class StepTime:
    """The times of one worker's mini-batches: a distribution, or a trace that is repeated."""

    shape: str = "constant"  # name of the distribution of the step times, a key of SHAPES
    values: tuple[float, ...] = ()  # parameters of the distribution, in the order of SHAPES
    trace: tuple[float, ...] = ()  # seconds of successive mini-batches; (): no trace is used

    def sampler(self, seed: Sequence[int]) -> Callable[[], float]:
        """Return a function that returns the duration of the next mini-batch, in seconds."""
        if self.trace:
            return _repeat(self.trace)
        from numpy.random import default_rng

        rng, draw = default_rng(seed), SHAPES[self.shape].draw
        return lambda: draw(rng, self.values)


def parse_speeds(text: str, nb_workers: int) -> tuple[StepTime, ...]:
    """Parse the flag --sim_step_seconds (times of mini-batches) into one entry per worker.

    >>> [step.values for step in parse_speeds("0.1,0.4", 2)]
    [(0.1,), (0.4,)]

    Args:
        text: Value of --sim_step_seconds: numbers separated by commas (one, or one per worker),
            distributions ``name:value,...`` separated by semicolons (one, or one per worker), or
            ``trace:FILE``.
        nb_workers: Number of workers of the run.

    Raises:
        ConfigurationError: The text of --sim_step_seconds has none of the allowed forms, or a value
            is out of range.
    """
    if text.startswith("trace:"):
        return _traces(text.removeprefix("trace:"), nb_workers)
    if ":" in text:
        steps = [_distribution(part.strip()) for part in text.split(";")]
        chosen = per_worker(range(len(steps)), nb_workers, _FLAG)
        return tuple(steps[int(number)] for number in chosen)
    values = per_worker(_numbers(text.split(","), text), nb_workers, _FLAG)
    return tuple(StepTime(values=(_checked(value, "seconds"),)) for value in values)


def _distribution(text: str) -> StepTime:
    name, colon, parameters = text.partition(":")
    if not colon:
        return StepTime(values=(_checked(_numbers([text], text)[0], "seconds"),))
    shape = SHAPES.get(name)
    if shape is None:
        raise ConfigurationError(
            f"--{_FLAG}={text!r}: expected one of {', '.join(SHAPES)} or trace, then a colon."
        )
    values = _numbers(parameters.split(","), text)
    if len(values) != len(shape.parameters):
        raise ConfigurationError(
            f"--{_FLAG}={text!r}: expected {name}:{','.join(shape.parameters)}."
        )
    for parameter, value in zip(shape.parameters, values, strict=True):
        _checked(value, parameter)
    if name == "uniform" and values[0] > values[1]:
        raise ConfigurationError(f"--{_FLAG}={text!r}: expected bounds with LOW <= HIGH.")
    return StepTime(name, tuple(values))


def _checked(value: float, parameter: str) -> float:
    low, high = (0.0, _WIDEST_SIGMA) if parameter == "sigma" else (1e-6, _LONGEST_SECONDS)
    if not low <= value <= high:
        raise ConfigurationError(
            f"--{_FLAG}: {parameter} is {value:g}; expected a number from {low:g} to {high:g}."
        )
    return value


def _numbers(words: Iterable[str], text: str) -> list[float]:
    try:
        return [float(word) for word in words]
    except ValueError as error:
        raise ConfigurationError(
            f"--{_FLAG}={text!r}: expected seconds (0.2 or 0.1,0.2,0.4), a distribution (for "
            f"example lognormal:0.2,0.3), or trace:FILE ({error})."
        ) from error


def _traces(path: str, nb_workers: int) -> tuple[StepTime, ...]:
    """Read a file of step times: a line per training step, one column for all or for each worker.

    If the file has one column for n workers, worker w starts at the fraction (w - 1) / n of the
    column, so that the workers have different step times.
    """
    try:
        text = read_bounded(path, _MOST_TRACE_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"--{_FLAG}=trace:{path}: {error}.") from error
    lines = [words for line in text.splitlines() if (words := line.partition("#")[0].split())]
    rows = [_numbers(words, f"trace:{path}") for words in lines]
    columns = {len(row) for row in rows}
    if columns not in ({1}, {nb_workers}):
        raise ConfigurationError(
            f"--{_FLAG}=trace:{path} has lines of {sorted(columns)} numbers; expected one number "
            f"per line, or one for each of the {nb_workers} workers (--nb_workers)."
        )
    for row in rows:
        for value in row:
            _checked(value, f"a step of {path}")
    if columns == {nb_workers}:
        return tuple(StepTime(trace=column) for column in zip(*rows, strict=True))
    trace = tuple(row[0] for row in rows)
    starts = [len(trace) * number // nb_workers for number in range(nb_workers)]
    return tuple(StepTime(trace=trace[start:] + trace[:start]) for start in starts)


def _repeat(trace: Sequence[float]) -> Callable[[], float]:
    import itertools

    steps = itertools.cycle(trace)
    return lambda: next(steps)


_OUTAGE = re.compile(r"(\d+)@([\d.]+)(?:-([\d.]+))?")


@dataclasses.dataclass(frozen=True)
class Outage:
    """Outage of a worker: killed at virtual time `start`, started again at `end`, in seconds."""

    worker: int
    start: float
    # End of the outage in virtual seconds; None: the worker does not start again.
    end: float | None


def parse_outages(text: str, nb_workers: int) -> tuple[Outage, ...]:
    """Parse the flag --sim_failures (times at which workers are killed and started again).

    >>> parse_outages("2@30-60, 1@45", 2)[1]
    Outage(worker=1, start=45.0, end=None)

    Raises:
        ConfigurationError: The text of --sim_failures is ill-formed, names a worker that the run
            does not have, or lists overlapping outages of one worker.
    """
    outages = tuple(_outage(part.strip(), nb_workers) for part in text.split(",") if part.strip())
    for number, current in enumerate(outages):
        for other in outages[number + 1 :]:
            first, second = sorted((current, other), key=lambda outage: outage.start)
            if current.worker == other.worker and (first.end is None or second.start <= first.end):
                raise ConfigurationError(
                    f"--sim_failures={text!r}: worker {current.worker} dies again at second "
                    f"{second.start:g}, before its return; expected outages of a worker that do "
                    "not overlap."
                )
    return outages


def _outage(text: str, nb_workers: int) -> Outage:
    match = _OUTAGE.fullmatch(text)
    try:
        worker, start = int(match[1]), float(match[2])  # type: ignore[index]
        end = None if match[3] is None else float(match[3])  # type: ignore[index]
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"--sim_failures: outage {text!r} is not WORKER@SECONDS-SECONDS; expected for example "
            "2@30-60 (worker 2 is dead from second 30 to 60) or 2@30 (worker 2 dies for good)."
        ) from error
    if not 1 <= worker <= nb_workers or (end is not None and end <= start):
        raise ConfigurationError(
            f"--sim_failures: the outage {text!r} is not valid; expected a worker in "
            f"1..{nb_workers} (--nb_workers) and a return time after the failure."
        )
    return Outage(worker, start, end)
