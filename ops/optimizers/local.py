"""Optimizers of a worker's local steps between two pushes: SGD, Keras or the script's optimizer.

In some training methods, workers do local steps and push changes of weights instead of gradients.
Each worker that does local steps has an optimizer with its own slots (momentum, Adam's moments, the
step count). An exchange with the parameter server leaves the slots of the workers' local optimizers
unchanged, resets the slots, or averages the slots over the workers.

Source: Li, Zhou et al., "ESync: Accelerating Intra-Domain Federated Learning in Heterogeneous Data
Centers", IEEE TSC 15(4), allows any local optimizer; the paper's code has only plain SGD.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

from thinwire.ops.offer import Described
from thinwire.ops.optimizers.base import LocalStep
from thinwire.ops.optimizers.server import OPTIMIZERS, OptimizerUpdate
from thinwire.ops.optimizers.slots import values_of
from thinwire.ops.optimizers.variables import VariablesOptimizer
from thinwire.ops.options import above_zero, choice, decay_factor, number
from thinwire.ops.policy import setting
from thinwire.ops.types import ConfigurationError, Float32, ModelSpec, State, Update

#: Values of the flag --local_optimizer that build a Keras optimizer. ScheduleFreeAdamW is excluded:
#: its slots contain weights, and an exchange with the parameter server replaces the weights.
_BUILT = tuple(name for name in OPTIMIZERS if name != "schedulefreeadamw")
#: Value of the flag --local_optimizer -> number of optimizer slot arrays of the model's size. The
#: dict contains the optimizers with slots that can be averaged: only arrays of the model's size,
#: and the step count.
_NUM_SLOTS = {
    **dict.fromkeys(("sgd", "momentum", "rmsprop", "adagrad", "lion"), 1),
    **dict.fromkeys(("adam", "adamw", "adamax", "adadelta", "ftrl"), 2),
}


_OPTIMIZER = choice(
    "local_optimizer",
    "sgd",
    "Optimizer of a worker's local steps; script: the optimizer that the script compiles.",
    (*_BUILT, "script"),
)
_PROX_MU = number(
    "prox_mu",
    0.0,
    "FedProx' mu: strength of the pull of local steps towards the weights at the start of the "
    "round.",
    "factor",
    low=0.0,
)


@dataclasses.dataclass(frozen=True)
class LocalUpdate(LocalStep):
    """Settings of a worker's local steps with an optimizer of Keras.

    Attributes:
        optimizer: A value of the flag --local_optimizer other than "script". The optimizer has
            Keras' default arguments.
        momentum: Momentum coefficient of the optimizers "sgd" and "momentum"; 0 for any other
            optimizer.
        opt_state: What an exchange with the parameter server does with the worker's optimizer
            slots: "keep", "reset" or "average" (over the workers).
        rate_factor: Factor by which the learning rate of the run's schedule is multiplied.
        weight_decay: Decoupled weight decay of the local optimizer, as in Keras. None means the
            optimizer's default.
        prox_mu: Coefficient mu of FedProx: mu (w - b) is added to each gradient, with w the current
            weights and b the weights at the start of the round. 0: nothing is added.

    Source: prox_mu is from Li, Sahu et al., "Federated optimization in heterogeneous networks",
        arXiv 1812.06127.
    """

    optimizer: str = setting(_OPTIMIZER)
    momentum: float = setting(
        decay_factor(
            "local_momentum",
            "Momentum of a worker's local steps with --local_optimizer=sgd or momentum.",
            unset="0.9 with --local_optimizer=momentum, else 0",
        ),
        0.0,
    )
    opt_state: str = setting(
        choice(
            "local_opt_state",
            "keep",
            "Effect of an exchange on the slots (such as velocity and moments) of a worker's local "
            "optimizer: keep them, reset them, or average them over the workers.",
            ("keep", "reset", "average"),
        )
    )
    rate_factor: float = setting(
        number(
            "local_lr",
            None,
            "Initial learning rate of a worker's local steps; --lr_schedule scales this rate too.",
            "factor",
            rule=above_zero(),
            unset="--learning_rate",
        ),
        1.0,
    )
    weight_decay: float | None = setting(
        number(
            "local_weight_decay",
            None,
            "Factor of the decoupled weight decay in a worker's local steps.",
            "factor",
            low=0.0,
            unset="as Keras' --local_optimizer has it",
        )
    )
    prox_mu: float = setting(_PROX_MU)

    def __post_init__(self) -> None:
        """Raise an error if local optimizer settings are out of range or cannot be combined."""
        super().__post_init__()
        if self.momentum and not self._is_sgd:
            raise ConfigurationError(
                "--local_momentum is for --local_optimizer=sgd and momentum; "
                f"--local_optimizer={self.optimizer} defines its momentum. Omit --local_momentum."
            )
        if self.opt_state == "average" and self.optimizer not in _NUM_SLOTS:
            raise ConfigurationError(
                f"--local_opt_state=average with --local_optimizer={self.optimizer}: not all "
                "optimizer slots have the model's size. Set --local_opt_state to keep or reset, or "
                f"--local_optimizer to one of {', '.join(_NUM_SLOTS)}."
            )

    @property
    def has_slots(self) -> bool:
        """True if the optimizer has state (slots) that one step leaves for the next step."""
        return self._has_arrays or bool(self.weight_decay)

    @property
    def _has_arrays(self) -> bool:
        """True if the optimizer has slots (state) other than the step count."""
        return self.momentum > 0 or not self._is_sgd

    @property
    def _is_sgd(self) -> bool:
        return OPTIMIZERS[self.optimizer] == "SGD"

    @property
    def _described(self) -> Described:
        """Class and arguments of the Keras optimizer, whose learning rate is set at each step."""
        described = OptimizerUpdate(self.optimizer, self.momentum).described
        if self.weight_decay is None:
            return described
        config = {**described.config, "weight_decay": self.weight_decay}
        return dataclasses.replace(described, config=config)

    @property
    def outlives_rounds(self) -> bool:
        """True if a worker's optimizer slots are kept from one round of local steps to the next."""
        return self.opt_state == "keep"

    @property
    def _averages(self) -> bool:
        return self._has_arrays and self.opt_state == "average"

    def num_averaged(self, num_parameters: int) -> int:
        """Return how many optimizer values each push has, from the step count and slot arrays."""
        return 1 + _NUM_SLOTS[self.optimizer] * num_parameters if self._averages else 0

    def init(self, num_parameters: int, spec: ModelSpec | None = None) -> State:
        """Return the local optimizer's initial state; `restart` sets the weights of a round."""
        import numpy as np

        from thinwire.ops.optimizers.variables import VariablesOptimizer

        if not self.has_slots:
            return {}
        zeros = np.zeros(num_parameters, np.float32)
        flat = VariablesOptimizer(self._described, zeros, spec)
        # some optimizer slots have the initial value 0.1
        fills = [values_of(slot).flat[0] for slot in _all_slots(flat)]
        # This step on zeros compiles the step. If the first training step compiled it, that
        # training step would be slow, and its measured time may decide when workers push.
        flat.step(zeros, Update(None, zeros.copy()), 0.0, negate=False)
        _clear(flat, fills)
        return {"keras": flat, "fills": fills}

    def step(
        self,
        weights: Float32,
        gradient: Float32,
        scheduled_rate: float,
        state: State,
        base: Float32,
    ) -> State:
        """Do one local optimizer step: change `weights` [n] in place.

        Args:
            weights: [n] float32, the worker's weights.
            gradient: [n] float32, the gradient of the mini-batch.
            scheduled_rate: Learning rate of the run's schedule (--lr_schedule).
            state: The local optimizer's state (slots and step count).
            base: [n] float32, the weights at the start of the round of local steps.
        """
        import numpy as np

        rate = scheduled_rate * self.rate_factor
        if self.prox_mu:
            gradient = gradient + np.float32(self.prox_mu) * (weights - base)
        if self.has_slots:
            state["keras"].step(weights, Update(None, gradient), rate, negate=False)
        else:
            weights -= np.float32(rate) * gradient
        return state

    def restart(self, weights: Float32, state: State) -> State:
        """Begin a round of local steps at `weights` [n]; reset slots if `opt_state` is "reset"."""
        if self.has_slots:
            state["keras"].set_weights(weights)
            if self.opt_state == "reset":
                _clear(state["keras"], state["fills"])
        return state

    def forget(self, weights: Float32, state: State) -> State:
        """Reset the local optimizer's slots to their initial values; continue at `weights` [n]."""
        return dataclasses.replace(self, opt_state="reset").restart(weights, state) if state else {}

    def pack(self, state: State) -> Float32:
        """Return a copy of the optimizer slot values that the PS averages: [num_averaged]."""
        import numpy as np

        if not self._averages:
            return np.empty(0, np.float32)
        slots = map(values_of, _slots(state["keras"]))
        return np.concatenate([slot.astype(np.float32).reshape(-1) for slot in slots])

    def unpack(self, averaged: Float32, state: State) -> State:
        """Replace the worker's optimizer slots by averages [num_averaged] over all workers."""
        import numpy as np

        start = 0
        for variable in _slots(state["keras"]) if len(averaged) else ():
            size = math.prod(variable.shape)
            values = averaged[start : start + size]
            count = [np.round(values).astype(np.int64)]  # for the step count, the only scalar
            state["keras"].assign(variable, [values] if len(variable.shape) else count)
            start += size
        return state

    def save(self, state: State) -> State:
        """Return copies of the local optimizer's slots as plain data."""
        return state["keras"].save() if self.has_slots else {}

    def restore(self, saved: State, weights: Float32, state: State) -> State:
        """Load local optimizer slots that `save` returned, for a worker with `weights` [n]."""
        if self.has_slots:
            state["keras"].restore(saved, weights)
        return state


