"""Interfaces of optimizers on the parameter server, and of optimizers for workers' local steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import NamedTuple, Protocol

from thinwire.ops.frozen import Keep, copied
from thinwire.ops.kernels.base import Kernels
from thinwire.ops.optimizers.slots import Slot
from thinwire.ops.policy import Policy
from thinwire.ops.types import Float32, Int64, Kind, ModelSpec, State, Update


@dataclasses.dataclass(frozen=True)
class OptimizerTraits:
    """Properties of a server optimizer that its callers need, and that no step changes.

    Attributes:
        keeps_sparse: True if a sparse update changes only weights for which the update has a value.
        whole_variables: True if no variable may be divided among several shard servers.
        one_shard: True if an optimizer step depends on all variables of the model together.
        dense_only: Name of the Keras optimizer that would divide by zero if workers sent sparse
            gradients; empty if workers may send sparse gradients.
        num_optimizers: Number of optimizers in the policy, each for different variables; 0 for the
            placeholder policy in use until a worker sends the script's optimizers.
        gradient_scale: c if a step only computes ``theta -= rate * c * update`` for a gradient, and
            ``theta += rate * update`` for a change of weights; None if a step does more.
        needs_keras: True if `ServerUpdate.init` imports Keras, so that Keras' backend must be
            chosen before.
        setting_limits: For each optimizer, the smallest and the largest legal value of each number
            of its parameter groups that a push carries (torch). Empty if pushes carry none.
    """

    keeps_sparse: bool = False
    whole_variables: bool = False
    one_shard: bool = False
    dense_only: str = ""
    num_optimizers: int = 1
    gradient_scale: float | None = None
    needs_keras: bool = False
    setting_limits: tuple[tuple[tuple[float, float], ...], ...] = ()

    def factor(self, kind: Kind, rate: float) -> float | None:
        """Return the factor f if a step only computes ``theta -= f * update``, else None.

        Args:
            kind: Kind of the workers' update: a gradient, or a change of weights by local steps.
            rate: Learning rate of the optimizer step, as passed to `ServerUpdate.step`.
        """
        if self.gradient_scale is None:
            return None
        return -rate if kind is Kind.DELTA else rate * self.gradient_scale


@dataclasses.dataclass(frozen=True)
class Moment:
    """The point of a run at which a server optimizer computes the learning rate of its next step.

    Attributes:
        scheduled: Learning rate of the run's schedule (--lr_schedule).
        kind: Kind of the workers' update: a gradient, or a change of weights by local steps.
        batches: Number of the script's mini-batches that the optimizer's schedule has counted.
        fraction: Consumed fraction of the run's budget of updates or examples, from 0 to 1.
        set_rate: Learning rate that a script sets for this step and all later steps of its
            optimizer; None if the script sets no rate.
        settings: Numbers of all parameter groups of a torch optimizer for this step, in the order
            of `thinwire.ops.optimizers.torch_groups`; empty: the numbers of the step before.
        without_gradient: Positions of the optimizer's parameters that no worker has a gradient for.
    """

    scheduled: float
    kind: Kind = Kind.GRADIENT
    batches: int = 0
    fraction: float = 0.0
    set_rate: float | None = None
    settings: Sequence[float] = ()
    without_gradient: Collection[int] = ()


class StepRate(NamedTuple):
    """The learning rate of an optimizer step.

    Attributes:
        value: Factor of the step: the learning rate for a gradient, the outer rate for a change of
            weights. NaN if a script's schedule has no rate for the step.
        schedule_count: Argument (number of batches or steps) of the script's learning rate
            schedule.
    """

    value: float
    schedule_count: int


class ServerUpdate(Policy, Protocol):
    """Optimizer policy of the parameter server: applies merged updates to a shard's weights.

    A policy defines `init` and `step`. The other verbs have defaults for a policy whose state is a
    dict of arrays and numbers.
    """

    @property
    def traits(self) -> OptimizerTraits:
        """Properties of the optimizer that the rest of the system needs to know."""
        return OptimizerTraits()

    def init(self, theta: Float32, spec: ModelSpec | None = None) -> State:
        """Return the optimizer's initial state for the shard server's flat weights.

        Args:
            theta: [n] float32, the shard server's weights.
            spec: Path and shape of each variable slice of the shard server; a slice that is a part
                of a variable is flat. None means that all weights are one flat slice.
        """

    def step(
        self,
        theta: Float32,
        update: Update,
        kind: Kind,
        rate: float,
        kernels: Kernels,
        state: State,
        number: int = 0,
    ) -> tuple[Int64 | None, State]:
        """Apply a merged update to the weights `theta` in place: one optimizer step.

        Args:
            theta: [n] float32, the shard server's weights.
            update: The merged update: a weighted mean of the workers' updates.
            kind: Kind of the workers' update: a gradient, or a change of weights by local steps.
            rate: Factor on the update, from the method `rate`.
            kernels: Kernels (array functions) that apply an update to the weights.
            state: The server optimizer's state from `init`.
            number: Index of the optimizer among the script's optimizers.

        Returns:
            The indices of the weights that changed (None if all weights may have changed), and the
            new state.
        """

    def rate(self, moment: Moment, state: State, number: int = 0) -> StepRate:
        """Return the learning rate of the server optimizer's next step.

        The default is the rate of the run's schedule for gradients, and 1 for changes of weights.
        A policy of a script's optimizers stores `moment.set_rate` in `state`; other policies ignore
        `moment.set_rate`.

        Args:
            moment: The point of the run at which the step is taken.
            state: The server optimizer's state from `init`.
            number: Index of the optimizer among the script's optimizers.
        """
        return StepRate(1.0 if moment.kind is Kind.DELTA else moment.scheduled, moment.batches)

    def slots(self, state: State) -> list[list[Slot]]:
        """Return copies of the slots of a script's optimizers; [] if flags set the optimizer."""
        return []

    def save(self, state: State, keep: Keep = copied) -> State:
        """Return the server optimizer's state as plain data.

        Args:
            state: The server optimizer's state from `init`.
            keep: Function that copies a large array of optimizer slots, or returns a snapshot of
                the array. `save` passes to `keep` each array that `step` changes in place.
        """
        return {name: keep(v) if getattr(v, "ndim", 0) else v for name, v in state.items()}

    def restore(self, saved: State | None, theta: Float32, state: State) -> State:
        """Continue from the weights `theta` [n], and from the optimizer state that `save` returned.

        Args:
            saved: Optimizer state from `save`. None if other code has changed only the weights, so
                that the optimizer slots stay as they are.
            theta: [n] float32, the shard server's weights.
            state: The server optimizer's state from `init`.
        """
        import numpy as np

        if saved is not None:
            for name, value in state.items():
                if getattr(value, "ndim", 0):
                    np.copyto(value, saved[name])
                else:
                    state[name] = type(value)(saved[name])
        return state


