"""Which training examples belong to which worker.

Every worker computes the split by itself from the labels, the seed and the flags alone; together
the shards hold each example exactly once. `SPLITS` has a function for each --partition;
`split_dirichlet` is label skew as federated learning models it.
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
#: Concentration of "dirichlet" when none is given: strong skew, few workers starve.
DIRICHLET_ALPHA = 0.5
MOST_LABELS = 200
#: A file of positions of 10 million examples is smaller.
_MOST_FILE_BYTES = 1 << 27
#: Draws before shares that are too small are filled up instead.
_MOST_DRAWS = 20
#: Separates the draws from those of the other partitions with the same seed.
_STREAM = 2


def split_dirichlet(
    labels: NDArray[Any], nb_workers: int, alpha: float, smallest: int, seed: int
) -> list[NDArray[np.int64]]:
    """Deal out each label's examples in proportions drawn from Dirichlet(alpha, ..., alpha).

    The smaller alpha, the fewer labels a worker sees and the less equal the sizes of the shards;
    alpha to infinity is "iid". When a worker would get fewer than ``smallest`` examples the whole
    table is drawn again, up to 20 times; then the draw that lacks least is filled up from the
    largest shard of the moment, with examples of that shard's commonest label.

    Args:
        labels: [N] class of each training example, the same on every worker.
        nb_workers: Workers.
        alpha: Concentration, above 0.
        smallest: Examples every worker gets at least: one mini-batch.
        seed: Seeds draws and shuffles; the same on every worker.

    Returns:
        Of each worker [n] int64, ascending.

    Raises:
        ConfigurationError: There are fewer than ``nb_workers * smallest`` examples.

    Source: Hsu, Qi, Brown, arXiv 1909.06335 (Dirichlet skew); Yurochkin et al., ICML 2019, and Li
    et al., arXiv 2102.02079, for the label-wise form used here and for drawing again.
    """
    if nb_workers * smallest > len(labels):
        raise ConfigurationError(
            f"--partition dirichlet: {len(labels)} training examples cannot give each of "
            f"{nb_workers} workers one batch of {smallest}; expected at least "
            f"{nb_workers * smallest}. Lower --batch_size or --nb_workers, or take a larger "
            "--dataset."
        )
    rng = np.random.default_rng([seed, len(labels), _STREAM])
    sizes = np.unique(labels, return_counts=True)[1]
    table = _draw_table(rng, sizes, nb_workers, alpha, smallest)
    _fill_up(table, smallest)
    pieces: list[list[NDArray[np.int64]]] = [[] for _ in range(nb_workers)]
    groups = np.split(np.argsort(labels, kind="stable"), np.cumsum(sizes)[:-1])
    for members, row in zip(groups, table, strict=True):
        dealt = np.split(rng.permutation(members), np.cumsum(row)[:-1])
        for mine, piece in zip(pieces, dealt, strict=True):
            mine.append(piece)
    return [np.sort(np.concatenate(mine)).astype(np.int64) for mine in pieces]


def _draw_table(
    rng: np.random.Generator,
    sizes: NDArray[np.int64],
    nb_workers: int,
    alpha: float,
    smallest: int,
) -> NDArray[np.int64]:
    """Return examples per label and worker, [labels, nb_workers]: the first draw that suffices."""
    best, least = np.zeros((len(sizes), nb_workers), np.int64), None
    for _ in range(_MOST_DRAWS):
        shares = rng.dirichlet(np.full(nb_workers, alpha), size=len(sizes))
        # Neighbours share a cut, so that rounding neither loses nor doubles an example.
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
    """Move examples from the largest shards to those below ``smallest``, in place."""
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
    """How to split; the same on every worker of a run.

    Args:
        partition: A name of ``data.PARTITIONS``:
            "iid": equal shares of one shuffle;
            "contiguous": equal runs of the stored order;
            "class": equal runs of the order by label, so that a worker sees few labels;
            "dirichlet": each label dealt out by a Dirichlet draw;
            "file": runs of the stored order by ``fractions``;
            "positions": ``positions`` as they are, which may leave a worker without examples.
        nb_workers: How many workers there are.
        seed: Seeds shuffle and draws.
        fractions: (start, end) of each worker, from ``read_fractions``; only for "file".
        dirichlet_alpha: Concentration; only for "dirichlet".
        batch_size: What "dirichlet" gives every worker at least.
        positions: Of every worker's examples, from ``read_positions``; only for "positions".
    """

    partition: str
    nb_workers: int
    seed: int
    fractions: Fractions | None = None
    dirichlet_alpha: float = DIRICHLET_ALPHA
    batch_size: int = 1
    positions: Shards | None = None


def read_positions(path: str | Path, nb_workers: int) -> Shards:
    """Read which examples each worker has: the positions in the training set on line w are w's.

    An empty line is a worker without examples; lines that begin with ``#`` are comments.

    Returns:
        Of worker 1, 2, ... [n] int64, ascending.

    Raises:
        ConfigurationError: The file cannot be read, has not a line for each worker, holds what is
            no position, or gives an example to two workers.
    """
    here = f"--partition_file={path}"
    try:
        lines = read_bounded(path, _MOST_FILE_BYTES).decode().splitlines()
        shards = [
            np.sort(np.array(line.split(), dtype=np.int64))
            for line in lines
            if not line.startswith("#")
        ]
    except (OSError, ValueError, OverflowError) as error:
        raise ConfigurationError(
            f"{here} cannot be read: {error}. Expected a text file with the positions of worker "
            "w's examples in the training set, from 0, on line w."
        ) from error
    if len(shards) != nb_workers:
        raise ConfigurationError(
            f"{here} has {len(shards)} lines; expected one for each of the {nb_workers} workers "
            "(--nb_workers). Add or remove lines, or change --nb_workers."
        )
    dealt = np.sort(np.concatenate(shards))
    twice = dealt[1:][dealt[1:] == dealt[:-1]]
    if (dealt.size and dealt[0] < 0) or twice.size:
        wrong = twice[0] if twice.size else dealt[0]
        raise ConfigurationError(
            f"{here}: position {wrong} is negative or stands there twice; expected each example "
            "with one worker at most."
        )
    return shards


def write_positions(path: str | Path, shards: Shards) -> None:
    """Write which examples each worker has, as ``read_positions`` reads it."""
    lines = (" ".join(map(str, mine.tolist())) + "\n" for mine in shards)
    Path(path).write_text("".join(lines), encoding="ascii")


def split(
    labels: NDArray[Any], rule: PartitionRule, file_offsets: NDArray[np.int64] | None = None
) -> Shards:
    """Return the positions of every worker's examples.

    Args:
        labels: [N] class of each training example, the same on every worker; where there are no
            classes, [N, ...] of which only N counts.
        rule: How to split.
        file_offsets: [files + 1] first example of each file, then N: "contiguous" deals out files.

    Returns:
        Of worker 1, 2, ... [n] int64: by label and then position for "class", else ascending.
        They are disjoint and complete, but that "positions" may leave examples out.

    Raises:
        ConfigurationError: Unknown partition, more workers than examples, an empty shard, or
            "file" without fractions.

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
            f"--partition={rule.partition} splits examples by their classes, and these have none; "
            f"expected --partition={'|'.join(each for each in PARTITIONS if each not in BY_CLASS)}."
        )
    return SPLITS[rule.partition](labels, rule, file_offsets)


