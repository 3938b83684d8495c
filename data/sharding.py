"""Which training examples belong to which worker.

Every worker computes its own shard from the labels, the seed and its id alone; together the shards
hold each example exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data import PARTITIONS
from ops.types import ConfigurationError

Fractions = Sequence[tuple[float, float]]
_TOLERANCE = 1e-6


def shard(
    labels: NDArray[np.integer],
    nb_workers: int,
    id_worker: int,
    partition: str,
    seed: int,
    fractions: Fractions | None = None,
    *,
    file_offsets: NDArray[np.int64] | None = None,
) -> NDArray[np.int64]:
    """Return the positions of one worker's examples, ascending.

    Args:
        labels: [N] class of each training example, the same on every worker.
        nb_workers: How many workers there are.
        id_worker: This one, from 1.
        partition: "iid": equal shares of one shuffle; "contiguous": equal runs of the stored order;
            "file": runs of the stored order by ``fractions``.
        seed: Seeds the shuffle; the same on every worker.
        fractions: (start, end) of each worker, from ``read_fractions``; only for "file".
        file_offsets: [files + 1] first example of each file, then N: "contiguous" deals out files.

    Returns:
        [n] int64, ascending and unique. The shards of all workers are disjoint and complete.

    Raises:
        ConfigurationError: Unknown partition, bad id, empty shard, or "file" without fractions.

    Source: specs/adacomp.md section 7 (files), specs/grouping_sgd.md (fractions file).
    """
    _check_partition(partition)
    owned = equal_range(len(labels), nb_workers, id_worker, "training examples")
    if partition == "iid":
        order = np.random.default_rng([seed, len(labels)]).permutation(len(labels))
        return np.sort(order[owned.start : owned.stop]).astype(np.int64)
    if partition == "file":
        owned = _range_by_fractions(len(labels), nb_workers, id_worker, fractions)
    elif file_offsets is not None:
        files = equal_range(len(file_offsets) - 1, nb_workers, id_worker, "training files")
        owned = range(int(file_offsets[files.start]), int(file_offsets[files.stop]))
    return np.arange(owned.start, owned.stop, dtype=np.int64)


def equal_range(
    total: int, nb_workers: int, id_worker: int, what: str, owners: str = "workers"
) -> range:
    """Return one owner's run of ``range(total)``; the first ``total mod n`` get one item more.

    Args:
        total: Items to deal out.
        nb_workers: Owners.
        id_worker: This owner, 1..nb_workers.
        what: Names the items in errors.
        owners: Names the owners in errors.

    Raises:
        ConfigurationError: More owners than items, or the id is out of range.

    >>> [len(equal_range(10, 4, number, "items")) for number in (1, 2, 3, 4)]
    [3, 3, 2, 2]
    """
    if not 1 <= id_worker <= nb_workers:
        raise ConfigurationError(
            f"--id_worker {id_worker} is out of range; expected 1 to {nb_workers} (--nb_workers)."
        )
    if nb_workers > total:
        raise ConfigurationError(
            f"{total} {what} cannot be split among {nb_workers} {owners}; expected at least one "
            f"each. Use at most {total} {owners}, or a larger data set."
        )
    share, remainder = divmod(total, nb_workers)
    start = (id_worker - 1) * share + min(id_worker - 1, remainder)
    return range(start, start + share + (id_worker <= remainder))


def read_fractions(path: str | Path, nb_workers: int) -> tuple[tuple[float, float], ...]:
    """Read a data-sharding file: line w holds ``start end`` of worker w, within 0 and 1.

    Blank lines and what follows a ``#`` are comments. Together the lines must cover 0 to 1 without
    overlap or gap, in any order.

    Returns:
        (start, end) of worker 1, 2, ..., nb_workers.

    Raises:
        ConfigurationError: The file is missing, a line is malformed, the number of lines is not
            ``nb_workers``, or the fractions are out of range, overlap or leave a gap.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"--data_sharding_file {path} cannot be read: {error}. Expected a text file with "
            "`start end` on line w for worker w."
        ) from error
    fractions = tuple(
        _parse_fractions(path, number, text)
        for number, line in enumerate(lines, start=1)
        if (text := line.split("#", 1)[0].strip())
    )
    if len(fractions) != nb_workers:
        raise ConfigurationError(
            f"--data_sharding_file {path} has {len(fractions)} lines of fractions; expected one "
            f"for each of the {nb_workers} workers (--nb_workers)."
        )
    _check_cover(path, fractions)
    return fractions


def _check_partition(partition: str) -> None:
    if partition not in PARTITIONS:
        raise ConfigurationError(
            f"--partition {partition} is not known; expected one of {', '.join(PARTITIONS)}."
        )


def _parse_fractions(path: str | Path, number: int, text: str) -> tuple[float, float]:
    try:
        start, end = (float(word) for word in text.split())
    except ValueError as error:
        raise ConfigurationError(
            f"--data_sharding_file {path} line {number} reads {text!r}; expected two numbers "
            "`start end`, for example `0 0.25`."
        ) from error
    if not 0 <= start < end <= 1:
        raise ConfigurationError(
            f"--data_sharding_file {path} line {number} reads {text!r}; expected "
            "0 <= start < end <= 1."
        )
    return start, end


def _check_cover(path: str | Path, fractions: Fractions) -> None:
    reached = 0.0
    for start, end in sorted(fractions):
        if abs(start - reached) > _TOLERANCE:
            problem = "overlap" if start < reached else "leave a gap"
            low, high = sorted((start, reached))
            raise ConfigurationError(
                f"--data_sharding_file {path}: the fractions {problem} between {low:g} and "
                f"{high:g}; expected each worker to start where another one ends."
            )
        reached = end
    if abs(reached - 1) > _TOLERANCE:
        raise ConfigurationError(
            f"--data_sharding_file {path}: the fractions leave a gap between {reached:g} and 1; "
            "expected the last one to end at 1."
        )


def _range_by_fractions(
    total: int, nb_workers: int, id_worker: int, fractions: Fractions | None
) -> range:
    if fractions is None or len(fractions) != nb_workers:
        found = "none" if fractions is None else str(len(fractions))
        raise ConfigurationError(
            f"--partition file needs the fractions of {nb_workers} workers and got {found}; set "
            "--data_sharding_file, or choose --partition iid."
        )
    # Neighbours share a cut, so that rounding neither loses nor doubles an example.
    cuts = [round(start * total) for start, _ in sorted(fractions)] + [total]
    place = sorted(fractions).index(fractions[id_worker - 1])
    owned = range(cuts[place], cuts[place + 1])
    if not owned:
        raise ConfigurationError(
            f"--data_sharding_file gives worker {id_worker} the fractions "
            f"{fractions[id_worker - 1]} of {total} training examples, which is none; expected at "
            "least one. Widen its line."
        )
    return owned
