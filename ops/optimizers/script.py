"""The optimizer of a script as a policy: it waits for the offer, and then steps with its own rate.

Plain SGD and SGD with momentum take the paths that --server_optimizer has; any other steps whole
variables (`thinwire.ops.optimizers.variables`). Several optimizers of one script, as a GAN has
them, step each their own variables.

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

#: Arguments of SGD that only Keras' own step has.
_ONLY_KERAS = (
    *("nesterov", "weight_decay", "clipnorm", "clipvalue", "global_clipnorm", "use_ema"),
    *("loss_scale_factor", "gradient_accumulation_steps"),
)


class GradientsOnly:
    """What all optimizers of scripts have in common: they step with gradients alone."""

    optimizer = SCRIPT
    momentum = 0.0
    weight_decay = 0.0
    keeps_sparse = False
    awaits_offer = False
    needs_whole_variables = False
    needs_one_shard = False
    needs_dense = False
    num_optimizers = 1

    def adds(self, kind: Kind) -> bool:
        """Return False: no changes of weights come here."""
        del kind
        return False

    def factor(self, kind: Kind, rate: float) -> float | None:
        """Return None: a step of the script's optimizer."""
        del kind, rate
        return None

    def outer_rate(self, fraction: float) -> float:
        """Return 1: no changes of weights come here."""
        del fraction
        return 1.0


@dataclasses.dataclass(frozen=True)
class AwaitedUpdate(GradientsOnly, RunsOwnRate):
    """Stands for the optimizer of a script until its offer is there."""

    awaits_offer = True

    @property
    def described(self) -> Described:
        """Refuse: it has not come.

        Raises:
            ConfigurationError: Always.
        """
        raise ConfigurationError(
            "--server_optimizer=script: there is no offer of a script's optimizer here; expected "
            "one of the first worker. Start the PS with --model_from=worker, or name an optimizer."
        )

    def init(self, theta: Float32, spec: ModelSpec | None = None) -> State:
        """Refuse as `described` does."""
        del theta, spec
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
        """Refuse as `init` does."""
        del update, kind, rate, kernels, state, number
        return None, self.init(theta)

    def changing(self, state: State, number: int = 0) -> Sequence[Any]:
        """Return nothing."""
        del state, number
        return ()

    def save(self, state: State, keep: Keep = copied) -> State:
        """Return nothing."""
        del state, keep
        return {}

    def set_weights(self, theta: Float32, state: State) -> None:
        """Do nothing."""
        del theta, state

    def restore(self, saved: State, theta: Float32, state: State) -> State:
        """Change nothing."""
        del saved, theta
        return state


