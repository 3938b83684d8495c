"""Optimizer policies for a script's compiled optimizers, built from a worker's description.

An offer is the description of a script's model and optimizers that a worker sends to the parameter
server. The learning rate comes from the script's optimizer or its schedule, not from the flag
--learning_rate. If a script's optimizer is SGD, with or without momentum, or Adam, the code for
--server_optimizer=sgd, momentum or adam does its steps, and Keras is not imported. All other
optimizers run as Keras code on variables (`thinwire.ops.optimizers.variables`). A script may
have several optimizers, for example for a GAN; each optimizer steps different variables.

Source: design, section 11.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from thinwire.ops.frozen import Keep, copied
from thinwire.ops.kernels.base import Kernels
from thinwire.ops.offer import Described, Offer, OptimizerOffer
from thinwire.ops.optimizers import allow_list
from thinwire.ops.optimizers.base import Moment, OptimizerTraits, ServerUpdate, StepRate
from thinwire.ops.optimizers.described import WAYS_OUT
from thinwire.ops.optimizers.rates import check_rates, rate_at
from thinwire.ops.optimizers.server import OptimizerUpdate
from thinwire.ops.optimizers.slots import ITERATION, Slot, flat_slots
from thinwire.ops.optimizers.torch_groups import is_torch
from thinwire.ops.optimizers.variables import (
    VariableRules,
    is_elementwise,
    is_plain_adam,
    optimizer_of,
)
from thinwire.ops.sharding.split import part_of_spec
from thinwire.ops.types import (
    ConfigurationError,
    Float32,
    Int64,
    Kind,
    ModelSpec,
    State,
    TensorSpec,
    Update,
)

if TYPE_CHECKING:
    from thinwire.ops.optimizers.torch_updates import TorchUpdate

_log = logging.getLogger(__name__)

#: Arguments of Keras' SGD that Thinwire's own SGD step does not support. An SGD with one of these
#: arguments runs as Keras code.
_ONLY_KERAS = (
    *("weight_decay", "clipnorm", "clipvalue", "global_clipnorm", "use_ema"),
    *("loss_scale_factor", "gradient_accumulation_steps"),
)


@dataclasses.dataclass(frozen=True)
class AwaitedUpdate(ServerUpdate):
    """Placeholder for a script's optimizers until a worker describes the optimizers to the PS."""

    @property
    def traits(self) -> OptimizerTraits:
        """Properties of a placeholder, which has no optimizers."""
        return OptimizerTraits(num_optimizers=0)

    def init(self, theta: Float32, spec: ModelSpec | None = None) -> State:
        """Raise ConfigurationError, because no worker has described its script's optimizer."""
        raise ConfigurationError(
            "--server_optimizer=script: no worker has sent a script's optimizer to the PS; "
            "expected an optimizer from the first worker. Start the PS with --model_from=worker, "
            "or set --server_optimizer to the name of an optimizer."
        )

    def step(self, *_: Any, **__: Any) -> NoReturn:
        """Raise NotImplementedError, because `init` returns no state for a step."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class ScriptUpdate(ServerUpdate):
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
    def traits(self) -> OptimizerTraits:
        """Properties of the script's optimizer that its callers need."""
        name, config = self.described.name, self.described.config
        return OptimizerTraits(
            keeps_sparse=self._is_flat and not config.get("momentum"),
            whole_variables=not is_elementwise(self.described) or bool(self.rules.constraints),
            # the argument global_clipnorm is the largest norm over all variables of the model
            one_shard=bool(config.get("global_clipnorm")),
            dense_only=name if name in allow_list.DENSE_ONLY else "",
            needs_keras=not (self._is_flat or is_plain_adam(self.described, self.rules)),
        )

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
            from thinwire.ops.optimizers.keras_schedules import build_schedule

            state["schedule"] = _RateAtStep(build_schedule(allow_list.schedule_of(rate)))
        if not len(theta):  # all variables of this optimizer are on other shard servers
            return state
        if self._is_flat:
            if momentum := self._flat.momentum:
                from thinwire.ops.optimizers.momentum_sgd import MomentumSGD

                nesterov = bool(self.described.config.get("nesterov"))
                state["inner"] = {"optimizer": MomentumSGD(momentum, theta, nesterov)}
            if self.initial and "optimizer" in state["inner"]:
                parts = [np.ravel(slot.values) for slot in self.initial]
                np.concatenate(parts, out=state["inner"]["optimizer"].velocity)
            state["tensors"] = spec.tensors if spec else (TensorSpec("shard", (len(theta),)),)
        else:
            optimizer = optimizer_of(self.described, theta, spec, self.rules)
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
        from thinwire.ops.optimizers.keras_schedules import build_schedule

        described, is_at_steps = allow_list.schedule_of(rate), self.offer.clock == "steps"
        (first,) = firsts
        start = self.offer.iterations if is_at_steps else first
        most = most_updates if is_at_steps else most_batches
        check_rates(build_schedule(described), described, start, most)

    def rate(self, moment: Moment, state: State, number: int = 0) -> StepRate:
        """Return the learning rate that the script set, or else the rate of its optimizer."""
        if moment.set_rate is not None:
            state["set_rate"] = moment.set_rate
        count = int(state["steps"]) if self.offer.clock == "steps" else moment.batches
        if state["set_rate"] is not None:
            rate = state["set_rate"]
        elif "schedule" in state:
            rate = state["schedule"](count)
        else:
            rate = self.described.config["learning_rate"]
        return StepRate(float(rate), count)

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
        """Apply an update to the weights `theta` in place; `ServerUpdate.step` has the details."""
        state["steps"] += 1
        touched = None
        if not len(theta):
            return None, state
        if self._is_flat:
            touched, state["inner"] = self._flat.step(
                theta, update, kind, rate, kernels, state["inner"]
            )
        else:
            state["inner"]["optimizer"].step(theta, update, rate, negate=False)
        return touched, state

    def slots(self, state: State) -> list[list[Slot]]:
        """Return copies of the slots of the script's optimizer, numbered by variable slice."""
        import numpy as np

        inner = state["inner"].get("optimizer")
        if inner is not None and not self._is_flat:
            return [inner.slots()]
        slots = [Slot(None, ITERATION, np.asarray(state["steps"], np.int64))]
        if inner is not None:
            slots += flat_slots(inner.velocity.copy(), "momentum", state["tensors"])
        return [slots]

    def save(self, state: State, keep: Keep = copied) -> State:
        """Return copies of the optimizer's slots, step count, and rate that the script set."""
        inner = state["inner"].get("optimizer")
        return {
            "steps": state["steps"],
            "set_rate": state["set_rate"],
            "slots": {} if inner is None else inner.save(keep),
        }

    def restore(self, saved: State | None, theta: Float32, state: State) -> State:
        """Load an optimizer state that `save` returned, and the weights `theta` [n]."""
        if saved is not None:
            state["steps"], state["set_rate"] = saved["steps"], saved["set_rate"]
        if "optimizer" in state["inner"]:
            state["inner"]["optimizer"].restore(None if saved is None else saved["slots"], theta)
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

    def __init__(self, update: ScriptUpdate | TorchUpdate, theta: Float32, spec: ModelSpec) -> None:
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
class ScriptUpdates(ServerUpdate):
    """Policy for a script with several compiled optimizers that step different variables.

    Attributes:
        updates: One policy per optimizer of the script. The policy's `offer.paths` lists the paths
            of the variables that the optimizer steps.
    """

    updates: tuple[ScriptUpdate | TorchUpdate, ...]

    @property
    def traits(self) -> OptimizerTraits:
        """Properties that one or more of the script's optimizers have."""
        every = [update.traits for update in self.updates]
        return OptimizerTraits(
            whole_variables=any(traits.whole_variables for traits in every),
            one_shard=any(traits.one_shard for traits in every),
            dense_only=next(filter(None, (traits.dense_only for traits in every)), ""),
            needs_keras=any(traits.needs_keras for traits in every),
            num_optimizers=len(every),
            setting_limits=tuple(limits for traits in every for limits in traits.setting_limits),
        )

    def check_rates(
        self, firsts: Sequence[int], most_updates: int | None, most_batches: int | None
    ) -> None:
        """Check each optimizer's learning rate schedule from its number in `firsts` on."""
        for update, first in zip(self.updates, firsts, strict=True):
            update.check_rates([first], most_updates, most_batches)

    def init(self, theta: Float32, spec: ModelSpec | None = None) -> State:
        """Return the optimizers' state for the shard server's flat weights `theta` [n].

        Raises:
            ConfigurationError: One of the script's optimizers is not on the allow-list.
        """
        known = spec or ModelSpec((TensorSpec("shard", (len(theta),)),))
        return {"parts": [_SteppedEntries(update, theta, known) for update in self.updates]}

    def rate(self, moment: Moment, state: State, number: int = 0) -> StepRate:
        """Return the learning rate of the next step of optimizer `number`."""
        part: _SteppedEntries = state["parts"][number]
        return part.update.rate(moment, part.state)

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
        """Apply an update to the weights of optimizer `number` in `theta` [n], in place."""
        part = state["parts"][number]
        part.read(theta)
        touched, part.state = part.update.step(
            part.theta, part.own(update), kind, rate, kernels, part.state
        )
        theta[part.positions] = part.theta
        return part.positions if touched is None else part.positions[touched], state

    def slots(self, state: State) -> list[list[Slot]]:
        """Return copies of the optimizer slots of each optimizer, numbered by variable slice."""
        return [part.update.slots(part.state)[0] for part in state["parts"]]

    def save(self, state: State, keep: Keep = copied) -> State:
        """Return copies of each optimizer's slots, step count and rate set by the script."""
        parts = enumerate(state["parts"])
        return {str(number): part.update.save(part.state, keep) for number, part in parts}

    def restore(self, saved: State | None, theta: Float32, state: State) -> State:
        """Load an optimizer state that `save` returned, and the weights `theta` [n]."""
        for number, part in enumerate(state["parts"]):
            part.read(theta)
            of_part = None if saved is None else saved[str(number)]
            part.state = part.update.restore(of_part, part.theta, part.state)
        return state


