"""The weights of one shard and the policies that change and hand them out."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ops.down_codecs import Operation
from ops.handed_out import HandedOut
from ops.merge import mean_update
from ops.methods import Method
from ops.schedule import Budget, Schedule
from ops.types import Kind, State, Update
from ops.weighting import Arrival, ReleaseContext

if TYPE_CHECKING:
    from ops.types import Float32

#: Weighting state that is only working memory.
_SCRATCH = "scratch"


class ShardModel:
    """theta, its version, and the state of Weighting, ServerUpdate and the down codec.

    Attributes:
        theta: [n] float32 weights of this shard.
        version: T, updates applied so far.
        samples: Examples consumed by them.
    """

    def __init__(
        self, method: Method, theta: Float32, kernels: Any, budget: Budget, schedule: Schedule
    ) -> None:
        """Start at version 0; `theta` is owned and updated in place."""
        self.method, self.theta, self.kernels = method, theta, kernels
        self.budget, self.schedule = budget, schedule
        self.version = 0
        self.samples = 0
        self._weighting = method.weighting.init(len(theta))
        self._down = method.down_codec.init(len(theta))
        self._server = method.server.init(theta)
        self._handed_out = HandedOut()
        self._seen = theta.view()  # what the weighting may look at
        self._seen.flags.writeable = False

    @property
    def kind(self) -> Kind:
        """What updates mean on the wire."""
        return self.method.kind

    @property
    def lags(self) -> bool:
        """Whether workers hold newer weights than this shard."""
        return False

    def in_step(self, base_version: int) -> bool:
        """Return whether a worker at this version may push now; others are to pull again."""
        del base_version
        return True

    @property
    def learning_rate(self) -> float:
        """The scheduled rate of the next update."""
        return self.schedule.rate(self.budget.fraction(self.version, self.samples))

    def apply(self, arrivals: Sequence[Arrival], oldest_base: int) -> list[Arrival]:
        """Weigh, merge and apply one release; version + 1 unless nothing was kept.

        Args:
            arrivals: In order of worker id.
            oldest_base: Smallest base version a live worker may still push from.

        Returns:
            What the weighting kept.
        """
        copies = self._handed_out.copies
        context = ReleaseContext(self.version, oldest_base, self.kernels, self._seen, copies)
        kept, self._weighting = self.method.weighting.weigh(arrivals, context, self._weighting)
        if not kept:
            return kept
        merged = mean_update([arrival.update for arrival in kept], len(self.theta))
        touched, self._server = self.method.server.apply(
            self.theta, merged, self.method.kind, self.learning_rate, self.kernels, self._server
        )
        self.version += 1
        self._down = self.method.down_codec.note(touched, self.version, self._down)
        return kept

    def take(self, update: Update) -> None:
        """Overwrite the weights [n]; the version stays.

        Raises:
            ValueError: Here only updates change the weights.
        """
        raise ValueError(f"{len(update.values)} values without a round")

    def gather(self, base_version: int | None) -> tuple[Operation, Update]:
        """Return what a worker at `base_version` must be sent; the arrays are copies."""
        return self.method.down_codec.gather(self.theta, base_version, self.version, self._down)

    def hand_out(self, worker: int) -> int:
        """Note that a worker now holds the current weights; return their version."""
        if self.method.weighting.needs_copies:
            self._handed_out.note(worker, self.version, self.theta)
        return self.version

    def forget(self, worker: int) -> None:
        """Drop what is kept of a worker that has left."""
        self._handed_out.forget(worker)

    def memory(self) -> dict[str, int]:
        """Return the memory that the weighting costs: dense copies, and bytes with all state."""
        num_bytes = self._handed_out.num_bytes + _num_bytes(self._weighting)
        return {"copies": len(self._handed_out.copies), "bytes": num_bytes}

    def whole(self) -> Update:
        """Return a copy of all weights."""
        return Update(None, self.theta.copy())

    def save(self) -> State:
        """Return durable state; arrays are copies."""
        optimizer = self._server.get("keras")
        weighting = {key: value for key, value in self._weighting.items() if key != _SCRATCH}
        return {
            "version": self.version,
            "samples": self.samples,
            "theta": self.theta.copy(),
            "optimizer": optimizer.save() if optimizer is not None else {},
            "weighting": copy.deepcopy(weighting),
            "handed_out": self._handed_out.save(),
            "down_codec": copy.deepcopy(self._down),
        }

    def restore(self, state: State) -> None:
        """Take back what `save` gave."""
        self.version, self.samples = state["version"], state["samples"]
        np.copyto(self.theta, state["theta"])
        if "keras" in self._server:
            self._server["keras"].restore(state["optimizer"], self.theta)
        self._weighting.update(state["weighting"])
        self._down.update(state["down_codec"])
        self._handed_out.restore(state["handed_out"])


def _num_bytes(state: Any) -> int:
    """Return the bytes of all arrays in a policy's state."""
    if isinstance(state, np.ndarray):
        return state.nbytes
    parts = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return sum(_num_bytes(part) for part in parts)
