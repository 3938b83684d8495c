"""The optimizer of one PS shard: it steps the shard's weights and knows the learning rates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from thinwire.ops.frozen import Freezer, Keep
from thinwire.ops.kernels import Kernels
from thinwire.ops.methods.method import Method
from thinwire.ops.optimizers.base import Moment, StepRate
from thinwire.ops.optimizers.schedule import Schedule
from thinwire.ops.push_head import PushHead
from thinwire.ops.types import Kind, ModelSpec, State, Update
from thinwire.ops.weighting.base import Arrival
from thinwire.ps.core.batch_clock import BatchClock
from thinwire.ps.core.policy_states import have_one_form, without_set_rate

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thinwire.ops.types import Float32, Int64


class ShardOptimizer:
    """The state of a shard's optimizer, which changes the shard's weights in place.

    Attributes:
        state: State of the method's server optimizer.
        schedule: Schedule of the run's learning rate.
        clock: Count of the training script's batches, for its learning rate schedules.
    """

    def __init__(
        self,
        method: Method,
        theta: Float32,
        kernels: Kernels,
        freezer: Freezer,
        schedule: Schedule,
        spec: ModelSpec | None,
        clock: BatchClock,
    ) -> None:
        """Start with the optimizer's initial state.

        Args:
            method: Training method, whose server optimizer steps.
            theta: Weights [n] float32 of the shard; the optimizer updates the array in place.
            kernels: Implementation of the array operations.
            freezer: Copy-on-write protection of the shard's arrays.
            schedule: Schedule of the run's learning rate.
            spec: Slices of the whole model's weights that the shard holds; None: the shard holds
                one slice.
            clock: Count of the batches that the training script has consumed.
        """
        self._method, self._theta, self._kernels = method, theta, kernels
        self._freezer, self.schedule, self.clock = freezer, schedule, clock
        self.state = method.server.init(theta, spec)
        # Arrays of optimizer slots in the last snapshot, which a reader in another thread may still
        # be reading when the next step changes the arrays.
        self._saved_slots: list[NDArray[Any]] = []

    def rate(
        self,
        number: int,
        fraction: float,
        kind: Kind | None = None,
        set_rate: float | None = None,
        heads: Sequence[PushHead] = (),
    ) -> StepRate:
        """Return the learning rate of the next step of one of the script's optimizers.

        Args:
            number: Index of the optimizer among the script's optimizers.
            fraction: Share of the run's budget that is consumed, from 0 to 1.
            kind: Kind of the update; None: the kind of the method's updates.
            set_rate: Learning rate that the script sets for this step and all later steps.
            heads: Numbers of the pushes from which the step is computed; empty for a rate without a
                step.
        """
        scheduled, batches = self.schedule.rate(fraction), self.clock.batches(number)
        settings = next((head.settings for head in heads if head.settings), ())
        without = [set(head.without_gradient) for head in heads]
        moment = Moment(
            *(scheduled, kind or self._method.kind, batches, fraction, set_rate, settings),
            without_gradient=set.intersection(*without) if without else (),
        )
        return self._method.server.rate(moment, self.state, number)

    def step(self, merged: Update, rate: float, number: int) -> Int64 | None:
        """Apply a merged update of one of the script's optimizers.

        Returns:
            Indices of the changed entries, in ascending order; None: any entry may have changed.
        """
        # Readers in other threads get the values before the step.
        keeps_sparse = self._method.server.traits.keeps_sparse
        self._freezer.before_change(self._theta, merged.indices if keeps_sparse else None)
        for array in self._saved_slots:
            self._freezer.before_change(array)
        touched, self.state = self._method.server.step(
            *(self._theta, merged, self._method.kind, rate, self._kernels, self.state, number)
        )
        return touched

    def take_changes(self, arrivals: Sequence[Arrival], share: float) -> Int64 | None:
        """Add the changes that scripts made to their weights themselves, before the optimizer step.

        Returns:
            Indices of the changed entries, in ascending order; None: any entry may have changed.
        """
        nothing = Update(np.empty(0, np.int64), np.empty(0, np.float32))
        if all(arrival.change is None for arrival in arrivals):
            return nothing.indices
        # All scripts of a run make the same change of weights, so the shard must add the change
        # only once in total. The aggregate over a group is weighted with the group's share of all
        # workers. The shares of all merged rounds add up to 1, both if one round contains all
        # workers and if each worker has its own round.
        stepped = [each for each in arrivals if each.head.samples or each.change is not None]
        changes = [arrival.change or nothing for arrival in stepped]
        merged = self._method.aggregate.merge(changes, len(self._theta))
        self._freezer.before_change(self._theta, merged.indices)
        self._kernels.apply(self._theta, merged.indices, merged.values, -share)
        self.restore(None)
        return merged.indices

    def save(self, keep: Keep) -> State:
        """Return the optimizer's state for a checkpoint, with arrays that `keep` returns."""
        saved_slots = []

        def keep_slots(array: NDArray[Any]) -> Any:
            saved_slots.append(array)
            return keep(array)

        saved = self._method.server.save(self.state, keep_slots)
        self._saved_slots = saved_slots
        return saved

    def restore(self, saved: State | None) -> None:
        """Restore a saved state for the shard's present weights; None: keep the present state."""
        self.state = self._method.server.restore(saved, self._theta, self.state)

    def continue_from(self, saved: State, clock: State) -> bool:
        """Restore the state and batch count of a run with other settings, if the state has the form
        of this optimizer's state.

        The optimizer keeps the learning rate of this run's settings, even if the saved run's script
        had set another learning rate.

        Returns:
            Whether the saved state was restored.
        """
        if not have_one_form(self._method.server.save(self.state), saved):
            return False
        self.restore(without_set_rate(saved))
        self.clock.load_state_dict(clock)
        return True
