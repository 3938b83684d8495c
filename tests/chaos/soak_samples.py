"""Samples of processes: memory, file descriptors, threads; and the check for growth."""

from __future__ import annotations

import dataclasses
import os
import statistics
from collections.abc import Sequence

_WARM_UP = 0.25  # fraction of a life: caches fill, graphs are compiled
#: Growth is checked only for a life of at least this fraction of the run.
_LEAST_PART = 0.4
#: Allowed growth between the first and the last quarter of a process's life after its warm-up.
_MOST_GROWTH, _MOST_GROWTH_MIB, _MOST_FILES, _MOST_THREADS = 0.05, 12.0, 6.0, 8.0


@dataclasses.dataclass(frozen=True)
class Sample:
    """One process at one moment."""

    seconds: float  # since the soak began
    mib: float  # resident
    files: int
    threads: int


@dataclasses.dataclass(frozen=True)
class Growth:
    """Medians of a process's resources in the first quarter after its warm-up, and in its last."""

    name: str
    seconds: float  # seconds of the process's life
    mib: tuple[float, float]
    files: tuple[float, float]
    threads: tuple[float, float]
    mib_per_hour: float  # slope, by Theil and Sen
    judged: bool  # long enough

    @property
    def is_flat(self) -> bool:
        """Whether nothing has grown by more than a process that is restarted would hide."""
        before, after = self.mib
        return (
            after <= before * (1 + _MOST_GROWTH) + _MOST_GROWTH_MIB
            and self.files[1] <= self.files[0] + _MOST_FILES
            and self.threads[1] <= self.threads[0] + _MOST_THREADS
        )


def sample(pid: int, seconds: float) -> Sample | None:
    """Sample a process this long after the soak's start; None if the process has ended."""
    try:
        with open(f"/proc/{pid}/status") as status:
            told = dict(line.split(":", 1) for line in status if ":" in line)
        files = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return None
    if "VmRSS" not in told:  # it has ended and was not reaped
        return None
    mib = int(told["VmRSS"].split()[0]) / 1024
    return Sample(seconds, mib, files, int(told["Threads"]))


def growth(name: str, samples: Sequence[Sample], run_seconds: float) -> Growth | None:
    """Judge one life; None where it was too short to have quarters."""
    start = samples[0].seconds if samples else 0.0
    lived = samples[-1].seconds - start if samples else 0.0
    warm = [each for each in samples if each.seconds - start >= _WARM_UP * lived]
    quarter = len(warm) // 4
    if quarter < 3:
        return None
    first, last = warm[:quarter], warm[-quarter:]

    def both(field: str) -> tuple[float, float]:
        values = [[getattr(each, field) for each in part] for part in (first, last)]
        return statistics.median(values[0]), statistics.median(values[1])

    return Growth(
        name,
        lived,
        both("mib"),
        both("files"),
        both("threads"),
        _slope(warm) * 3600,
        lived >= _LEAST_PART * run_seconds,
    )


def _slope(samples: Sequence[Sample]) -> float:
    """Return MiB a second: the median of the slopes between the halves, one sample with one."""
    half = len(samples) // 2
    pairs = zip(samples[:half], samples[-half:], strict=True)
    return statistics.median((b.mib - a.mib) / (b.seconds - a.seconds) for a, b in pairs)
