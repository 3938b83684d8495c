"""Server optimizers that flags select: a Keras optimizer applies each merged update.

SGD without momentum runs in the kernels that apply updates: the result equals Keras's SGD, and a
sparse update changes only the weights for which it has a value. SGD with momentum and Adam run in
`ops/optimizers/momentum_sgd` and `ops/optimizers/adam`, with the same results as in Keras. All
other server optimizers run as Keras code (`ops/optimizers/variables`).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from thinwire.ops.frozen import Keep, copied
from thinwire.ops.kernels.base import Kernels
from thinwire.ops.offer import Described
from thinwire.ops.optimizers import allow_list
from thinwire.ops.optimizers.base import Moment, OptimizerTraits, ServerUpdate, StepRate
from thinwire.ops.optimizers.schedule import parse_schedule
from thinwire.ops.optimizers.variables import is_plain_adam, optimizer_of
from thinwire.ops.options import decay_factor, number, words
from thinwire.ops.policy import setting
from thinwire.ops.types import ConfigurationError, Float32, Int64, Kind, ModelSpec, State, Update

#: Value of the flag --server_optimizer that selects the script's compiled optimizer.
SCRIPT = "script"
#: Value of the flag --server_optimizer other than "script" -> name of the class of
#: keras.optimizers.
OPTIMIZERS = {
    "sgd": "SGD",
    "momentum": "SGD",
    **{name.lower(): name for name in allow_list.OPTIMIZERS if name != "SGD"},
}


#: Flag of the outer rate, the factor on workers' changes of weights.
GLOBAL_LR = number(
    "global_lr",
    None,
    "Outer learning rate: factor that the PS applies to changes of weights (--pacer=esync; "
    "--pacer=fixed with --local_steps above 1; --codec=dgs, dgc or gd).",
    "factor",
    low=0.0,
    unset="0.7 with --server_optimizer=nesterov, 0.01 with adaptive ones, else 1",
)
#: Flag of the schedule of the outer rate.
GLOBAL_LR_SCHEDULE = words(
    "global_lr_schedule",
    None,
    "Schedule of --global_lr over the run: 0.5:0.5 halves the outer rate after half of the budget. "
    "--lr_schedule applies to local steps only.",
    "as --lr_schedule",
    unset="constant",
)
#: Flag of the momentum with which the PS applies updates.
MOMENTUM = decay_factor(
    "momentum",
    "Momentum of SGD, if the PS applies updates by SGD.",
    unset="0.9 with --server_optimizer=momentum, else 0",
)


class FollowsOuterSchedule(ServerUpdate):
    """Base class of optimizers that apply workers' changes of weights at an outer rate.

    Attributes:
        global_lr: The outer rate: the factor on a worker's change of weights.
        global_lr_schedule: Schedule of the outer rate (factor on changes of weights), as text for
            `parse_schedule`. Empty means that the outer rate is constant.
    """

    global_lr: float
    global_lr_schedule: str

    def outer_rate(self, fraction: float) -> float:
        """Return the factor on changes of weights at `fraction` (0..1) of the run's budget."""
        text = self.global_lr_schedule
        return parse_schedule(self.global_lr, text, "global_lr_schedule").rate(fraction)

    def rate(self, moment: Moment, state: State, number: int = 0) -> StepRate:
        """Return the run's learning rate for gradients, or the outer rate for weight changes."""
        is_change = moment.kind is Kind.DELTA
        rate = self.outer_rate(moment.fraction) if is_change else moment.scheduled
        return StepRate(rate, moment.batches)


