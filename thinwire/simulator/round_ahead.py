"""Computes the mini-batches of a simulated worker's training round ahead of virtual time.

If only a worker's own count of local steps ends a training round, no event can change the round's
result. In a round with a fixed result, the computation of each mini-batch starts as soon as the
previous mini-batch is computed, without waiting for the virtual clock. By computing ahead of
virtual time, a round of local steps uses one CPU core continuously.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import TYPE_CHECKING

from thinwire.data.loading import TrainingShard
from thinwire.ops.codecs.base import NonFiniteUpdate
from thinwire.ops.types import State
from thinwire.worker.core.core import WorkerCore

if TYPE_CHECKING:
    from thinwire.ops.types import Float32
    from thinwire.simulator.messages import GradientSource, Step


@dataclasses.dataclass(frozen=True)
class ComputedBatch:
    """Result of one mini-batch of a worker's round of local steps."""

    local: State  # worker-local state (for example dropout seeds) after the mini-batch
    step: Step | None = None  # gradient for the core; None: the core has processed it
    # the core's rejection of the gradient; None: accepted
    refused: NonFiniteUpdate | None = None
    # next mini-batch of the round; None: not started
    following: Future[ComputedBatch] | None = None


class RoundAhead:
    """Starts the computation of mini-batches for one incarnation (process) of a worker.

    If a round is computed ahead, a thread of the executor takes the local steps of all mini-batches
    but the round's last. While the executor's thread computes a round ahead, no other thread uses
    the worker core (state machine).

    Args:
        trainer: Trainer that computes the gradients of the mini-batches.
        executor: Executor that runs the computations of the gradients.
        core: Worker core (state machine) of this incarnation (process) of the worker.
        lives: Function that returns whether this incarnation (process) of the worker is alive;
            called from the executor's threads.
    """

    def __init__(
        self,
        trainer: GradientSource,
        executor: Executor,
        core: WorkerCore,
        lives: Callable[[], bool],
    ) -> None:
        self._trainer, self._executor, self._core, self._lives = trainer, executor, core, lives
        method = core.method
        self._is_foreseen = (
            method.takes_local_steps and not method.pacer.queries and not method.overlap
        )
        self._following: Future[ComputedBatch] | None = None

    def begin(
        self, weights: Float32, statistics: Float32, shard: TrainingShard, local: State
    ) -> Future[ComputedBatch]:
        """Return the next mini-batch's future; start its computation if it has not started."""
        under_way, self._following = self._following, None
        if under_way is not None:
            return under_way
        return self._executor.submit(self._compute, weights, statistics, shard.fork(), local)

    def take(self, computing: Future[ComputedBatch]) -> ComputedBatch:
        """Wait until a mini-batch that `begin` returned is computed; return gradient and loss."""
        done = computing.result()
        self._following = done.following
        return done

    def _compute(
        self, weights: Float32, statistics: Float32, shard: TrainingShard, local: State
    ) -> ComputedBatch:
        core, step = self._core, self._trainer.step(weights, statistics, shard, local)
        if not self._is_foreseen or core.ends_round or not self._lives():
            return ComputedBatch(step.local, step)
        try:
            core.begin(step.gradient, step.samples, step.loss, step.statistics)
        except NonFiniteUpdate as refused:
            return ComputedBatch(step.local, refused=refused)
        following = self._executor.submit(
            self._compute, core.weights, core.statistics, shard, step.local
        )
        return ComputedBatch(step.local, following=following)
