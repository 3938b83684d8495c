"""Order of the rows of a script's arrays in each epoch, and this worker's rows of each batch.

Only seeds and counters determine the order, with NumPy alone. So workers on different backends of
Keras take disjoint rows that together are the batches of the script.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from thinwire.script.data.place import WorkerPlace

#: Number in the seeds of row orders, so that their random draws differ from all other draws.
_ORDERS = 1


@dataclasses.dataclass(frozen=True)
class RowOrder:
    """Rule by which the rows of a script's arrays become this worker's batches.

    Attributes:
        place: This worker's number in the run, and the rules that divide the training data among
            workers.
        rows: [n] int64 row numbers of an epoch in the script's order: the rows of all workers if
            `is_dealt`, else the rows of this worker.
        window: Number of successive rows that become one batch of this worker.
        is_dealt: True if the rows of each window are divided among the workers, again in each
            epoch; False if this worker's rows stay the same.
        sizes: For each worker, the number of rows in an epoch.
        is_shuffled: True if each epoch has the rows in a new random order.
    """

    place: WorkerPlace
    rows: NDArray[np.int64]
    window: int
    is_dealt: bool
    sizes: tuple[int, ...]
    is_shuffled: bool

    @property
    def num_windows(self) -> int:
        """Number of windows in an epoch; the last window may be shorter."""
        return -(-len(self.rows) // self.window)

    @property
    def num_remaining(self) -> int:
        """Number of rows in a short last window; 0 if all windows are full."""
        return len(self.rows) % self.window

    @property
    def batch_size(self) -> int:
        """Number of rows in a full batch of this worker."""
        return self.place.num_dealt(self.window) if self.is_dealt else self.window

    @property
    def num_rows(self) -> int:
        """Number of rows of this worker in an epoch."""
        return self.sizes[self.place.worker - 1]

    @property
    def num_batches(self) -> int:
        """Number of batches of this worker in an epoch; all have at least one row."""
        return -(-self.num_rows // self.batch_size)

    def of_epoch(self, epoch: int) -> NDArray[np.int64]:
        """Return the row numbers `rows` in the order of an epoch.

        Args:
            epoch: Number of the pass over the data within the call of `fit`, from 0.
        """
        if not self.is_shuffled:
            return self.rows
        place = self.place
        seed_worker = 0 if self.is_dealt else place.worker
        seed = [place.rule.seed, place.fits_before, epoch, seed_worker, _ORDERS]
        return np.random.default_rng(seed).permutation(self.rows)

    def batches(self, epoch: int) -> Iterator[NDArray[np.int64]]:
        """Yield the row numbers [batch] int64 of each batch of this worker in an epoch.

        A worker that gets no rows of a short last window has one batch less.
        """
        order, window = self.of_epoch(epoch), self.window
        for number in range(self.num_windows):
            rows = order[number * window : (number + 1) * window]
            if self.is_dealt:
                rows = rows[self.place.positions(len(rows), epoch, number)]
            if len(rows):
                yield rows
