"""Splits the training examples among the workers.

Every worker computes the split of the training set from the labels, the seed and the flags, without
messages. Each training example belongs to exactly one worker; only the partition "positions" may
omit examples. The dict `SPLITS` maps each value of --partition to the function that splits the
training set. The function `split_dirichlet` models the label skew of federated learning.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.data import fractions
from thinwire.data.choices import BY_CLASS, PARTITIONS
from thinwire.data.fractions import Fractions
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.files import read_bounded

Shards = list[NDArray[np.int64]]
#: Default concentration (alpha) of the partition "dirichlet": strong label skew, but few
#: workers with too few examples.
DIRICHLET_ALPHA = 0.5
#: Largest number of distinct labels for which `label_counts` returns counts.
MOST_LABELS = 200
#: Size limit of a file of positions, in bytes. The positions of 10 million examples fit.
_MOST_FILE_BYTES = 1 << 27
#: Number of Dirichlet draws before `_fill_up` moves examples to workers with too few examples.
_MOST_DRAWS = 20
#: Number added to the seed, so that the partitions "dirichlet" and "iid" draw different random
#: numbers.
_STREAM = 2


def split_dirichlet(
    labels: NDArray[Any], nb_workers: int, alpha: float, smallest: int, seed: int
) -> list[NDArray[np.int64]]:
    """Split each label's examples among workers in proportions drawn from Dirichlet(alpha, ...,
    alpha).

    With a smaller alpha, a worker gets fewer labels and the shard sizes differ more; an infinite
    alpha corresponds to the partition "iid". If a worker would get fewer than ``smallest``
    examples, `split_dirichlet` draws the numbers of examples of all labels and workers again, up to
    20 times in all. After 20 draws, `split_dirichlet` repairs the draw with the fewest missing
    examples: each worker with too few examples gets examples of the most frequent label from the
    worker with the most examples, until it has ``smallest`` examples.

    Args:
        labels: Class of each training example, [N]; must be equal on every worker.
        nb_workers: Number of workers in the run.
        alpha: Concentration of the Dirichlet distribution, above 0.
        smallest: Least number of examples that a worker may have: the size of one mini-batch.
        seed: Seed of the draws and shuffles; must be equal on every worker.

    Returns:
        One array per worker: positions of the worker's examples, [n] int64, ascending.

    Raises:
        ConfigurationError: The training set has fewer than ``nb_workers * smallest`` examples.

    Source: Hsu, Qi, Brown, arXiv 1909.06335 (Dirichlet skew); Yurochkin et al., ICML 2019, and Li
    et al., arXiv 2102.02079, for the draw per label and for drawing again.
    """
    if nb_workers * smallest > len(labels):
        raise ConfigurationError(
            f"--partition dirichlet: {len(labels)} training examples cannot give each of "
            f"{nb_workers} workers one batch of {smallest} examples; expected at least "
            f"{nb_workers * smallest} training examples. Lower --batch_size or --nb_workers, or "
            "take a larger --dataset."
        )
    rng = np.random.default_rng([seed, len(labels), _STREAM])
    sizes = np.unique(labels, return_counts=True)[1]
    table = _draw_table(rng, sizes, nb_workers, alpha, smallest)
    _fill_up(table, smallest)
    pieces: list[list[NDArray[np.int64]]] = [[] for _ in range(nb_workers)]
    groups = np.split(np.argsort(labels, kind="stable"), np.cumsum(sizes)[:-1])
    for members, row in zip(groups, table, strict=True):
        dealt = np.split(rng.permutation(members), np.cumsum(row)[:-1])
        for worker_pieces, piece in zip(pieces, dealt, strict=True):
            worker_pieces.append(piece)
    return [np.sort(np.concatenate(worker_pieces)).astype(np.int64) for worker_pieces in pieces]


def _draw_table(
    rng: np.random.Generator,
    sizes: NDArray[np.int64],
    nb_workers: int,
    alpha: float,
    smallest: int,
) -> NDArray[np.int64]:
    """Return the number of examples per label and worker: [labels, nb_workers] int64.

    The returned table of examples per label and worker is the first random draw in which every
    worker has ``smallest`` examples, or else the draw with the fewest missing examples.
    """
    best, least = np.zeros((len(sizes), nb_workers), np.int64), None
    for _ in range(_MOST_DRAWS):
        shares = rng.dirichlet(np.full(nb_workers, alpha), size=len(sizes))
        # Adjacent workers share one rounded cut of a label's examples, so that rounding neither
        # loses nor doubles an example. The last cut is exactly the number of the label's examples,
        # because the cumulative sum of the workers' shares may round to slightly less or more than
        # 1.
        cuts = np.rint(np.cumsum(shares, axis=1) * sizes[:, None]).astype(np.int64)
        cuts = np.minimum(cuts, sizes[:, None])
        cuts[:, -1] = sizes
        table = np.diff(cuts, axis=1, prepend=0)
        lacking = int(np.maximum(0, smallest - table.sum(axis=0)).sum())
        if least is None or lacking < least:
            best, least = table, lacking
        if not lacking:
            break
    return best


def _fill_up(table: NDArray[np.int64], smallest: int) -> None:
    """Move examples in ``table`` from large shards to shards with fewer than ``smallest``
    examples.
    """
    totals = table.sum(axis=0)
    for worker in np.flatnonzero(totals < smallest):
        while totals[worker] < smallest:
            giver = int(np.argmax(totals))
            label = int(np.argmax(table[:, giver]))
            moved = min(
                smallest - totals[worker], totals[giver] - smallest, int(table[label, giver])
            )
            table[label, giver] -= moved
            table[label, worker] += moved
            totals[giver] -= moved
            totals[worker] += moved


@dataclasses.dataclass(frozen=True)
class PartitionRule:
    """Rule that splits the training set; must be equal on every worker of a run.

    Args:
        partition: A name of ``data.PARTITIONS``:
            "iid": equal parts of one random order;
            "contiguous": equal ranges of the stored order;
            "class": equal ranges of the order by label, so that a worker sees few labels;
            "dirichlet": the examples of each label in proportions of a Dirichlet draw;
            "file": ranges of the stored order by ``fractions``;
            "positions": the listed ``positions``; a worker may have no examples.
        nb_workers: Number of workers in the run.
        seed: Seed of the random shuffle and of the Dirichlet draws.
        fractions: (start, end) of each worker's range as fractions, from ``read_fractions``; only
            for the partition "file".
        dirichlet_alpha: Concentration of the Dirichlet distribution; only for the partition
            "dirichlet".
        batch_size: Least number of examples that a worker may have; only for the partition
            "dirichlet".
        positions: Positions of each worker's examples in the training set, from ``read_positions``;
            only for the partition "positions".
    """

    partition: str
    nb_workers: int
    seed: int
    fractions: Fractions | None = None
    dirichlet_alpha: float = DIRICHLET_ALPHA
    batch_size: int = 1
    positions: Shards | None = None


def read_positions(path: str | Path, nb_workers: int) -> Shards:
    """Read a file of positions: line w lists the positions of worker w's training examples.

    A position is the index of an example in the training set, from 0. An empty line of the file of
    positions gives a worker no examples. Lines of the file of positions that begin with ``#`` are
    comments.

    Returns:
        One array per worker: positions of the worker's examples, [n] int64, ascending.

    Raises:
        ConfigurationError: The file of positions cannot be read, does not have one line for each
            worker, contains something else than positions, or lists an example twice.
    """
    flag = f"--partition_file={path}"
    try:
        lines = read_bounded(path, _MOST_FILE_BYTES).decode().splitlines()
        shards = [
            np.sort(np.array(line.split(), dtype=np.int64))
            for line in lines
            if not line.startswith("#")
        ]
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigurationError(
            f"the file {flag} cannot be read: {error}. Expected a text file with the positions of "
            "worker w's examples in the training set, from 0, on line w."
        ) from error
    if len(shards) != nb_workers:
        raise ConfigurationError(
            f"the file {flag} has {len(shards)} lines; expected one line for each of the "
            f"{nb_workers} workers (--nb_workers). Add or remove lines, or change --nb_workers."
        )
    dealt = np.sort(np.concatenate(shards))
    twice = dealt[1:][dealt[1:] == dealt[:-1]]
    if (dealt.size and dealt[0] < 0) or twice.size:
        wrong = twice[0] if twice.size else dealt[0]
        raise ConfigurationError(
            f"the file {flag} lists position {wrong}, which is negative or listed twice; expected "
            "each example at most once, for one worker. Correct the file."
        )
    return shards


def write_positions(path: str | Path, shards: Shards) -> None:
    """Write the positions of each worker's examples in the format of ``read_positions``."""
    lines = (" ".join(map(str, positions.tolist())) + "\n" for positions in shards)
    Path(path).write_text("".join(lines), encoding="ascii")