@dataclasses.dataclass(frozen=True)
class ScriptStep(LocalStep):
    """Settings of local steps by the script's compiled optimizer.

    With ScriptStep, the script does a local optimizer step, then submits the new weights to the
    worker. The slots of the script's optimizer are in the script's process, and an exchange with
    the parameter server does not change them. If workers push changes of weights and the run has a
    folder (run_dir), a restarted script continues with the optimizer slots that
    `thinwire.script.kept_state` has saved. If workers push gradients, or the run has no
    folder, a restarted script starts with new optimizer slots.

    If every mini-batch is pushed, the pushed gradient is the weights before the script's optimizer
    step minus the weights after the step, and the learning rate is 1.

    Attributes:
        optimizer: Always "script", the value of --local_optimizer, which is part of the training
            method's fingerprint.
        prox_mu: mu of FedProx, as in `LocalUpdate`. The script's process adds mu (w - b) to each
            gradient before its optimizer clips the gradient, with w the current weights and b the
            weights at the start of the round.
    """

    brings_weights: ClassVar[bool] = True
    optimizer: str = "script"
    prox_mu: float = setting(_PROX_MU)

    def step(
        self, weights: Float32, values: Float32, scheduled_rate: float, state: State, base: Float32
    ) -> State:
        """Copy weights `values` [n] that the script computed into the worker's `weights` [n]."""
        weights[:] = values
        return state

    def as_gradient(self, base: Float32, values: Float32, rate: float) -> tuple[Float32, float]:
        """Return the weights before the step minus the weights after it, and learning rate 1."""
        return base - values, 1.0


#: Value of the flag --local_optimizer -> class with the settings of a worker's local steps.
LOCAL_OPTIMIZERS: dict[str, type[LocalStep]] = {
    **dict.fromkeys(_BUILT, LocalUpdate),
    "script": ScriptStep,
}


def _slots(flat: VariablesOptimizer) -> list[Any]:
    """Return the optimizer's step count, and its slots that are arrays of the model's size."""
    optimizer = flat.optimizer
    arrays = [slot for slot in optimizer.variables if slot.shape == flat.variables[0].shape]
    return [optimizer.iterations, *arrays]


def _all_slots(flat: VariablesOptimizer) -> list[Any]:
    """Return all variables of the Keras optimizer except the learning rate."""
    optimizer = flat.optimizer
    return [slot for slot in optimizer.variables if slot is not optimizer._learning_rate]


def _clear(flat: VariablesOptimizer, fills: Sequence[Any]) -> None:
    """Fill each slot of the local optimizer with its initial value from `fills`."""
    import numpy as np

    for variable, fill in zip(_all_slots(flat), fills, strict=True):
        values = np.full(math.prod(variable.shape), fill, np.dtype(variable.dtype))
        flat.assign(variable, [values])
