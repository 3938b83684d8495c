"""How a worker steps on its own between two exchanges: a Keras optimizer, plain SGD, or a script.

Used where changes of weights travel. The slots of the optimizer (momentum, Adam's moments,
its step count) belong to the worker: they outlive an exchange, are cleared by it, or travel with
it and are averaged over the workers as BatchNorm's statistics are.

Source: Li, Zhou et al., "ESync: Accelerating Intra-Domain Federated Learning in Heterogeneous Data
Centers", IEEE TSC 15(4), allows any local optimizer; its code has plain SGD alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from thinwire.ops.offer import Described
from thinwire.ops.optimizers.base import LocalStep
from thinwire.ops.optimizers.server import OPTIMIZERS, OptimizerUpdate
from thinwire.ops.types import ConfigurationError, State, Update

if TYPE_CHECKING:
    from thinwire.ops.optimizers.variables import VariablesOptimizer
    from thinwire.ops.types import Float32, ModelSpec

#: --local_opt_state values: what an exchange does to the optimizer's slots.
SLOT_FATES = ("keep", "reset", "average")
#: Field of a policy here -> its flag.
LOCAL_FLAGS = {
    "optimizer": "local_optimizer",
    "momentum": "local_momentum",
    "opt_state": "local_opt_state",
    "rate_factor": "local_lr",
    "weight_decay": "local_weight_decay",
    "prox_mu": "prox_mu",
}
#: Values of --local_optimizer that build a Keras optimizer. ScheduleFreeAdamW is none of them: its
#: slots hold weights, which an exchange replaces.
_BUILT = tuple(name for name in OPTIMIZERS if name != "schedulefreeadamw")
#: --local_optimizer value -> arrays of the model's size that it keeps, of those whose slots can be
#: averaged: arrays of that size and the step count are all that they remember.
_NUM_SLOTS = {
    **dict.fromkeys(("sgd", "momentum", "rmsprop", "adagrad", "lion"), 1),
    **dict.fromkeys(("adam", "adamw", "adamax", "adadelta", "ftrl"), 2),
}


@dataclasses.dataclass(frozen=True)
class LocalUpdate:
    """One local step, and what becomes of the optimizer's slots at an exchange.

    Attributes:
        optimizer: A value of --local_optimizer other than "script", with Keras' default arguments.
        momentum: For sgd and momentum.
        opt_state: keep, reset or average.
        rate_factor: Of the scheduled learning rate.
        weight_decay: Decoupled, as Keras does it; None: as the optimizer has it by default.
        prox_mu: mu of FedProx: mu (w - b) is added to each gradient, b being the weights that the
            round began at; 0: nothing.

    Source: prox_mu of Li, Sahu et al., "Federated optimization in heterogeneous networks",
        arXiv 1812.06127.
    """

    brings_weights: ClassVar[bool] = False
    optimizer: str = "sgd"
    momentum: float = 0.0
    opt_state: str = "keep"
    rate_factor: float = 1.0
    weight_decay: float | None = None
    prox_mu: float = 0.0

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        for flag, value, legal in (
            ("local_optimizer", self.optimizer, _BUILT),
            ("local_opt_state", self.opt_state, SLOT_FATES),
        ):
            if value not in legal:
                raise ConfigurationError(f"--{flag}={value!r}: expected one of {', '.join(legal)}.")
        if not 0 <= self.momentum < 1:
            raise ConfigurationError(
                f"--local_momentum={self.momentum}: expected 0 <= momentum < 1."
            )
        if self.momentum and not self._is_sgd:
            raise ConfigurationError(
                f"--local_momentum belongs to sgd and momentum; --local_optimizer={self.optimizer} "
                "has its own."
            )
        if self.opt_state == "average" and self.optimizer not in _NUM_SLOTS:
            raise ConfigurationError(
                f"--local_opt_state=average with --local_optimizer={self.optimizer}: its slots are "
                "not all arrays of the model's size. Take --local_opt_state=keep or reset, or one "
                f"of {', '.join(_NUM_SLOTS)}."
            )
        for flag, number in (("local_weight_decay", self.weight_decay), ("prox_mu", self.prox_mu)):
            _check_not_negative(flag, number)
        if not 0 < self.rate_factor < float("inf"):  # refuses NaN too
            raise ConfigurationError(
                f"--local_lr: it is {self.rate_factor} times --learning_rate; expected a finite "
                "number above 0."
            )

    @property
    def has_slots(self) -> bool:
        """Whether the optimizer remembers anything from step to step."""
        return self._has_arrays or bool(self.weight_decay)

    @property
    def _has_arrays(self) -> bool:
        """Whether it remembers more than the number of its steps."""
        return self.momentum > 0 or not self._is_sgd

    @property
    def _is_sgd(self) -> bool:
        return OPTIMIZERS[self.optimizer] == "SGD"

    @property
    def _described(self) -> Described:
        """The Keras optimizer, with a learning rate to be assigned."""
        described = OptimizerUpdate(self.optimizer, self.momentum).described
        if self.weight_decay is None:
            return described
        config = {**described.config, "weight_decay": self.weight_decay}
        return dataclasses.replace(described, config=config)

    @property
    def outlives_rounds(self) -> bool:
        """Whether the slots are this worker's own from round to round."""
        return self.opt_state == "keep"

    @property
    def _averages(self) -> bool:
        return self._has_arrays and self.opt_state == "average"

    def num_averaged(self, num_parameters: int) -> int:
        """Return how many values of the slots travel with each push: the step count and arrays."""
        return 1 + _NUM_SLOTS[self.optimizer] * num_parameters if self._averages else 0

    def init(self, num_parameters: int, spec: ModelSpec | None = None) -> State:
        """Return the optimizer's state at zero weights; `restart` brings the right ones."""
        import numpy as np

        from thinwire.ops.optimizers.variables import VariablesOptimizer

        if not self.has_slots:
            return {}
        zeros = np.zeros(num_parameters, np.float32)
        flat = VariablesOptimizer(self._described, zeros, spec)
        fills = [each.numpy().flat[0] for each in _all_slots(flat)]  # some begin at 0.1
        # Compile now, not in the first step, whose time other workers may wait by.
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
        """Step `weights` [n] in place, against the gradient [n]; the round began at `base`."""
        import numpy as np

        rate = scheduled_rate * self.rate_factor
        if self.prox_mu:
            gradient = gradient + np.float32(self.prox_mu) * (weights - base)
        if self.has_slots:
            state["keras"].step(weights, Update(None, gradient), rate, negate=False)
        else:
            weights -= np.float32(rate) * gradient
        return state

    def as_gradient(self, base: Float32, values: Float32, rate: float) -> tuple[Float32, float]:
        """Return the gradient [n], and the scheduled learning rate."""
        del base
        return values, rate

    def restart(self, weights: Float32, state: State) -> State:
        """Begin a round at `weights` [n]."""
        if self.has_slots:
            state["keras"].set_weights(weights)
            if self.opt_state == "reset":
                _clear(state["keras"], state["fills"])
        return state

    def forget(self, weights: Float32, state: State) -> State:
        """Clear what the slots accumulated from gradients."""
        return dataclasses.replace(self, opt_state="reset").restart(weights, state) if state else {}

    def pack(self, state: State) -> Float32:
        """Return what is averaged: [num_averaged] float32, a copy."""
        import numpy as np

        if not self._averages:
            return np.empty(0, np.float32)
        return np.concatenate([np.float32(each).reshape(-1) for each in _slots(state["keras"])])

    def unpack(self, averaged: Float32, state: State) -> State:
        """Take over averages [num_averaged] as this worker's slots."""
        start = 0
        for variable in _slots(state["keras"]) if len(averaged) else ():
            size = variable.value.numpy().size
            values = averaged[start : start + size].reshape(variable.shape)
            variable.assign(values if values.ndim else round(float(values)))
            start += size
        return state

    def save(self, state: State) -> State:
        """Return the slots as plain data; copies."""
        return state["keras"].save() if self.has_slots else {}

    def restore(self, saved: State, weights: Float32, state: State) -> State:
        """Take back what `save` gave, at `weights` [n]."""
        if self.has_slots:
            state["keras"].restore(saved, weights)
        return state


