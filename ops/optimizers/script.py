"""Optimizer policies for a script's compiled optimizers, built from a worker's description.

An offer is the description of a script's model and optimizers that a worker sends to the parameter
server. The learning rate comes from the script's optimizer or its schedule, not from the flag
--learning_rate. If a script's optimizer is SGD, with or without momentum, the code for
--server_optimizer=sgd or momentum does its steps. All optimizers of a script except SGD run as
Keras code on variables (`thinwire.ops.optimizers.variables`). A script may have several optimizers,
for example for a GAN; each optimizer steps different variables.

Source: design, section 11.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

from thinwire.ops.frozen import Keep, copied
from thinwire.ops.kernels.base import Kernels
from thinwire.ops.offer import Described, Offer, OptimizerOffer
from thinwire.ops.optimizers import allow_list
from thinwire.ops.optimizers.base import ServerUpdate
from thinwire.ops.optimizers.described import WAYS_OUT, build_schedule
from thinwire.ops.optimizers.rates import check_rates, rate_at
from thinwire.ops.optimizers.server import SCRIPT, OptimizerUpdate, RunsOwnRate
from thinwire.ops.optimizers.slots import ITERATION, Slot, velocity_slots
from thinwire.ops.optimizers.variables import VariableRules, VariablesOptimizer, is_elementwise
from thinwire.ops.sharding.split import part_of_spec
from thinwire.ops.types import ConfigurationError, Kind, ModelSpec, State, TensorSpec, Update

if TYPE_CHECKING:
    from thinwire.ops.types import Float32, Int64

_log = logging.getLogger(__name__)

#: Arguments of Keras' SGD that Thinwire's own SGD step does not support. An SGD with one of these
#: arguments runs as Keras code.
_ONLY_KERAS = (
    *("nesterov", "weight_decay", "clipnorm", "clipvalue", "global_clipnorm", "use_ema"),
    *("loss_scale_factor", "gradient_accumulation_steps"),
)


class GradientsOnly(ServerUpdate):
    """Base class of policies for a script's optimizers, for which workers push only gradients."""

    optimizer = SCRIPT

    def adds(self, kind: Kind) -> bool:
        """Return False, because a script's optimizer never just adds an update to the weights."""
        return False

    def factor(self, kind: Kind, rate: float) -> float | None:
        """Return None, because the step of a script's optimizer is not ``theta -= f * update``."""
        return None

    def outer_rate(self, fraction: float) -> float:
        """Return the outer rate 1, which is never used, because workers push only gradients."""
        return 1.0


@dataclasses.dataclass(frozen=True)
class AwaitedUpdate(GradientsOnly, RunsOwnRate):
    """Placeholder for a script's optimizer until a worker describes the optimizer to the PS."""

    awaits_offer = True

    @property
    def described(self) -> Described:
        """Raise ConfigurationError, because no worker has described its script's optimizer.

        Raises:
            ConfigurationError: Raised at every call, because no worker has described its script's
                optimizer.
        """
        raise ConfigurationError(
            "--server_optimizer=script: no worker has sent a script's optimizer to the PS; "
            "expected an optimizer from the first worker. Start the PS with --model_from=worker, "
            "or set --server_optimizer to the name of an optimizer."
        )

    def init(self, theta: Float32, spec: ModelSpec | None = None) -> State:
        """Raise ConfigurationError, because no worker has described its script's optimizer."""
        return {"described": self.described}

    def apply(
        self,
        theta: Float32,
        update: Update,
        kind: Kind,
        rate: float,
        kernels: Kernels,
        state: State,
        number: int = 0,
    ) -> tuple[Int64 | None, State]:
        """Raise ConfigurationError, because no worker has described its script's optimizer."""
        return None, self.init(theta)

    def changing(self, state: State, number: int = 0) -> Sequence[Any]:
        """Return no arrays, because the placeholder for an optimizer has no state."""
        return ()

    def save(self, state: State, keep: Keep = copied) -> State:
        """Return an empty state, because the placeholder for an optimizer has no slots."""
        return {}

    def set_weights(self, theta: Float32, state: State) -> None:
        """Do nothing, because the placeholder for an optimizer has no slots."""

    def restore(self, saved: State, theta: Float32, state: State) -> State:
        """Return the state unchanged, because the placeholder for an optimizer has no slots."""
        return state