@dataclasses.dataclass(frozen=True)
class ScriptUpdate(GradientsOnly):
    """Steps as the script's compiled optimizer does.

    Attributes:
        offer: The optimizer.
        rules: About some of the variables.
        initial: Slots of an optimizer that has moved before the run, by slice of this shard.
    """

    offer: OptimizerOffer
    rules: VariableRules = dataclasses.field(default_factory=VariableRules)
    initial: Sequence[Slot] = dataclasses.field(default=(), compare=False, repr=False)

    @property
    def described(self) -> Described:
        """The Keras optimizer."""
        return self.offer.optimizer

    @property
    def keeps_sparse(self) -> bool:  # type: ignore[override]
        """Whether a sparse update changes only its own entries."""
        return self._is_flat and not self.described.config.get("momentum")

    @property
    def needs_whole_variables(self) -> bool:  # type: ignore[override]
        """Whether no shard may hold a part of a variable."""
        return not is_elementwise(self.described) or bool(self.rules.constraints)

    @property
    def needs_one_shard(self) -> bool:  # type: ignore[override]
        """Whether gradients are clipped by the norm of them all."""
        return bool(self.described.config.get("global_clipnorm"))

    @property
    def needs_dense(self) -> bool:  # type: ignore[override]
        """Whether gradients of which only a part is sent make it divide by zero."""
        return self.described.name in allow_list.DENSE_ONLY

    @property
    def _is_flat(self) -> bool:
        """Whether Thinwire's own steps equal those of Keras."""
        config = self.described.config
        plain = self.described.name == "SGD" and not any(config.get(each) for each in _ONLY_KERAS)
        return plain and not self.rules.constraints

    @property
    def _flat(self) -> OptimizerUpdate:
        momentum = self.described.config.get("momentum") or 0.0
        return OptimizerUpdate("momentum" if momentum else "sgd", momentum)

    def init(self, theta: Float32, spec: ModelSpec | None = None) -> State:
        """Return the state for the shard's flat weights; see ServerUpdate.

        Raises:
            ConfigurationError: The optimizer is not on the allow-list.
        """
        import numpy as np

        allow_list.check_optimizer(self.described)
        state: State = {"set_rate": None, "steps": self.offer.iterations, "inner": {}}
        rate = self.described.config["learning_rate"]
        if not isinstance(rate, int | float):
            state["schedule"] = _RateAtStep(build_schedule(allow_list.schedule_of(rate)))
        if not len(theta):  # other shards hold what it steps
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
        """Evaluate the schedule at counts of a run's possible life.

        Args:
            firsts: The one count that the schedule begins with.
            most_updates: The most updates of the run; None: no limit.
            most_batches: The most batches of the script in the run; None: no limit.

        Raises:
            ConfigurationError: The schedule has no finite rate at one of these counts.
        """
        rate = self.described.config["learning_rate"]
        if isinstance(rate, int | float):
            return  # the allow-list has checked that it is finite
        described, is_at_steps = allow_list.schedule_of(rate), self.offer.clock == "steps"
        (first,) = firsts
        start = self.offer.iterations if is_at_steps else first
        most = most_updates if is_at_steps else most_batches
        check_rates(build_schedule(described), described, start, most)

    def starting_at(self, slots: Sequence[Sequence[Slot]]) -> Self:
        """Return this for an optimizer that has moved before: its slots, by slice of the shard."""
        (initial,) = slots
        return dataclasses.replace(self, initial=tuple(initial))

    def rate(self, scheduled: float, batches: int, state: State, number: int = 0) -> float:
        """Return the script's own rate: as it was set last, of its schedule, or as compiled."""
        del scheduled, number
        if state["set_rate"] is not None:
            return float(state["set_rate"])
        if "schedule" in state:
            return float(state["schedule"](self.schedule_count(batches, state)))
        return float(self.described.config["learning_rate"])

    def schedule_count(self, batches: int, state: State, number: int = 0) -> int:
        """Return the batches, or the optimizer's own steps where its schedule is read at these."""
        del number
        return int(state["steps"]) if self.offer.clock == "steps" else batches

    def set_rate(self, rate: float, state: State, number: int = 0) -> State:
        """Step with this rate from now on: a script has set it."""
        del number
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
        """Step `theta` in place; see ServerUpdate."""
        del number
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
        """Return copies of what the script's own optimizer would hold, by slice."""
        import numpy as np

        inner = state["inner"].get("optimizer")
        if isinstance(inner, VariablesOptimizer):
            return [inner.slots()]
        found = [Slot(None, ITERATION, np.asarray(state["steps"], np.int64))]
        if inner is not None:
            found += velocity_slots(inner.save(), state["tensors"])
        return [found]

    def changing(self, state: State, number: int = 0) -> Sequence[Any]:
        """Return the slots that `save` keeps something of."""
        del number
        inner = state["inner"].get("optimizer")
        return () if inner is None else inner.changing()

    def save(self, state: State, keep: Keep = copied) -> State:
        """Return copies of slots, count and rate."""
        inner = state["inner"].get("optimizer")
        return {
            "steps": state["steps"],
            "set_rate": state["set_rate"],
            "slots": {} if inner is None else inner.save(keep),
        }

    def set_weights(self, theta: Float32, state: State) -> None:
        """Go on from weights `theta` [n] that something else has changed; the slots stay."""
        if "optimizer" in state["inner"]:
            state["inner"]["optimizer"].set_weights(theta)

    def restore(self, saved: State, theta: Float32, state: State) -> State:
        """Load what `save` returned; the weights are `theta`."""
        state["steps"], state["set_rate"] = saved["steps"], saved["set_rate"]
        if "optimizer" in state["inner"]:
            state["inner"]["optimizer"].restore(saved["slots"], theta)
        return state


class _SteppedEntries:
    """What one of several optimizers steps of a shard.

    Attributes:
        update: The optimizer.
        positions: [k] int64 ascending, its entries of the shard.
        theta: [k] float32, their values at the last step.
        state: The optimizer's.
    """

    def __init__(self, update: ScriptUpdate, theta: Float32, spec: ModelSpec) -> None:
        import numpy as np

        from thinwire.ops.kernels.numpy_ops import aligned

        self.update, offsets = update, spec.offsets
        numbers = [n for n, each in enumerate(spec.tensors) if each.path in update.offer.paths]
        pieces = [np.arange(offsets[n], offsets[n + 1]) for n in numbers]
        self.positions = np.concatenate([np.empty(0, np.int64), *pieces])
        self.theta = aligned(len(self.positions))
        self.read(theta)
        self.state = update.init(self.theta, part_of_spec(spec, numbers))

    def read(self, theta: Float32) -> None:
        """Take over the values of the shard."""
        import numpy as np

        np.take(theta, self.positions, out=self.theta)

    def own(self, update: Update) -> Update:
        """Return an update of these entries alone, by their place among them."""
        import numpy as np

        if update.indices is None:
            return Update(None, update.values[self.positions])
        if len(update.indices) == len(self.positions):
            return Update(None, update.values)
        return Update(np.searchsorted(self.positions, update.indices), update.values)