def shard(
    labels: NDArray[Any],
    id_worker: int,
    rule: PartitionRule,
    file_offsets: NDArray[np.int64] | None = None,
) -> NDArray[np.int64]:
    """Return the positions of one worker's examples; arguments and errors as ``split``."""
    equal_range(len(labels), rule.nb_workers, id_worker, "training examples")
    return split(labels, rule, file_offsets)[id_worker - 1]


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


def are_classes(labels: NDArray[Any]) -> bool:
    """Return whether labels are the class of each example."""
    return labels.ndim == 1 and bool(np.issubdtype(labels.dtype, np.integer))


def label_counts(labels: NDArray[Any]) -> dict[int, int]:
    """Return how many examples have each label that occurs, ascending, for the run's report.

    Nothing when more than ``MOST_LABELS`` occur: the counts travel with every report of a worker.
    Nothing either where labels are no classes.

    >>> label_counts(np.array([3, 0, 3]))
    {0: 1, 3: 2}
    """
    if not are_classes(labels):
        return {}
    values, counts = np.unique(labels, return_counts=True)
    if len(values) > MOST_LABELS:
        return {}
    return dict(zip(values.tolist(), counts.tolist(), strict=True))


def _cut_equally(order: NDArray[Any], nb_workers: int) -> Shards:
    """Cut an order of all examples into one run per worker."""
    owned = [
        equal_range(len(order), nb_workers, worker + 1, "training examples")
        for worker in range(nb_workers)
    ]
    return [order[run.start : run.stop].astype(np.int64) for run in owned]


