"""The mini-batches of a worker's round, computed while virtual time passes.

What a round of local steps comes to is known when it begins, if nothing but the worker's own count
ends it: then each mini-batch is begun as soon as the one before is done, and a round occupies a
core of this machine without waiting for the calendar.
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
class MiniBatch:
    """What one has come to."""

    local: State  # what stays on the worker after it
    step: Step | None = None  # for the core, which has it already where this is None ...
    refused: NonFiniteUpdate | None = None  # ... or has refused it
    following: Future[MiniBatch] | None = None  # of the same round, if that is under way


class RoundAhead:
    """Begins the mini-batches of one life of a worker.

    The local steps from all but a round's last mini-batch are taken where they are computed; the
    core is nobody else's meanwhile.

    Args:
        trainer: Computes the gradients.
        executor: Where.
        core: Of this life.
        lives: Whether the life goes on; called from the executor's threads.
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
        self._following: Future[MiniBatch] | None = None

    def begin(
        self, weights: Float32, statistics: Float32, shard: TrainingShard, local: State
    ) -> Future[MiniBatch]:
        """Return the next mini-batch, begun now if it is not under way; see `Trainer.step`."""
        under_way, self._following = self._following, None
        if under_way is not None:
            return under_way
        return self._executor.submit(self._compute, weights, statistics, shard.fork(), local)

    def take(self, computing: Future[MiniBatch]) -> MiniBatch:
        """Wait for a mini-batch that `begin` has returned."""
        done = computing.result()
        self._following = done.following
        return done

    def _compute(
        self, weights: Float32, statistics: Float32, shard: TrainingShard, local: State
    ) -> MiniBatch:
        core, step = self._core, self._trainer.step(weights, statistics, shard, local)
        if not self._is_foreseen or core.ends_round or not self._lives():
            return MiniBatch(step.local, step)
        try:
            core.begin(step.gradient, step.samples, step.loss, step.statistics)
        except NonFiniteUpdate as refused:
            return MiniBatch(step.local, refused=refused)
        following = self._executor.submit(
            self._compute, core.weights, core.statistics, shard, step.local
        )
        return MiniBatch(step.local, following=following)
