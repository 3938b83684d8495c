"""Faulty devices on purpose: workers whose gradients are noise of a given size."""

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
    """Does a worker's step, and puts noise in the place of its gradient.

    Args:
        inner: The trainer of all workers.
        norm: L2 norm of the noise.
        number: Of the worker.
    """

    def __init__(self, inner: GradientSource, norm: float, number: int) -> None:
        self._inner, self._norm, self._number = inner, norm, number

    def local_of(self, number: int) -> State:
        """Return what stays on the worker."""
        return self._inner.local_of(number)

    def step(
        self, weights: Float32, statistics: Float32, shard: TrainingShard, local: State
    ) -> Step:
        """Compute the next mini-batch's gradient for nothing; see Trainer.step."""
        import numpy as np  # not by those who only read flags

        step = self._inner.step(weights, statistics, shard, local)
        rng = np.random.default_rng([_ENTROPY, self._number, shard.cursor.place])
        noise = rng.standard_normal(len(step.gradient), np.float32)
        noise *= np.float32(self._norm / np.linalg.norm(noise))
        return dataclasses.replace(step, gradient=noise)


def parse(text: str, nb_workers: int) -> dict[int, float]:
    """Return worker -> norm of its noise, of text such as ``4:1e6,2:50``.

    Raises:
        ConfigurationError: It is ill-formed, or names a worker that does not exist.
    """
    found: dict[int, float] = {}
    for word in filter(None, text.split(",")):
        worker, colon, norm = word.partition(":")
        try:
            found[int(worker)] = float(norm)
        except ValueError as error:
            raise ConfigurationError(
                f"--sim_garbage: {word!r} is not WORKER:NORM, such as 4:1e6."
            ) from error
        if not (colon and 1 <= int(worker) <= nb_workers and 0 < float(norm) < 1e30):
            raise ConfigurationError(
                f"--sim_garbage: {word!r}: expected a worker from 1 to {nb_workers} and a norm "
                "above 0 and below 1e30."
            )
    return found


def trainer_of(number: int, trainer: GradientSource, garbage: dict[int, float]) -> GradientSource:
    """Return what computes a worker's gradients."""
    norm = garbage.get(number)
    return trainer if norm is None else GarbageTrainer(trainer, norm, number)