@dataclasses.dataclass(frozen=True)
class ScriptStep:
    """The script steps, with whatever optimizer it has compiled, and brings the weights after it.

    The slots live in the script's process, and an exchange leaves them alone. Where it takes many
    local steps, a process that is started again goes on with those that were kept for it
    (`thinwire.script.keras.kept_state`); else it begins them anew, as the script itself does.

    Where every mini-batch is pushed, weights before minus weights after take the place of the
    gradient, at the learning rate 1.

    Attributes:
        optimizer: script; for the fingerprint.
        prox_mu: As of `LocalUpdate`. The script's process adds it, before its optimizer clips.
    """

    brings_weights: ClassVar[bool] = True
    outlives_rounds: ClassVar[bool] = False
    optimizer: str = "script"
    prox_mu: float = 0.0

    def __post_init__(self) -> None:
        """Refuse values that cannot work."""
        _check_not_negative("prox_mu", self.prox_mu)

    def num_averaged(self, num_parameters: int) -> int:
        """Return 0: the slots are the script's."""
        del num_parameters
        return 0

    def init(self, num_parameters: int, spec: ModelSpec | None = None) -> State:
        """Return no slots."""
        del num_parameters, spec
        return {}

    def step(
        self, weights: Float32, values: Float32, scheduled_rate: float, state: State, base: Float32
    ) -> State:
        """Take the script's weights [n] over."""
        del scheduled_rate, base
        weights[:] = values
        return state

    def as_gradient(self, base: Float32, values: Float32, rate: float) -> tuple[Float32, float]:
        """Return weights before minus weights after [n], at the learning rate 1."""
        del rate
        return base - values, 1.0

    def restart(self, weights: Float32, state: State) -> State:
        """Begin a round; the script keeps its slots."""
        del weights
        return state

    forget = restart

    def pack(self, state: State) -> Float32:
        """Return nothing: [0] float32."""
        import numpy as np

        del state
        return np.empty(0, np.float32)

    def unpack(self, averaged: Float32, state: State) -> State:
        """Take over nothing."""
        del averaged
        return state

    def save(self, state: State) -> State:
        """Return nothing."""
        return state

    def restore(self, saved: State, weights: Float32, state: State) -> State:
        """Restore nothing."""
        del saved, weights
        return state