def split(
    labels: NDArray[Any], rule: PartitionRule, file_offsets: NDArray[np.int64] | None = None
) -> Shards:
    """Return the positions in the training set of every worker's examples.

    Args:
        labels: Class of each training example, [N]; must be equal on every worker. If the labels
            are not classes, they may have any form [N, ...], and only N is used.
        rule: Rule that splits the training examples among the workers.
        file_offsets: Index of the first example of each data file, then the number N of examples,
            [files + 1] int64. With the offsets of data files, the partition "contiguous" splits at
            the borders of files.

    Returns:
        One array per worker: positions of the worker's examples, [n] int64. For the partition
        "class", a worker's positions are ordered by label, then by position; for all other
        partitions they ascend. The workers' arrays are disjoint. The workers'
        arrays together hold all examples; only the partition "positions" may omit examples.

    Raises:
        ConfigurationError: The partition is unknown, there are more workers than examples, a
            worker's shard is empty, or the partition "file" has no fractions.

    Source: Hardy et al., NCA 2017 (files); the published codes of ESync (contiguous, class) and
    Grouping-SGD (fractions). Differences: the originals lose the last N mod n examples.
    """
    if rule.partition not in PARTITIONS:
        raise ConfigurationError(
            f"--partition {rule.partition} is not known; expected one of {', '.join(PARTITIONS)}."
        )
    if rule.partition != "positions":
        equal_range(len(labels), rule.nb_workers, 1, "training examples")
    if rule.partition in BY_CLASS and not are_classes(labels):
        raise ConfigurationError(
            f"--partition={rule.partition} splits examples by class, but these examples have no "
            "classes; expected "
            f"--partition={'|'.join(name for name in PARTITIONS if name not in BY_CLASS)}."
        )
    return SPLITS[rule.partition](labels, rule, file_offsets)


