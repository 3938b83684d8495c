"""The endless sequence of one worker's batches, with a position that can be saved.

The function `uniforms` computes the random numbers of an example directly from its place in the
worker's sequence of examples, so that a resumed worker augments images exactly like an
uninterrupted worker.
"""

from __future__ import annotations

import copy

import numpy as np
from numpy.typing import NDArray

from thinwire.ops.types import ConfigurationError

# Part of the random key that distinguishes this use of the seed from all others.
_PURPOSE = 0x6175676D656E74


class Cursor:
    """Returns batches of a worker's shard endlessly, in a new random order each epoch.

    The random order of an epoch is computed from (seed, epoch), so two integers are enough to save
    a position. A batch of the cursor may span the border of two epochs, so every batch is full, and
    each example occurs once in an epoch. With ``whole_epochs``, the last batch of an epoch holds
    the remaining examples of the epoch and may be smaller.

    Args:
        indices: Positions of the shard's examples in the training set, [n].
        batch_size: Number of examples in one batch, from 1 to the size of the shard.
        seed: Seed of the random orders; must differ between workers.
        shuffle: True for a new random order of examples in each epoch; False for the order of
            ``indices``.
        digest: Checksum of the shard's positions; `restore` rejects a saved state with another
            digest.
        whole_epochs: True if no batch may span the border of two epochs.

    Attributes:
        seed: Seed of the random orders of the worker's examples.

    Raises:
        ConfigurationError: Without ``whole_epochs``, ``batch_size`` is not between 1 and the size
            of the shard.

    >>> cursor = Cursor(np.arange(4), batch_size=3, seed=1)
    >>> sorted(np.concatenate([cursor.next() for _ in range(4)]).tolist())
    [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    """

    def __init__(
        self,
        indices: NDArray[np.int64],
        batch_size: int,
        seed: int,
        *,
        shuffle: bool = True,
        digest: int = 0,
        whole_epochs: bool = False,
    ) -> None:
        if not whole_epochs:
            check_batch_size(batch_size, len(indices))
        # Positions of the shard's examples in the training set, [n] int64.
        self._indices = np.array(indices, dtype=np.int64)
        self._batch_size = batch_size
        self.seed = seed
        self._shuffle = shuffle
        self._digest, self._whole_epochs = digest, whole_epochs
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)  # positions in the order of the current epoch, [n] int64

    def next(self) -> NDArray[np.int64]:
        """Return the positions of the next batch's examples: [batch_size] int64, a copy.

        With ``whole_epochs``, the last batch of an epoch may be smaller than ``batch_size``.
        """
        stop = self._position + self._batch_size
        batch = self._order[self._position : stop].copy()
        self._position = stop
        missing = stop - len(self._order)
        if missing >= 0:
            self._epoch += 1
            self._order = self._order_of(self._epoch)
            self._position = 0 if self._whole_epochs else missing
            batch = np.concatenate([batch, self._order[: self._position]])
        return batch

    @property
    def epoch(self) -> int:
        """Number of epochs that the cursor has completed."""
        return self._epoch

    @property
    def place(self) -> int:
        """Number of examples that the cursor has returned since its start."""
        return self._epoch * len(self._indices) + self._position

    def fork(self) -> Cursor:
        """Return an independent copy of the cursor at its present position."""
        # The copies of the cursor share arrays, because a cursor never changes an array in place.
        return copy.copy(self)

    def state(self) -> dict[str, int]:
        """Return the cursor's epoch, its position in the epoch, and the settings that define the
        order.
        """
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self.seed,
            "shard_size": len(self._indices),
            "shard_digest": self._digest,
            "shuffle": int(self._shuffle),
        }

    def restore(self, state: dict[str, int]) -> None:
        """Continue from the saved state of a cursor, even if that cursor had another batch size.

        Raises:
            ConfigurationError: The saved state has another seed, other examples or another
                ``shuffle`` than this cursor, or is damaged.
        """
        current = self.state()
        for name in ("seed", "shard_size", "shard_digest", "shuffle"):
            if state.get(name) != current[name]:
                raise ConfigurationError(
                    f"The saved position in the data has {name} {state.get(name)}, but this run "
                    f"has {name} {current[name]}; expected equal values. Start with the flags of "
                    "the saved run, or with --overwrite."
                )
        epoch, position = state.get("epoch", -1), state.get("position", -1)
        if epoch < 0 or not 0 <= position < len(self._indices):
            raise ConfigurationError(
                f"The saved position in the data is training epoch {epoch}, example {position}; "
                f"expected an epoch from 0 and an example in 0..{len(self._indices) - 1}. The "
                "checkpoint is damaged: use an older one or --overwrite."
            )
        self._epoch, self._position = int(epoch), int(position)
        self._order = self._order_of(self._epoch)

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        if not self._shuffle:
            return self._indices
        return np.random.default_rng([self.seed, epoch]).permutation(self._indices)


def check_batch_size(batch_size: int, shard_size: int, partition: str = "") -> None:
    """Raise an error for a batch size that is larger than the shard, or below 1.

    Args:
        batch_size: Number of examples in a mini-batch.
        shard_size: Number of examples in the worker's shard.
        partition: Value of --partition for the error message; empty to omit it.

    Raises:
        ConfigurationError: ``batch_size`` is not in 1..shard_size.
    """
    if not 1 <= batch_size <= shard_size:
        cut = f" (--partition {partition})" if partition else ""
        raise ConfigurationError(
            f"--batch_size {batch_size} does not fit this worker's shard of {shard_size} training "
            f"examples{cut}; expected 1 to {shard_size}. Lower --batch_size, lower --nb_workers, "
            "or take a larger --dataset."
        )


def uniforms(seed: int, place: int, count: int, width: int) -> NDArray[np.float64]:
    """Return uniform random numbers for consecutive examples of a cursor's sequence.

    The random numbers of an example depend only on the seed and the example's place, not on its
    batch.

    Args:
        seed: Seed of the worker's cursor.
        place: Place of the first example, which is the number of earlier examples in the cursor's
            sequence.
        count: Number of examples to draw random numbers for.
        width: Number of random numbers per example.

    Returns:
        [count, width] float64 in [0, 1).

    >>> bool((uniforms(1, 10, 4, 3)[2] == uniforms(1, 12, 1, 3)[0]).all())
    True
    """
    # Philox counts in blocks of four numbers. Every example uses a whole number of blocks, so that
    # the example's random numbers start at counter place * blocks and need no numbers of earlier
    # examples.
    blocks = -(-width // 4)
    generator = np.random.Philox(key=[seed, _PURPOSE], counter=place * blocks)
    raw = generator.random_raw(count * blocks * 4).reshape(count, blocks * 4)[:, :width]
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53