@dataclasses.dataclass(frozen=True)
class ScriptUpdate(GradientsOnly):
    """Policy for a script with one compiled optimizer, with which the PS steps for all workers.

    Attributes:
        offer: The worker's description of the script's optimizer.
        rules: Exceptions of the optimizer for some variables, for example variables without weight
            decay.
        initial: Optimizer slots of the shard server from steps that the script did before the run,
            numbered by variable slice. Empty for a new optimizer.
    """

    offer: OptimizerOffer
    rules: VariableRules = dataclasses.field(default_factory=VariableRules)
    initial: Sequence[Slot] = dataclasses.field(default=(), compare=False, repr=False)

    @property
    def described(self) -> Described:
        """Class and arguments of the script's Keras optimizer."""
        return self.offer.optimizer

    @property
    def keeps_sparse(self) -> bool:
        """True for SGD without momentum: a sparse update changes only weights that it contains."""
        return self._is_flat and not self.described.config.get("momentum")

    @property
    def needs_whole_variables(self) -> bool:
        """True if no variable may be divided among several shard servers."""
        return not is_elementwise(self.described) or bool(self.rules.constraints)

    @property
    def needs_one_shard(self) -> bool:
        """True if the optimizer clips gradients by the norm over all variables of the model."""
        return bool(self.described.config.get("global_clipnorm"))

    @property
    def needs_dense(self) -> bool:
        """True if the script's optimizer would divide by zero with sparse gradients."""
        return self.described.name in allow_list.DENSE_ONLY

    @property
    def _is_flat(self) -> bool:
        """True if the optimizer is an SGD whose steps Thinwire computes without Keras."""
        config = self.described.config
        plain = self.described.name == "SGD" and not any(config.get(name) for name in _ONLY_KERAS)
        return plain and not self.rules.constraints

    @property
    def _flat(self) -> OptimizerUpdate:
        momentum = self.described.config.get("momentum") or 0.0
        return OptimizerUpdate("momentum" if momentum else "sgd", momentum)

    def init(self, theta: Float32, spec: ModelSpec | None = None) -> State:
        """Return the optimizer's state for the shard server's flat weights `theta` [n].

        Raises:
            ConfigurationError: The script's optimizer is not on the allow-list.
        """
        import numpy as np

        allow_list.check_optimizer(self.described)
        state: State = {"set_rate": None, "steps": self.offer.iterations, "inner": {}}
        rate = self.described.config["learning_rate"]
        if not isinstance(rate, int | float):
            state["schedule"] = _RateAtStep(build_schedule(allow_list.schedule_of(rate)))
        if not len(theta):  # all variables of this optimizer are on other shard servers
            return state
        if self._is_flat:
            state["inner"] = self._flat.init(theta, spec)
            if self.initial and "optimizer" in state["inner"]:
                parts = [np.ravel(slot.values) for slot in self.initial]
                np.concatenate(parts, out=state["inner"]["optimizer"].velocity)
            state["tensors"] = spec.tensors if spec else (TensorSpec("shard", (len(theta),)),)
        else:
            optimizer = VariablesOptimizer(self.described, theta, spec, self.rules)
            optimizer.set_iterations(self.offer.iterations)
            if self.initial:
                optimizer.load(self.initial)
            state["inner"] = {"optimizer": optimizer}
        return state

    def check_rates(
        self, firsts: Sequence[int], most_updates: int | None, most_batches: int | None
    ) -> None:
        """Evaluate the optimizer's learning rate schedule at sampled steps that the run may reach.

        Args:
            firsts: List of one number of mini-batches, at which a learning rate schedule that
                counts mini-batches starts in the run.
            most_updates: Largest number of updates of the run; None means no limit.
            most_batches: Largest number of the script's mini-batches in the run; None means no
                limit.

        Raises:
            ConfigurationError: The learning rate schedule has no finite rate at a sampled step.
        """
        rate = self.described.config["learning_rate"]
        if isinstance(rate, int | float):
            # the allow-list has checked that a constant learning rate is finite
            return
        described, is_at_steps = allow_list.schedule_of(rate), self.offer.clock == "steps"
        (first,) = firsts
        start = self.offer.iterations if is_at_steps else first
        most = most_updates if is_at_steps else most_batches
        check_rates(build_schedule(described), described, start, most)

    def starting_at(self, slots: Sequence[Sequence[Slot]]) -> Self:
        """Return a copy of the policy whose optimizer starts with the given optimizer slots."""
        (initial,) = slots
        return dataclasses.replace(self, initial=tuple(initial))

    def rate(self, scheduled: float, batches: int, state: State, number: int = 0) -> float:
        """Return the learning rate that the script set, or else the rate of its optimizer."""
        if state["set_rate"] is not None:
            return float(state["set_rate"])
        if "schedule" in state:
            return float(state["schedule"](self.schedule_count(batches, state)))
        return float(self.described.config["learning_rate"])

    def schedule_count(self, batches: int, state: State, number: int = 0) -> int:
        """Return the optimizer's step count if the offer's clock is "steps", else `batches`."""
        return int(state["steps"]) if self.offer.clock == "steps" else batches

    def set_rate(self, rate: float, state: State, number: int = 0) -> State:
        """Set the learning rate of all later steps, in place of the script's schedule."""
        state["set_rate"] = rate
        return state

    def apply(
        self,
        theta: Float32,
        update: Update,
        kind: Kind,
        rate: float,
        kernels: Kernels,
        state: State,
        number: int = 0,
    ) -> tuple[Int64 | None, State]:
        """Apply an update to the weights `theta` in place; `ServerUpdate.apply` has the details."""
        state["steps"] += 1
        touched = None
        if not len(theta):
            return None, state
        if self._is_flat:
            touched, state["inner"] = self._flat.apply(
                theta, update, kind, rate, kernels, state["inner"]
            )
        else:
            state["inner"]["optimizer"].step(theta, update, rate, negate=False)
        return touched, state

    def slots(self, state: State) -> list[list[Slot]]:
        """Return copies of the slots of the script's optimizer, numbered by variable slice."""
        import numpy as np

        inner = state["inner"].get("optimizer")
        if isinstance(inner, VariablesOptimizer):
            return [inner.slots()]
        slots = [Slot(None, ITERATION, np.asarray(state["steps"], np.int64))]
        if inner is not None:
            slots += velocity_slots(inner.save(), state["tensors"])
        return [slots]

    def changing(self, state: State, number: int = 0) -> Sequence[Any]:
        """Return the optimizer slot arrays that a step changes, and `save` passes to `keep`."""
        inner = state["inner"].get("optimizer")
        return () if inner is None else inner.changing()

    def save(self, state: State, keep: Keep = copied) -> State:
        """Return copies of the optimizer's slots, step count, and rate that the script set."""
        inner = state["inner"].get("optimizer")
        return {
            "steps": state["steps"],
            "set_rate": state["set_rate"],
            "slots": {} if inner is None else inner.save(keep),
        }

    def set_weights(self, theta: Float32, state: State) -> None:
        """Step from weights `theta` [n] that other code has set; do not change optimizer slots."""
        if "optimizer" in state["inner"]:
            state["inner"]["optimizer"].set_weights(theta)

    def restore(self, saved: State, theta: Float32, state: State) -> State:
        """Load an optimizer state that `save` returned, and the weights `theta` [n]."""
        state["steps"], state["set_rate"] = saved["steps"], saved["set_rate"]
        if "optimizer" in state["inner"]:
            state["inner"]["optimizer"].restore(saved["slots"], theta)
        return state