class _RateAtStep:
    """A learning rate schedule that caches its last result; NaN if the schedule raises an error."""

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule
        # Step and learning rate of the last call. Several threads read the pair (step, rate)
        # without a lock, so both are replaced together, in one assignment of a tuple.
        self._newest = (-1, 0.0)
        self._has_failed = False

    def __call__(self, step: int) -> float:
        """Return the schedule's learning rate at a step; NaN if it raises an exception."""
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


def server_update(
    offer: Offer, initial: Sequence[Sequence[Slot]] = ()
) -> ScriptUpdate | TorchUpdate | ScriptUpdates:
    """Return the parameter server's optimizer policy for the optimizers in a worker's offer.

    Args:
        offer: The worker's description of its script's model and optimizers.
        initial: For each optimizer, its slots on the shard server from steps that the script did
            before the run, numbered by the shard's slices of the optimizer's variables. Empty for
            new optimizers.

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
    slots = initial or [()] * len(offer.optimizers)
    pairs = zip(offer.optimizers, slots, strict=True)
    updates = [_update_of(optimizer, offer, tuple(own)) for optimizer, own in pairs]
    return updates[0] if len(updates) == 1 else ScriptUpdates(tuple(updates))


def _update_of(
    optimizer: OptimizerOffer, offer: Offer, initial: Sequence[Slot]
) -> ScriptUpdate | TorchUpdate:
    if is_torch(optimizer.optimizer):
        from thinwire.ops.optimizers.torch_updates import TorchUpdate

        return TorchUpdate.of(optimizer, initial)
    allow_list.check_optimizer(optimizer.optimizer)
    rules = VariableRules(
        optimizer.without_decay,
        optimizer.by_adamw,
        offer.constraints,
        offer.unused,
    )
    return ScriptUpdate(optimizer, rules, initial)