class LocalStep(Policy, Protocol):
    """Policy of a worker's local optimizer steps between two pushes.

    Without other definitions, the policy has no slots: no state, and nothing to average.
    """

    @property
    def optimizer(self) -> str:
        """Value of the flag --local_optimizer that selects the policy of local steps."""

    @property
    def brings_weights(self) -> bool:
        """True if the worker's script does the local steps and submits weights, not gradients."""
        return False

    @property
    def prox_mu(self) -> float:
        """Coefficient mu of FedProx's proximal term, which is added to each gradient; 0: none."""

    @property
    def outlives_rounds(self) -> bool:
        """True if a worker's optimizer slots are kept from one round of local steps to the next."""
        return False

    def num_averaged(self, num_parameters: int) -> int:
        """Return the number of optimizer slot values in each push, for averaging over workers."""
        return 0

    def init(self, num_parameters: int, spec: ModelSpec | None = None) -> State:
        """Return the local optimizer's initial slots; `restart` sets the weights of a round.

        Args:
            num_parameters: Number of weights of the shared model.
            spec: Paths and shapes of the shared variables. None: all weights are one flat variable.
        """
        return {}

    def step(
        self, weights: Float32, values: Float32, scheduled_rate: float, state: State, base: Float32
    ) -> State:
        """Do one local optimizer step: change the worker's `weights` [n] in place.

        Args:
            weights: [n] float32, the worker's weights.
            values: [n] float32, the gradient of the mini-batch; or the weights after the step, if
                `brings_weights` is True.
            scheduled_rate: Learning rate of the run's schedule (--lr_schedule).
            state: The local optimizer's slots (momentum and others).
            base: [n] float32, the weights at the start of the round of local steps.
        """

    def as_gradient(self, base: Float32, values: Float32, rate: float) -> tuple[Float32, float]:
        """Return the gradient [n] to push for a mini-batch, and the gradient's learning rate.

        Args:
            base: [n] float32, the weights before the mini-batch.
            values: [n] float32, the gradient of the mini-batch; or the weights after the step, if
                `brings_weights` is True.
            rate: Learning rate of the run's schedule (--lr_schedule).
        """
        return values, rate

    def restart(self, weights: Float32, state: State) -> State:
        """Prepare the local optimizer for a round of local steps from `weights` [n]."""
        return state

    def forget(self, weights: Float32, state: State) -> State:
        """Reset the local optimizer's slots to their initial values; continue at `weights` [n]."""
        return state

    def pack(self, state: State) -> Float32:
        """Return a copy of the optimizer slot values that the PS averages: [num_averaged]."""
        import numpy as np

        return np.empty(0, np.float32)

    def unpack(self, averaged: Float32, state: State) -> State:
        """Replace the worker's optimizer slots by averages [num_averaged] over all workers."""
        return state

    def save(self, state: State) -> State:
        """Return copies of the local optimizer's slots as plain data."""
        return state

    def restore(self, saved: State, weights: Float32, state: State) -> State:
        """Load local optimizer slots that `save` returned, for a worker with `weights` [n]."""
        return state