#: --local_optimizer value -> the policy.
LOCAL_OPTIMIZERS: dict[str, type[LocalStep]] = {
    **dict.fromkeys(_BUILT, LocalUpdate),
    "script": ScriptStep,
}


def _check_not_negative(flag: str, number: float | None) -> None:
    if number is not None and not 0 <= number < float("inf"):
        raise ConfigurationError(f"--{flag}={number}: expected a finite number from 0 on.")


def _slots(flat: VariablesOptimizer) -> list[Any]:
    """Return the step count and the arrays of the model's size: all but the learning rate."""
    optimizer = flat.optimizer
    arrays = [each for each in optimizer.variables if each.shape == flat.variables[0].shape]
    return [optimizer.iterations, *arrays]


def _all_slots(flat: VariablesOptimizer) -> list[Any]:
    """Return everything that the optimizer remembers: all but the learning rate."""
    optimizer = flat.optimizer
    return [each for each in optimizer.variables if each is not optimizer._learning_rate]


def _clear(flat: VariablesOptimizer, fills: Sequence[Any]) -> None:
    """Set the slots to what they begin with, each the same value everywhere."""
    import numpy as np

    for variable, fill in zip(_all_slots(flat), fills, strict=True):
        variable.assign(np.full(variable.shape, fill, np.dtype(variable.dtype)))
