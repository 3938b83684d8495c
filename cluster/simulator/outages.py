"""When workers die and come back."""

from __future__ import annotations

import dataclasses
import re

from ops.types import ConfigurationError

_OUTAGE = re.compile(r"(\d+)@([\d.]+)(?:-([\d.]+))?")


@dataclasses.dataclass(frozen=True)
class Outage:
    """A worker is killed at `start` and started again at `end` (None: never)."""

    worker: int
    start: float  # seconds
    end: float | None


def parse(text: str, nb_workers: int) -> tuple[Outage, ...]:
    """Read --sim_failures.

    >>> parse("2@30-60, 1@45", 2)[1]
    Outage(worker=1, start=45.0, end=None)

    Raises:
        ConfigurationError: Ill-formed, a worker that the run does not have, or overlapping outages.
    """
    outages = tuple(_outage(part.strip(), nb_workers) for part in text.split(",") if part.strip())
    for number, one in enumerate(outages):
        for other in outages[number + 1 :]:
            first, second = sorted((one, other), key=lambda outage: outage.start)
            if one.worker == other.worker and (first.end is None or second.start <= first.end):
                raise ConfigurationError(
                    f"--sim_failures={text!r}: worker {one.worker} dies again at {second.start:g} "
                    "before it is back."
                )
    return outages


def _outage(text: str, nb_workers: int) -> Outage:
    found = _OUTAGE.fullmatch(text)
    try:
        worker, start = int(found[1]), float(found[2])  # type: ignore[index]
        end = None if found[3] is None else float(found[3])  # type: ignore[index]
    except (TypeError, ValueError) as error:
        raise ConfigurationError(
            f"--sim_failures: {text!r} is not WORKER@SECONDS-SECONDS; expected for example 2@30-60 "
            "(worker 2 is dead from second 30 to 60) or 2@30 (for good)."
        ) from error
    if not 1 <= worker <= nb_workers or (end is not None and end <= start):
        raise ConfigurationError(
            f"--sim_failures: {text!r}: expected a worker of 1..{nb_workers} (--nb_workers) and a "
            "return after the failure."
        )
    return Outage(worker, start, end)