def shard(
    labels: NDArray[Any],
    id_worker: int,
    rule: PartitionRule,
    file_offsets: NDArray[np.int64] | None = None,
) -> NDArray[np.int64]:
    """Return the positions in the training set of one worker's examples: [n] int64.

    The docstring of `split` describes the arguments and the errors.
    """
    equal_range(len(labels), rule.nb_workers, id_worker, "training examples")
    return split(labels, rule, file_offsets)[id_worker - 1]


def equal_range(
    total: int, nb_workers: int, id_worker: int, what: str, owners: str = "workers"
) -> range:
    """Return the range of items (such as examples) that one owner (such as a worker) gets if
    ``range(total)`` is split evenly.

    The first ``total mod nb_workers`` owners (workers) get one item more than the later owners.

    Args:
        total: Number of items to split, for example training examples.
        nb_workers: Number of owners of the items, for example workers.
        id_worker: Id of the owner (worker) whose range is returned, 1..nb_workers.
        what: Name of the items in error messages.
        owners: Name of the owners in error messages.

    Raises:
        ConfigurationError: There are more owners (workers) than items, or ``id_worker`` is out of
            range.

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
            f"for each of the {owners}. Use at most {total} {owners}, or a larger data set."
        )
    share, remainder = divmod(total, nb_workers)
    start = (id_worker - 1) * share + min(id_worker - 1, remainder)
    return range(start, start + share + (id_worker <= remainder))


def are_classes(labels: NDArray[Any]) -> bool:
    """Return True if labels are classes: one integer for each example."""
    return labels.ndim == 1 and bool(np.issubdtype(labels.dtype, np.integer))


def label_counts(labels: NDArray[Any]) -> dict[int, int]:
    """Return the number of examples per label, in ascending order of labels, for the run's report.

    The list of examples per label is empty if the labels are not classes. The result is also empty
    if more than ``MOST_LABELS`` labels occur, because a worker sends the counts in every report.

    >>> label_counts(np.array([3, 0, 3]))
    {0: 1, 3: 2}
    """
    if not are_classes(labels):
        return {}
    values, counts = np.unique(labels, return_counts=True)
    if len(values) > MOST_LABELS:
        return {}
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def _cut_equally(order: NDArray[Any], nb_workers: int, what: str = "training examples") -> Shards:
    """Cut a sequence (of all training examples, for example) into one range for each worker."""
    owned = [equal_range(len(order), nb_workers, number + 1, what) for number in range(nb_workers)]
    return [order[part.start : part.stop].astype(np.int64) for part in owned]


def _iid(labels: NDArray[Any], rule: PartitionRule) -> Shards:
    order = np.random.default_rng([rule.seed, len(labels)]).permutation(len(labels))
    return [np.sort(owned) for owned in _cut_equally(order, rule.nb_workers)]


def _contiguous(total: int, nb_workers: int, file_offsets: NDArray[np.int64] | None) -> Shards:
    if file_offsets is not None:
        files = _cut_equally(np.arange(len(file_offsets) - 1), nb_workers, "training files")
        return [np.arange(file_offsets[run[0]], file_offsets[run[-1] + 1]) for run in files]
    # The blocks of the n workers are equal to the blocks in ESync's code, which never uses the last
    # N mod n of N examples. Each of the first N mod n workers gets one of these examples.
    block, num_tail = divmod(total, nb_workers)
    tail = total - num_tail
    return [
        np.append(
            np.arange(worker * block, (worker + 1) * block, dtype=np.int64),
            np.arange(tail + worker, tail + worker + (worker < num_tail), dtype=np.int64),
        )
        for worker in range(nb_workers)
    ]


def _file(total: int, rule: PartitionRule) -> Shards:
    owned = fractions.ranges(total, rule.nb_workers, rule.fractions)
    return [np.arange(part.start, part.stop, dtype=np.int64) for part in owned]


def _positions(total: int, rule: PartitionRule) -> Shards:
    if rule.positions is None:
        raise ConfigurationError(
            "--partition=positions needs the positions of each worker's examples; set "
            "--partition_file, or choose --partition=iid."
        )
    last = max((int(positions[-1]) for positions in rule.positions if positions.size), default=-1)
    if last >= total:
        raise ConfigurationError(
            f"--partition_file lists position {last}, but there are {total} training "
            f"examples; expected positions below {total}. The file belongs to another data "
            "set."
        )
    return rule.positions


#: Name of a partition -> function (labels, rule, file_offsets) that returns the workers' shards.
SPLITS: Mapping[str, Callable[[NDArray[Any], PartitionRule, NDArray[np.int64] | None], Shards]] = {
    "iid": lambda labels, rule, _: _iid(labels, rule),
    "contiguous": lambda labels, rule, file_offsets: _contiguous(
        len(labels), rule.nb_workers, file_offsets
    ),
    "class": lambda labels, rule, _: _cut_equally(
        np.argsort(labels, kind="stable"), rule.nb_workers
    ),
    "dirichlet": lambda labels, rule, _: split_dirichlet(
        labels, rule.nb_workers, rule.dirichlet_alpha, rule.batch_size, rule.seed
    ),
    "file": lambda labels, rule, _: _file(len(labels), rule),
    "positions": lambda labels, rule, _: _positions(len(labels), rule),
}