class _SteppedEntries:
    """The weights of a shard server that one of a script's several optimizers steps.

    Attributes:
        update: Policy of the script's optimizer that steps the weights.
        positions: [k] int64, ascending indices of the optimizer's weights among the shard server's
            weights.
        theta: [k] float32, copy of the weights that the optimizer steps.
        state: State of the optimizer, from `ScriptUpdate.init`.
    """

    def __init__(self, update: ScriptUpdate, theta: Float32, spec: ModelSpec) -> None:
        import numpy as np

        from thinwire.ops.kernels.numpy_ops import aligned

        self.update, offsets = update, spec.offsets
        numbers = [n for n, tensor in enumerate(spec.tensors) if tensor.path in update.offer.paths]
        pieces = [np.arange(offsets[n], offsets[n + 1]) for n in numbers]
        self.positions = np.concatenate([np.empty(0, np.int64), *pieces])
        self.theta = aligned(len(self.positions))
        self.read(theta)
        self.state = update.init(self.theta, part_of_spec(spec, numbers))

    def read(self, theta: Float32) -> None:
        """Copy the optimizer's weights from the shard server's weights `theta` [n]."""
        import numpy as np

        np.take(theta, self.positions, out=self.theta)

    def own(self, update: Update) -> Update:
        """Return an update's part for the optimizer's weights; its indices count `positions`."""
        import numpy as np

        if update.indices is None:
            return Update(None, update.values[self.positions])
        # A sparse update for this optimizer has only entries of its variables. So an update with as
        # many entries as `positions` has all weights of the optimizer, and is dense in these
        # coordinates.
        if len(update.indices) == len(self.positions):
            return Update(None, update.values)
        return Update(np.searchsorted(self.positions, update.indices), update.values)


