"""The values that shard 0 averages over the workers beside the updates: one flat vector.

BatchNorm's moving statistics, and the slots of local optimizers where those are averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from thinwire.ops.types import ConfigurationError, State

if TYPE_CHECKING:
    from thinwire.ops.types import Float32

_NOTHING = np.empty(0, np.float32)


class WorkerAverages:
    """The mean over workers, replaced and never changed in place: replies may share it.

    Attributes:
        size: Values that every push must bring.
    """

    def __init__(self, statistics: Float32 = _NOTHING, num_slots: int = 0) -> None:
        """Start at the values that every worker starts with.

        Args:
            statistics: [m] float32, which observers see too.
            num_slots: Further values, 0 at the start, that only workers see.
        """
        self._num_statistics = len(statistics)
        self.size = len(statistics) + num_slots
        self._mean = np.concatenate([statistics, np.zeros(num_slots, np.float32)])

    @property
    def mean(self) -> Float32 | None:
        """The mean [size], for workers; None where nothing is averaged."""
        return self._mean if self.size else None

    @property
    def statistics(self) -> Float32 | None:
        """The part of it that observers need; None where there is none."""
        return self._mean[: self._num_statistics] if self._num_statistics else None

    def merge(self, sent: Sequence[Float32 | None], num_live: int) -> None:
        """Merge the values that came with the pushes of one release.

        mean += (merged / live) * (mean of those merged - mean): the plain mean where everybody
        pushes together, else a running mean in which nobody counts more than a live worker may.

        Args:
            sent: Of each push that was merged, in order of worker id.
            num_live: Live workers of the run.
        """
        brought = [values for values in sent if values is not None]
        if not brought or not self.size:
            return
        fresh = np.zeros(self.size)
        for values in brought:
            fresh += values
        fresh /= len(brought)
        share = min(1.0, len(brought) / max(1, num_live))
        # Not `mean + share * (fresh - mean)` alone: with a share of 1 nothing is to be left over.
        merged = fresh if share == 1 else self._mean + share * (fresh - self._mean)
        self._mean = merged.astype(np.float32)

    def state_dict(self, soft: bool) -> State:
        """Return the mean, which outlives a restart; there is no soft state."""
        return {} if soft else {"mean": self._mean.copy()}

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Take back what `state_dict` gave.

        Raises:
            ConfigurationError: It is of another model.
        """
        if soft:
            return
        if len(state["mean"]) != self.size:
            raise ConfigurationError(
                f"the checkpoint averages {len(state['mean'])} values beside the weights, this "
                f"model and method {self.size}; give the run another --run_dir, or --overwrite."
            )
        self._mean = state["mean"]
