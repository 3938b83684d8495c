"""Values that shard 0 averages over the workers in addition to the weights: one flat vector.

The flat vector that shard 0 averages over the workers holds BatchNorm's moving statistics. The flat
vector that shard 0 averages holds optimizer slots, too, if the training method averages the slots
of the workers' local optimizers.
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
    """The mean over the workers of one flat vector: moving statistics and optimizer slots.

    Attributes:
        size: Number of values that every push to shard 0 must hold for the mean over the workers.
    """

    def __init__(self, statistics: Float32 = _NOTHING, num_slots: int = 0) -> None:
        """Start the mean over the workers with the values that every worker starts with.

        Args:
            statistics: [m] float32 moving statistics (of BatchNorm layers). Replies to observers
                contain the statistics.
            num_slots: Number of optimizer slot values, which start at 0. Only replies to workers
                contain the slot values.
        """
        self._num_statistics = len(statistics)
        self.size = len(statistics) + num_slots
        self._mean = np.concatenate([statistics, np.zeros(num_slots, np.float32)])

    @property
    def mean(self) -> Float32 | None:
        """The mean [size] float32 over the workers, for replies to workers; None if the run
        averages no values.
        """
        return self._mean if self.size else None

    @property
    def statistics(self) -> Float32 | None:
        """BatchNorm's moving statistics [m] float32, for replies to observers; None without
        statistics.
        """
        return self._mean[: self._num_statistics] if self._num_statistics else None

    def merge(self, sent: Sequence[Float32 | None], num_live: int) -> None:
        """Merge the moving statistics and slots in the pushes of one round into the mean over the
        workers.

        The mean over the workers changes by mean += (pushes / live workers) * (mean of the pushed
        values - mean). If all live workers push together, the new mean is the plain mean of the
        values in their pushes. If only some of the live workers push, the new mean is a running
        mean, in which one push has the weight 1 / live workers.

        Args:
            sent: Values [size] (moving statistics and slots) in each merged push, in order of
                worker id; None for a push without such values.
            num_live: Number of live workers (workers with a valid lease) that share the mean.
        """
        vectors = [values for values in sent if values is not None]
        if not vectors or not self.size:
            return
        fresh = np.zeros(self.size)
        for values in vectors:
            fresh += values
        fresh /= len(vectors)
        share = min(1.0, len(vectors) / max(1, num_live))
        # If all live workers push (share 1), the old mean over the workers must vanish exactly. The
        # general formula would leave the rounding error of `mean + (fresh - mean)` in the new mean.
        merged = fresh if share == 1 else self._mean + share * (fresh - self._mean)
        # Replies and snapshots hold references to the old array of means, so this array must not
        # change in place.
        self._mean = merged.astype(np.float32)

    def state_dict(self, soft: bool) -> State:
        """Return a copy of the mean over the workers, which is stored in checkpoints."""
        return {} if soft else {"mean": self._mean.copy()}

    def load_state_dict(self, state: State, soft: bool) -> None:
        """Restore the mean over the workers that `state_dict` returned.

        Raises:
            ConfigurationError: The saved mean has another number of values than this run's mean.
        """
        if soft:
            return
        if len(state["mean"]) != self.size:
            raise ConfigurationError(
                f"the checkpoint averages {len(state['mean'])} values (such as BatchNorm "
                "statistics) in addition to the weights, but this model and method average "
                f"{self.size} values; give the run another --run_dir, or --overwrite."
            )
        self._mean = state["mean"]
