"""Simulates faulty devices: workers that send noise of a given norm instead of gradients."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from thinwire.ops.types import ConfigurationError, State

if TYPE_CHECKING:
    from thinwire.data.loading import TrainingShard
    from thinwire.ops.types import Float32
    from thinwire.simulator.messages import GradientSource, Step

_ENTROPY = 97


class GarbageTrainer:
    """Trainer that replaces the gradient of a faulty worker by noise.

    Args:
        inner: Trainer that computes the training steps of all workers.
        norm: L2 norm of the noise that replaces the worker's gradient.
        number: Id of the worker that sends noise.
    """

    def __init__(self, inner: GradientSource, norm: float, number: int) -> None:
        self._inner, self._norm, self._number = inner, norm, number

    def local_of(self, number: int) -> State:
        """Return a worker's initial worker-local state, for example dropout seeds."""
        return self._inner.local_of(number)

    def step(
        self, weights: Float32, statistics: Float32, shard: TrainingShard, local: State
    ) -> Step:
        """Compute a mini-batch's training step like `Trainer.step`, but with noise as gradient."""
        import numpy as np  # imported late, because parsing flags must be fast

        step = self._inner.step(weights, statistics, shard, local)
        rng = np.random.default_rng([_ENTROPY, self._number, shard.cursor.place])
        noise = rng.standard_normal(len(step.gradient), np.float32)
        noise *= np.float32(self._norm / np.linalg.norm(noise))
        return dataclasses.replace(step, gradient=noise)


def parse(text: str, nb_workers: int) -> dict[int, float]:
    """Parse --sim_garbage, for example ``4:1e6,2:50``; return worker id -> L2 norm of its noise.

    Raises:
        ConfigurationError: The text of --sim_garbage is ill-formed, or names a worker that does not
            exist.
    """
    norms: dict[int, float] = {}
    for word in filter(None, text.split(",")):
        worker, colon, norm = word.partition(":")
        try:
            norms[int(worker)] = float(norm)
        except ValueError as error:
            raise ConfigurationError(
                f"--sim_garbage: the entry {word!r} is not WORKER:NORM, for example 4:1e6."
            ) from error
        if not (colon and 1 <= int(worker) <= nb_workers and 0 < float(norm) < 1e30):
            raise ConfigurationError(
                f"--sim_garbage: the entry {word!r} is not valid; expected a worker from 1 to "
                f"{nb_workers}, and an L2 norm above 0 and below 1e30."
            )
    return norms


def trainer_of(number: int, trainer: GradientSource, garbage: dict[int, float]) -> GradientSource:
    """Return `trainer`, or a trainer with noise as gradients if `garbage` lists the worker.

    Args:
        number: Id of the worker, from 1.
        trainer: Trainer that computes the training steps of all workers.
        garbage: Worker id -> L2 norm of the noise that the worker sends instead of gradients.
    """
    norm = garbage.get(number)
    return trainer if norm is None else GarbageTrainer(trainer, norm, number)