@dataclasses.dataclass(frozen=True)
class ScriptUpdates(GradientsOnly):
    """Steps as several compiled optimizers of a script do, each its own variables.

    Attributes:
        updates: One for each; `offer.paths` names its variables.
    """

    updates: tuple[ScriptUpdate, ...]

    @property
    def num_optimizers(self) -> int:  # type: ignore[override]
        """How many there are."""
        return len(self.updates)

    @property
    def described(self) -> Described:
        """The first one that needs whole gradients, or the first."""
        return next((each for each in self.updates if each.needs_dense), self.updates[0]).described

    @property
    def needs_whole_variables(self) -> bool:  # type: ignore[override]
        """Whether no shard may hold a part of a variable."""
        return any(each.needs_whole_variables for each in self.updates)

    @property
    def needs_one_shard(self) -> bool:  # type: ignore[override]
        """Whether gradients of one of them are clipped by the norm of them all."""
        return any(each.needs_one_shard for each in self.updates)

    @property
    def needs_dense(self) -> bool:  # type: ignore[override]
        """Whether gradients of which only a part is sent make one of them divide by zero."""
        return any(each.needs_dense for each in self.updates)

    def check_rates(
        self, firsts: Sequence[int], most_updates: int | None, most_batches: int | None
    ) -> None:
        """Check each optimizer by its own first count; see `ScriptUpdate.check_rates`."""
        for update, first in zip(self.updates, firsts, strict=True):
            update.check_rates([first], most_updates, most_batches)

    def starting_at(self, slots: Sequence[Sequence[Slot]]) -> Self:
        """Return this for optimizers that have moved before: the slots of each, by slice."""
        pairs = zip(self.updates, slots, strict=True)
        moved = tuple(each.starting_at([initial]) for each, initial in pairs)
        return dataclasses.replace(self, updates=moved)

    def init(self, theta: Float32, spec: ModelSpec | None = None) -> State:
        """Return the state for the shard's flat weights; see ServerUpdate.

        Raises:
            ConfigurationError: An optimizer is not on the allow-list.
        """
        known = spec or ModelSpec((TensorSpec("shard", (len(theta),)),))
        return {"parts": [_SteppedEntries(each, theta, known) for each in self.updates]}

    def rate(self, scheduled: float, batches: int, state: State, number: int = 0) -> float:
        """Return the script's own rate of one of them."""
        part = state["parts"][number]
        return float(part.update.rate(scheduled, batches, part.state))

    def schedule_count(self, batches: int, state: State, number: int = 0) -> int:
        """Return the count that the schedule of one of them is read at."""
        part = state["parts"][number]
        return int(part.update.schedule_count(batches, part.state))

    def set_rate(self, rate: float, state: State, number: int = 0) -> State:
        """Let one of them step with this rate from now on: a script has set it."""
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
        """Let one of them step its part of `theta` in place; see ServerUpdate."""
        part = state["parts"][number]
        part.read(theta)
        touched, part.state = part.update.apply(
            part.theta, part.own(update), kind, rate, kernels, part.state
        )
        theta[part.positions] = part.theta
        return part.positions if touched is None else part.positions[touched], state

    def slots(self, state: State) -> list[list[Slot]]:
        """Return copies of what each of the script's own optimizers would hold, by slice."""
        return [part.update.slots(part.state)[0] for part in state["parts"]]

    def changing(self, state: State, number: int = 0) -> Sequence[Any]:
        """Return the slots of one optimizer that `save` keeps something of."""
        part: _SteppedEntries = state["parts"][number]
        return part.update.changing(part.state)

    def save(self, state: State, keep: Keep = copied) -> State:
        """Return copies of the slots, count and rate of each."""
        parts = enumerate(state["parts"])
        return {str(number): part.update.save(part.state, keep) for number, part in parts}

    def set_weights(self, theta: Float32, state: State) -> None:
        """Go on from weights `theta` [n] that something else has changed; the slots stay."""
        for part in state["parts"]:
            part.read(theta)
            part.update.set_weights(part.theta, part.state)

    def restore(self, saved: State, theta: Float32, state: State) -> State:
        """Load what `save` returned; the weights are `theta`."""
        for number, part in enumerate(state["parts"]):
            part.read(theta)
            part.state = part.update.restore(saved[str(number)], part.theta, part.state)
        return state


class _RateAtStep:
    """A schedule of Keras, computed once for each step; NaN where it has no rate."""

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule
        self._newest = (-1, 0.0)  # step and rate; others look at the rate from their own threads
        self._has_failed = False

    def __call__(self, step: int) -> float:
        """Return the rate at a step."""
        known, rate = self._newest
        if step != known:
            rate = rate_at(self._schedule, step)
            if not math.isfinite(rate) and not self._has_failed:
                self._has_failed = True
                _log.error(
                    "the script's schedule %s gives a learning rate of %s at step %d; expected a "
                    "finite one. No update can be applied with it: the run ends as diverged, with "
                    "the weights as they are. Correct the arguments of the schedule.",
                    *(type(self._schedule).__name__, rate, step),
                )
            self._newest = (step, rate)
        return rate


def server_update(offer: Offer) -> ScriptUpdate | ScriptUpdates:
    """Return how the PS steps for a script.

    Raises:
        ConfigurationError: The offer names what is not on the allow-list, or no optimizer.
    """
    if not offer.optimizers:
        raise ConfigurationError(
            "the offer has no optimizer, so the workers step; expected a method that sends changes "
            f"of weights. {WAYS_OUT}"
        )
    for constraint in offer.constraints.values():
        allow_list.check_constraint(constraint)
    updates = [_update_of(each, offer) for each in offer.optimizers]
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
