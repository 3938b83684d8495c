"""The weights of a shard whose workers sum and step among themselves: it keeps what they say."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ops.collectives import THROUGH_PS
from ops.methods import Method
from ops.replies import Asked, Handed, Operation
from ops.schedule import Budget, Schedule
from ops.server_update import ServerUpdate
from ops.types import Kind, State, Update
from ops.weighting import Arrival
from ps.members import CoreConfig
from ps.shard_model import ShardModel

if TYPE_CHECKING:
    from ops.types import Float32


class MirrorModel(ShardModel):
    """A round is one version; its weights come with one of its pushes, or not at all.

    Workers hold newer weights than the shard whenever a round has come without them. So whoever
    pulls is sent what is here, and asks the other workers for better.
    """

    def __init__(
        self,
        method: Method,
        theta: Float32,
        kernels: Any,
        budget: Budget,
        schedule: Schedule,
        offsets: tuple[int, ...] = (),
    ) -> None:
        """Start at version 0; see ShardModel."""
        idle = dataclasses.replace(method, server=ServerUpdate())  # the workers' steps, not ours
        super().__init__(idle, theta, kernels, budget, schedule, offsets)
        self._copied_version = 0

    @property
    def kind(self) -> Kind:
        """Whole weights, or none."""
        return Kind.VALUES

    @property
    def lags(self) -> bool:
        """Whether the weights are of an earlier version."""
        return self._copied_version < self.version

    def in_step(self, base_version: int) -> bool:
        """Only a worker that took part in the last round may report the next one."""
        return base_version == self.version

    def apply(self, arrivals: Sequence[Arrival], oldest_base: int) -> list[Arrival]:
        """Count one round, and take the weights that came with it."""
        del oldest_base
        self.version += 1
        for arrival in arrivals:
            self.take(arrival.update)
        return list(arrivals)

    def take(self, update: Update) -> None:
        """Take whole weights as those of the present version; a sparse update holds none."""
        if update.indices is None:
            np.copyto(self.theta, update.values)
            self._copied_version = self.version

    def gather(self, asked: Asked) -> Handed:
        """Send weights only to a worker that has none."""
        if asked.base_version is None:
            return Handed(Operation.FULL, self.whole(), self.version, "full")
        nothing = Update(np.empty(0, np.int64), np.empty(0, np.float32))
        return Handed(Operation.NONE, nothing, self.version, "delta")

    def restore(self, state: State) -> None:
        """Take back what `save` gave: whatever its weights were, they now are its version's."""
        super().restore(state)
        self._copied_version = self.version

    def save_under_way(self) -> State:
        """Return which version the weights are of."""
        return {"copied_version": self._copied_version}

    def restore_under_way(self, state: State) -> None:
        """Take back what `save_under_way` gave, after `restore`."""
        self._copied_version = state["copied_version"]


def model_for(method: Method, theta: Float32, kernels: Any, config: CoreConfig) -> ShardModel:
    """Return the model of a shard that steps itself, or of one whose workers do."""
    made = ShardModel if method.collective == THROUGH_PS else MirrorModel
    return made(method, theta, kernels, config.budget, config.schedule, config.offsets)
