"""The endless walk of one worker over its shard, in batches, with a position that can be saved.

`uniforms` gives the random numbers of an example by its place in the walk, however the walk got
there, so that a resumed worker augments as an uninterrupted one.
"""

from __future__ import annotations

import copy

import numpy as np
from numpy.typing import NDArray

from thinwire.ops.types import ConfigurationError

_PURPOSE = 0x6175676D656E74  # separates these draws from others with the same seed


class Cursor:
    """Deals out batches of a shard for ever, in a new order each epoch.

    The order of an epoch follows from (seed, epoch) alone, so a position is two integers and the
    order can be recomputed. A batch may span the border of two epochs: every batch is full and
    each example is dealt out once an epoch. With ``whole_epochs`` the last batch of an epoch is
    what is left of it.

    Args:
        indices: [n] positions of the shard's examples in the training set.
        batch_size: Examples of one batch, 1..n.
        seed: Seeds the orders; make it differ between workers.
        shuffle: Whether to draw new orders; without, every epoch has the order of ``indices``.
        digest: Identifies the shard when a position is restored.
        whole_epochs: Whether no batch spans the border of two epochs.

    Attributes:
        seed: As given.

    Raises:
        ConfigurationError: The batch is smaller than one, or larger than the shard without
            ``whole_epochs``.

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
        self._indices = np.array(indices, dtype=np.int64)  # [n] int64
        self._batch_size = batch_size
        self.seed = seed
        self._shuffle = shuffle
        self._digest, self._whole_epochs = digest, whole_epochs
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)  # [n] int64, this epoch's

    def next(self) -> NDArray[np.int64]:
        """Return the positions of the next batch: [batch_size] int64, owned by the caller.

        With ``whole_epochs`` the last one of an epoch may have fewer.
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
        """Whole epochs dealt out."""
        return self._epoch

    @property
    def place(self) -> int:
        """Examples dealt out since the start."""
        return self._epoch * len(self._indices) + self._position

    def fork(self) -> Cursor:
        """Return one that goes on from here by itself."""
        return copy.copy(self)  # no array is ever changed in place

    def state(self) -> dict[str, int]:
        """Return the position: epoch, examples of it dealt out, and what the orders depend on."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self.seed,
            "shard_size": len(self._indices),
            "shard_digest": self._digest,
            "shuffle": int(self._shuffle),
        }

    def restore(self, state: dict[str, int]) -> None:
        """Go to a saved position; the batch size may differ from that of then.

        Raises:
            ConfigurationError: The state belongs to another seed, shard or manner of ordering, or
                is damaged.
        """
        own = self.state()
        for name in ("seed", "shard_size", "shard_digest", "shuffle"):
            if state.get(name) != own[name]:
                raise ConfigurationError(
                    f"The saved position in the data has {name} {state.get(name)}, this run has "
                    f"{own[name]}; expected the same. Start with the flags of the saved run, or "
                    "with --overwrite."
                )
        epoch, position = state.get("epoch", -1), state.get("position", -1)
        if epoch < 0 or not 0 <= position < len(self._indices):
            raise ConfigurationError(
                f"The saved position in the data is epoch {epoch}, example {position}; expected an "
                f"epoch from 0 and an example in 0..{len(self._indices) - 1}. The checkpoint is "
                "damaged: use an older one or --overwrite."
            )
        self._epoch, self._position = int(epoch), int(position)
        self._order = self._order_of(self._epoch)

    def _order_of(self, epoch: int) -> NDArray[np.int64]:
        if not self._shuffle:
            return self._indices
        return np.random.default_rng([self.seed, epoch]).permutation(self._indices)


def check_batch_size(batch_size: int, shard_size: int, partition: str = "") -> None:
    """Refuse a batch that the shard cannot fill.

    Args:
        batch_size: Examples of a batch.
        shard_size: Examples of the shard.
        partition: How the shard was cut, for the message.

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
    """Return draws for consecutive examples.

    A row depends on the seed and its own place alone, not on the batch it is drawn with.

    Args:
        seed: Of the worker's walk.
        place: How many examples were dealt out before the first one.
        count: Examples.
        width: Draws of each example.

    Returns:
        [count, width] float64 in [0, 1).

    >>> bool((uniforms(1, 10, 4, 3)[2] == uniforms(1, 12, 1, 3)[0]).all())
    True
    """
    blocks = -(-width // 4)  # the generator counts in blocks of four numbers
    generator = np.random.Philox(key=[seed, _PURPOSE], counter=place * blocks)
    raw = generator.random_raw(count * blocks * 4).reshape(count, blocks * 4)[:, :width]
    return (raw >> np.uint64(11)).astype(np.float64) * 2.0**-53