def _iid(
    labels: NDArray[Any], rule: PartitionRule, file_offsets: NDArray[np.int64] | None
) -> Shards:
    order = np.random.default_rng([rule.seed, len(labels)]).permutation(len(labels))
    return [np.sort(owned) for owned in _cut_equally(order, rule.nb_workers)]


def _contiguous(
    labels: NDArray[Any], rule: PartitionRule, file_offsets: NDArray[np.int64] | None
) -> Shards:
    if file_offsets is not None:
        files = [
            equal_range(len(file_offsets) - 1, rule.nb_workers, worker + 1, "training files")
            for worker in range(rule.nb_workers)
        ]
        return [np.arange(file_offsets[run.start], file_offsets[run.stop]) for run in files]
    # ESync's blocks exactly; the tail that it never uses goes to the first workers, one each.
    block, rest = divmod(len(labels), rule.nb_workers)
    tail = len(labels) - rest
    return [
        np.append(
            np.arange(worker * block, (worker + 1) * block, dtype=np.int64),
            np.arange(tail + worker, tail + worker + (worker < rest), dtype=np.int64),
        )
        for worker in range(rule.nb_workers)
    ]


def _class(
    labels: NDArray[Any], rule: PartitionRule, file_offsets: NDArray[np.int64] | None
) -> Shards:
    return _cut_equally(np.argsort(labels, kind="stable"), rule.nb_workers)


def _dirichlet(
    labels: NDArray[Any], rule: PartitionRule, file_offsets: NDArray[np.int64] | None
) -> Shards:
    return split_dirichlet(
        labels, rule.nb_workers, rule.dirichlet_alpha, rule.batch_size, rule.seed
    )


def _file(
    labels: NDArray[Any], rule: PartitionRule, file_offsets: NDArray[np.int64] | None
) -> Shards:
    runs = fractions.ranges(len(labels), rule.nb_workers, rule.fractions)
    return [np.arange(run.start, run.stop, dtype=np.int64) for run in runs]


def _positions(
    labels: NDArray[Any], rule: PartitionRule, file_offsets: NDArray[np.int64] | None
) -> Shards:
    if rule.positions is None:
        raise ConfigurationError(
            "--partition=positions needs the positions of each worker's examples; set "
            "--partition_file, or choose --partition=iid."
        )
    last = max((int(mine[-1]) for mine in rule.positions if mine.size), default=-1)
    if last >= len(labels):
        raise ConfigurationError(
            f"--partition_file names example {last}, and there are {len(labels)} training "
            "examples; expected positions below that. It is of another data set."
        )
    return rule.positions


#: Name of a partition -> (labels, rule, file_offsets) -> shards.
SPLITS: Mapping[str, Callable[[NDArray[Any], PartitionRule, NDArray[np.int64] | None], Shards]] = {
    "iid": _iid,
    "contiguous": _contiguous,
    "class": _class,
    "dirichlet": _dirichlet,
    "file": _file,
    "positions": _positions,
}
