"""Label skew as federated learning models it: each label is dealt out by a Dirichlet draw."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ops.types import ConfigurationError

#: Draws before shares that are too small are filled up instead.
_MOST_DRAWS = 20
#: Keeps the draws apart from those of the other partitions with the same seed.
_STREAM = 2


def split(
    labels: NDArray[np.integer], nb_workers: int, alpha: float, smallest: int, seed: int
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
            table[label, [giver, worker]] += [-moved, moved]
            totals[[giver, worker]] += [-moved, moved]