@dataclasses.dataclass(frozen=True)
class OptimizerUpdate(FollowsOuterSchedule):
    """Policy by which the parameter server steps with a Keras optimizer that a flag selects.

    To a Keras optimizer on the parameter server, a worker's change of weights is a negative
    gradient.

    Attributes:
        optimizer: Value of the flag --server_optimizer, but not "script", for example "adam".
        momentum: Momentum coefficient of "sgd" and "momentum"; 0 for any other optimizer.
        weight_decay: Decoupled weight decay of the optimizer, as in Keras. 0 means the optimizer's
            default.
        global_lr: The outer rate: the factor on a worker's change of weights.
        global_lr_schedule: Schedule of the outer rate (factor on changes of weights), as text for
            `parse_schedule`. Empty means that the outer rate is constant.
    """

    optimizer: str = "sgd"
    momentum: float = setting(MOMENTUM, 0.0, shown=True)
    weight_decay: float = setting(
        number(
            "weight_decay", 0.0, "Factor of decoupled weight decay on the PS.", "factor", low=0.0
        )
    )
    global_lr: float = setting(GLOBAL_LR, 1.0)
    global_lr_schedule: str = setting(GLOBAL_LR_SCHEDULE, "")

    def __post_init__(self) -> None:
        """Raise an error if settings of the optimizer are out of range or cannot be combined."""
        if self.optimizer not in OPTIMIZERS:
            raise ConfigurationError(
                f"--server_optimizer={self.optimizer!r}: expected one of {', '.join(OPTIMIZERS)}."
            )
        super().__post_init__()
        # `outer_rate` parses `global_lr_schedule`, the schedule of the outer rate, and raises an
        # error if the text is malformed
        self.outer_rate(0.0)
        if self.momentum and not self._is_sgd:
            raise ConfigurationError(
                "--momentum is for the optimizers sgd and momentum; "
                f"--server_optimizer={self.optimizer} has its own momentum. Leave out --momentum."
            )

    @property
    def _is_sgd(self) -> bool:
        return OPTIMIZERS[self.optimizer] == "SGD"

    @property
    def described(self) -> Described:
        """Class and arguments of the Keras optimizer, whose learning rate is set at each step."""
        options: dict[str, Any] = {"learning_rate": 0.0}
        if self.weight_decay:
            options["weight_decay"] = self.weight_decay
        if self._is_sgd:
            options["momentum"] = self.momentum
        return Described(OPTIMIZERS[self.optimizer], options)

    @property
    def _is_plain(self) -> bool:
        """True for SGD without momentum and without weight decay, which has no slots."""
        return self._is_sgd and not self.momentum and not self.weight_decay

    @property
    def traits(self) -> OptimizerTraits:
        """Properties of the Keras optimizer that its callers need."""
        name = OPTIMIZERS[self.optimizer]
        return OptimizerTraits(
            keeps_sparse=self._is_plain,
            whole_variables=name not in allow_list.ELEMENTWISE,
            dense_only=name if name in allow_list.DENSE_ONLY else "",
            gradient_scale=1.0 if self._is_plain else None,
            needs_keras=bool(self.weight_decay)
            or not (self._is_sgd or is_plain_adam(self.described)),
        )

    def init(self, theta: Float32, spec: ModelSpec | None = None) -> State:
        """Return the optimizer's state for the shard server's flat weights `theta` [n]."""
        if self._is_plain:
            return {}
        if self._is_sgd and not self.weight_decay:
            from thinwire.ops.optimizers.momentum_sgd import MomentumSGD

            return {"optimizer": MomentumSGD(self.momentum, theta)}
        return {"optimizer": optimizer_of(self.described, theta, spec)}

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
        if "optimizer" in state:
            state["optimizer"].step(theta, update, rate, negate=kind is Kind.DELTA)
            return None, state
        factor = -rate if kind is Kind.DELTA else rate
        kernels.apply(theta, update.indices, update.values, factor)
        return update.indices, state

    def save(self, state: State, keep: Keep = copied) -> State:
        """Return the optimizer's slots as plain data; `keep` copies large arrays."""
        saved: State = state["optimizer"].save(keep) if "optimizer" in state else {}
        return saved

    def restore(self, saved: State | None, theta: Float32, state: State) -> State:
        """Load the optimizer slots that `save` returned, and the weights `theta` [n]."""
        if "optimizer" in state:
            state["optimizer"].restore(saved, theta)
        return state


def keras_optimizer(choice: ServerUpdate, name: str) -> Any:
    """Build the Keras optimizer that does the steps of a server policy, with learning rate 0.

    Args:
        choice: Optimizer policy of the parameter server.
        name: Value of the flag --server_optimizer that selects the policy.

    Raises:
        ConfigurationError: No Keras optimizer does the steps of the policy.
    """
    from thinwire.ops.optimizers.described import build_optimizer

    if not isinstance(choice, OptimizerUpdate):
        raise ConfigurationError(
            f"--server_optimizer={name} is an optimizer for changes of weights from local steps or "
            "for a script's model, but this run has gradients and a model from flags; expected an "
            "optimizer for gradients. Set --method=asgd, and --server_optimizer=sgd, momentum, "
            "adam or another Keras optimizer."
        )
    return build_optimizer(choice.described)