@dataclasses.dataclass(frozen=True)
class ScriptUpdates(GradientsOnly):
    """Policy for a script with several compiled optimizers that step different variables.

    Attributes:
        updates: One policy per optimizer of the script. The policy's `offer.paths` lists the paths
            of the variables that the optimizer steps.
    """

    updates: tuple[ScriptUpdate, ...]

    @property
    def num_optimizers(self) -> int:
        """Number of optimizers that the script has compiled."""
        return len(self.updates)

    @property
    def described(self) -> Described:
        """Class and arguments of the first optimizer that needs dense gradients, or the first."""
        return next((u for u in self.updates if u.needs_dense), self.updates[0]).described

    @property
    def needs_whole_variables(self) -> bool:
        """True if no variable may be divided among several shard servers."""
        return any(update.needs_whole_variables for update in self.updates)

    @property
    def needs_one_shard(self) -> bool:
        """True if one of a script's optimizers clips gradients by the norm over its variables."""
        return any(update.needs_one_shard for update in self.updates)

    @property
    def needs_dense(self) -> bool:
        """True if one of a script's optimizers would divide by zero with sparse gradients."""
        return any(update.needs_dense for update in self.updates)

    def check_rates(
        self, firsts: Sequence[int], most_updates: int | None, most_batches: int | None
    ) -> None:
        """Check each optimizer's learning rate schedule from its number in `firsts` on."""
        for update, first in zip(self.updates, firsts, strict=True):
            update.check_rates([first], most_updates, most_batches)

    def starting_at(self, slots: Sequence[Sequence[Slot]]) -> Self:
        """Return a copy of the policy whose optimizers start with the given optimizer slots."""
        pairs = zip(self.updates, slots, strict=True)
        moved = tuple(update.starting_at([initial]) for update, initial in pairs)
        return dataclasses.replace(self, updates=moved)

    def init(self, theta: Float32, spec: ModelSpec | None = None) -> State:
        """Return the optimizers' state for the shard server's flat weights `theta` [n].

        Raises:
            ConfigurationError: One of the script's optimizers is not on the allow-list.
        """
        known = spec or ModelSpec((TensorSpec("shard", (len(theta),)),))
        return {"parts": [_SteppedEntries(update, theta, known) for update in self.updates]}

    def rate(self, scheduled: float, batches: int, state: State, number: int = 0) -> float:
        """Return the learning rate of the next step of optimizer `number`."""
        part = state["parts"][number]
        return float(part.update.rate(scheduled, batches, part.state))

    def schedule_count(self, batches: int, state: State, number: int = 0) -> int:
        """Return the argument (batches or steps) of the schedule of optimizer `number`."""
        part = state["parts"][number]
        return int(part.update.schedule_count(batches, part.state))

    def set_rate(self, rate: float, state: State, number: int = 0) -> State:
        """Set the learning rate of all later steps of optimizer `number`."""
        part = state["parts"][number]
        part.state = part.update.set_rate(rate, part.state)
        return state

    def apply(
        self,
        theta: Float32,
        update: Update,
        kind: Kind,
        rate: float,
        kernels: Kernels,
        state: State,
        number: int = 0,
    ) -> tuple[Int64 | None, State]:
        """Apply an update to the weights of optimizer `number` in `theta` [n], in place."""
        part = state["parts"][number]
        part.read(theta)
        touched, part.state = part.update.apply(
            part.theta, part.own(update), kind, rate, kernels, part.state
        )
        theta[part.positions] = part.theta
        return part.positions if touched is None else part.positions[touched], state

    def slots(self, state: State) -> list[list[Slot]]:
        """Return copies of the optimizer slots of each optimizer, numbered by variable slice."""
        return [part.update.slots(part.state)[0] for part in state["parts"]]

    def changing(self, state: State, number: int = 0) -> Sequence[Any]:
        """Return the slot arrays of optimizer `number` that an optimizer step changes in place."""
        part: _SteppedEntries = state["parts"][number]
        return part.update.changing(part.state)

    def save(self, state: State, keep: Keep = copied) -> State:
        """Return copies of each optimizer's slots, step count and rate set by the script."""
        parts = enumerate(state["parts"])
        return {str(number): part.update.save(part.state, keep) for number, part in parts}

    def set_weights(self, theta: Float32, state: State) -> None:
        """Step from weights `theta` [n] that other code has set; do not change optimizer slots."""
        for part in state["parts"]:
            part.read(theta)
            part.update.set_weights(part.theta, part.state)

    def restore(self, saved: State, theta: Float32, state: State) -> State:
        """Load an optimizer state that `save` returned, and the weights `theta` [n]."""
        for number, part in enumerate(state["parts"]):
            part.read(theta)
            part.state = part.update.restore(saved[str(number)], part.theta, part.state)
        return state


