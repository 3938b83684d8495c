"""The data-sharding file: the contiguous range of the training set that each worker owns.

The module `fractions` imports neither TensorFlow nor numpy, so that a flag can be checked before
these slow imports.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.files import read_bounded

Fractions = Sequence[tuple[float, float]]
#: Largest accepted gap between the end of one worker's range and the start of the next worker's
#: range: one unit of the sixth digit, because users write a third as 0.333333.
_TOLERANCE = 1.1e-6


class _Line(NamedTuple):
    """One line of the data-sharding file, which defines the range of one worker."""

    start: float
    end: float
    number: int  # line number in the data-sharding file, from 1


def read_fractions(path: str | Path, nb_workers: int) -> tuple[tuple[float, float], ...]:
    """Read a data-sharding file: line w contains ``start end``, the fractions (0 to 1) of worker
    w's range.

    In a data-sharding file, blank lines and text after a ``#`` are comments, and a comment line is
    not counted. The ranges of all workers in a data-sharding file must together cover 0 to 1
    without overlap or gap, in any order.

    Returns:
        The (start, end) pairs of workers 1, 2, ..., nb_workers.

    Raises:
        ConfigurationError: The data-sharding file is missing, a line is malformed, the number of
            lines is not ``nb_workers``, or the fractions are out of range, overlap or leave a gap.

    Source: Jiang et al., Grouping-SGD, CCGrid 2019, and its published code ("data allocator").
    Differences: lines are in order of worker id, not of descending address. The original does not
    check the file and loses or doubles examples at gaps and overlaps.
    """
    try:
        text = read_bounded(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"--data_sharding_file {path} cannot be read: {error}. Expected a text file with "
            "`start end` on line w for worker w."
        ) from error
    lines = [
        _parse(path, number, content)
        for number, line in enumerate(text.splitlines(), start=1)
        if (content := line.split("#", 1)[0].strip())
    ]
    if len(lines) != nb_workers:
        raise ConfigurationError(
            f"--data_sharding_file {path} has {len(lines)} lines of fractions; expected one for "
            f"each of the {nb_workers} workers (--nb_workers). Add or remove lines, or change "
            "--nb_workers."
        )
    _check_cover(path, lines)
    return tuple((line.start, line.end) for line in lines)


def ranges(total: int, nb_workers: int, fractions: Fractions | None) -> list[range]:
    """Return the range of example indices (within ``range(total)``) of each worker, without
    overlap.

    Args:
        total: Number of training examples.
        nb_workers: Number of workers in the run.
        fractions: (start, end) of each worker's range as fractions, from ``read_fractions``; None
            raises an error.

    Raises:
        ConfigurationError: The number of fractions is not ``nb_workers``, or a worker would get no
            example.

    >>> ranges(10, 3, [(0.34, 1), (0, 0.17), (0.17, 0.34)])
    [range(3, 10), range(0, 2), range(2, 3)]
    """
    if fractions is None or len(fractions) != nb_workers:
        num_fractions = "none" if fractions is None else str(len(fractions))
        raise ConfigurationError(
            f"--partition file needs fractions of the training set for {nb_workers} workers, but "
            f"has {num_fractions}; set --data_sharding_file, or choose --partition iid."
        )
    # Adjacent workers' ranges share one rounded cut, so that no example is lost or doubled.
    by_start = sorted(range(nb_workers), key=lambda worker: fractions[worker][0])
    cuts = [0, *(round(fractions[worker][0] * total) for worker in by_start[1:]), total]
    owned = {worker: range(*cuts[place : place + 2]) for place, worker in enumerate(by_start)}
    for worker, positions in owned.items():
        if not positions:
            raise ConfigurationError(
                f"--data_sharding_file gives worker {worker + 1} the fractions "
                f"{fractions[worker]} of {total} training examples, which contain none; expected "
                f"at least one. Widen the range on the line of worker {worker + 1}."
            )
    return [owned[worker] for worker in range(nb_workers)]


def _parse(path: str | Path, number: int, text: str) -> _Line:
    try:
        start, end = (float(word) for word in text.split())
    except ValueError as error:
        raise ConfigurationError(
            f"--data_sharding_file {path} line {number} reads {text!r}; expected two numbers "
            "`start end`, for example `0 0.25`."
        ) from error
    if not 0 <= start < end <= 1:
        raise ConfigurationError(
            f"--data_sharding_file {path} line {number} reads {text!r}; expected fractions with 0 "
            "<= start < end <= 1. Correct that line."
        )
    return _Line(start, end, number)


def _check_cover(path: str | Path, lines: Sequence[_Line]) -> None:
    """Raise an error that names two lines of the file if workers' ranges overlap or leave a gap."""
    before: _Line | None = None
    for line in sorted(lines):
        reached = before.end if before else 0.0
        if abs(line.start - reached) > _TOLERANCE:
            low, high = sorted((line.start, reached))
            problem = "overlap" if line.start < reached else "leave a gap"
            where = f"lines {before.number} and {line.number}" if before else f"line {line.number}"
            raise ConfigurationError(
                f"--data_sharding_file {path}: the fractions {problem} between {low:g} and "
                f"{high:g} ({where}); expected each worker's part to start where the part of "
                f"another worker ends. Let line {line.number} start at {reached:g}."
            )
        before = line
    if before and abs(before.end - 1) > _TOLERANCE:
        raise ConfigurationError(
            f"--data_sharding_file {path}: the fractions leave a gap between {before.end:g} and 1 "
            f"(line {before.number}); expected the last fraction to end at 1. Let line "
            f"{before.number} end at 1."
        )