class _RateAtStep:
    """A Keras learning rate schedule that caches its last result; NaN if Keras raises an error."""

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule
        # Step and learning rate of the last call. Several threads read the pair (step, rate)
        # without a lock, so both are replaced together, in one assignment of a tuple.
        self._newest = (-1, 0.0)
        self._has_failed = False

    def __call__(self, step: int) -> float:
        """Return the schedule's learning rate at a step; NaN if Keras raises an exception."""
        known, rate = self._newest
        if step != known:
            rate = rate_at(self._schedule, step)
            if not math.isfinite(rate) and not self._has_failed:
                self._has_failed = True
                _log.error(
                    "the script's learning-rate schedule %s gives a rate of %s at step %d; "
                    "expected a finite rate. No update can be applied with this rate: the run "
                    "ends as diverged and keeps the weights of the last update. Correct the "
                    "arguments of the schedule.",
                    *(type(self._schedule).__name__, rate, step),
                )
            self._newest = (step, rate)
        return rate


def server_update(offer: Offer) -> ScriptUpdate | ScriptUpdates:
    """Return the parameter server's optimizer policy for the optimizers in a worker's offer.

    Raises:
        ConfigurationError: The worker's offer has no optimizer, or has a class or an argument that
            is not on the allow-list.
    """
    if not offer.optimizers:
        raise ConfigurationError(
            "the worker's script has no optimizer for the PS, so the workers would have to take "
            f"the steps; expected a method that sends changes of weights. {WAYS_OUT}"
        )
    for constraint in offer.constraints.values():
        allow_list.check_constraint(constraint)
    updates = [_update_of(optimizer, offer) for optimizer in offer.optimizers]
    return updates[0] if len(updates) == 1 else ScriptUpdates(tuple(updates))


def _update_of(optimizer: OptimizerOffer, offer: Offer) -> ScriptUpdate:
    allow_list.check_optimizer(optimizer.optimizer)
    rules = VariableRules(
        optimizer.without_decay,
        optimizer.by_adamw,
        offer.constraints,
        offer.unused,
    )
    return ScriptUpdate(optimizer, rules)
