"""Keras classes that a parameter server may build for a script, and their legal arguments.

A parameter server receives names and argument values of Keras classes from untrusted clients. The
module `allow_list` never imports or evaluates a name from a client, and allocates no memory of a
size that a client gives. The module `allow_list` looks up a Keras class name from a client in its
tables, and accepts as argument values only numbers, booleans and short lists of numbers.

Source: `keras.optimizers`, `keras.optimizers.schedules`, `keras.constraints` of Keras 3.15.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from thinwire.ops.offer import Described
from thinwire.ops.types import ConfigurationError

#: Largest number of items in a list argument of a Keras class, for example the boundaries of a
#: schedule.
_LONGEST_LIST = 1000
#: Largest number of axes in the argument `axis` of a Keras constraint, and bound of an axis number.
_MOST_AXES = 32
#: Bound on the absolute value of every number in an argument of a Keras class; a step count up to
#: this bound fits int64.
_MOST_STEPS = float(1 << 62)


@dataclasses.dataclass(frozen=True)
class Argument:
    """The legal values of one argument of a Keras class.

    Attributes:
        kind: Type of the argument of a Keras class: float (any finite number), int, bool, list (of
            finite numbers), or tuple (one whole number, or a list of whole numbers).
        low: Smallest legal number for the argument of a Keras class.
        high: Largest legal number for the argument of a Keras class.
        optional: True if None is a legal value of the argument of a Keras class.
    """

    kind: type = float
    low: float = -math.inf
    high: float = math.inf
    optional: bool = False

    def allows(self, value: Any) -> bool:
        """Return True if a number, boolean or list is legal for the argument of a Keras class."""
        if value is None:
            return self.optional
        if self.kind is bool:
            return isinstance(value, bool)
        if self.kind is list:
            numbers = isinstance(value, list) and len(value) <= _LONGEST_LIST
            return numbers and all(NUMBER.allows(number) for number in value)
        if self.kind is tuple:
            element = dataclasses.replace(self, kind=int)
            several = isinstance(value, list) and 0 < len(value) <= _MOST_AXES
            return all(map(element.allows, value)) if several else element.allows(value)
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        whole = self.kind is float or isinstance(value, int)
        return whole and abs(value) < _MOST_STEPS and self.low <= value <= self.high

    def __str__(self) -> str:
        """Return a description of the argument's legal values for an error message."""
        if self.kind in (bool, list):
            text = "true or false" if self.kind is bool else f"up to {_LONGEST_LIST} numbers"
        else:
            text = "a finite number" if self.kind is float else "a whole number"
            if self.kind is tuple:
                text = "one or more whole numbers"
            if math.isfinite(self.low):
                text += f" from {self.low:g}"
            if math.isfinite(self.high):
                text += f" to {self.high:g}"
        return f"{text}, or null" if self.optional else text


NUMBER = Argument()
_SHARE = Argument(low=0.0, high=1.0)
_FLAG = Argument(bool)
_NOT_NEGATIVE = Argument(low=0.0)
_OPTIONAL = Argument(low=0.0, optional=True)
_STEPS = Argument(low=1e-9)

#: Arguments that every Keras optimizer has.
_COMMON: dict[str, Argument] = {
    "weight_decay": Argument(optional=True),
    "clipnorm": _OPTIONAL,
    "clipvalue": _OPTIONAL,
    "global_clipnorm": _OPTIONAL,
    "use_ema": _FLAG,
    "ema_momentum": _SHARE,
    "ema_overwrite_frequency": Argument(int, 0, optional=True),
    "loss_scale_factor": Argument(low=1e-30, optional=True),
    "gradient_accumulation_steps": Argument(int, 0, optional=True),
}
_BETAS = {"beta_1": _SHARE, "beta_2": _SHARE, "epsilon": _NOT_NEGATIVE}

#: Name of a class of keras.optimizers -> its arguments, except `name` and `learning_rate`.
OPTIMIZERS: dict[str, dict[str, Argument]] = {
    "SGD": {"momentum": _SHARE, "nesterov": _FLAG},
    "RMSprop": {
        "rho": _SHARE,
        "momentum": _SHARE,
        "epsilon": _NOT_NEGATIVE,
        "centered": _FLAG,
    },
    "Adam": {**_BETAS, "amsgrad": _FLAG},
    "AdamW": {**_BETAS, "amsgrad": _FLAG},
    "Adadelta": {"rho": _SHARE, "epsilon": _NOT_NEGATIVE},
    "Adagrad": {"initial_accumulator_value": _NOT_NEGATIVE, "epsilon": _NOT_NEGATIVE},
    "Adamax": _BETAS,
    "Adafactor": {
        "beta_2_decay": NUMBER,
        "epsilon_1": _NOT_NEGATIVE,
        "epsilon_2": _NOT_NEGATIVE,
        "clip_threshold": _STEPS,
        "relative_step": _FLAG,
    },
    "Nadam": _BETAS,
    "Ftrl": {
        "learning_rate_power": Argument(high=0.0),
        "initial_accumulator_value": _NOT_NEGATIVE,
        "l1_regularization_strength": _NOT_NEGATIVE,
        "l2_regularization_strength": _NOT_NEGATIVE,
        "l2_shrinkage_regularization_strength": _NOT_NEGATIVE,
        "beta": NUMBER,
    },
    "Lion": {"beta_1": Argument(low=1e-30, high=1.0), "beta_2": _SHARE},
    "Lamb": _BETAS,
    # Arguments `exclude_layers` and `exclude_embeddings` of Muon are not listed because they match
    # variable paths of the script. The worker evaluates them and sends the matching paths.
    "Muon": {
        "adam_beta_1": _SHARE,
        "adam_beta_2": _SHARE,
        "adam_weight_decay": Argument(optional=True),
        "epsilon": _NOT_NEGATIVE,
        "muon_a": NUMBER,
        "muon_b": NUMBER,
        "muon_c": NUMBER,
        "adam_lr_ratio": NUMBER,
        "momentum": _SHARE,
        "ns_steps": Argument(int, 0, 100),
        "nesterov": _FLAG,
        "rms_rate": Argument(optional=True),
    },
    "ScheduleFreeAdamW": {**_BETAS, "warmup_steps": _NOT_NEGATIVE},
}
#: Optimizers whose step of one weight depends only on that weight's gradient and optimizer slots.
#: Such an optimizer can step any part of a variable.
ELEMENTWISE = frozenset(OPTIMIZERS) - {"Adafactor", "Lamb", "Muon"}

#: Optimizers that need dense gradients: their divisor is a product of means over a row and a column
#: of squared gradients. If the row and the column are all 0, the product underflows to 0.
DENSE_ONLY = frozenset({"Adafactor"})

_INITIAL = {"initial_learning_rate": NUMBER}
_DECAY = {**_INITIAL, "decay_steps": _STEPS, "decay_rate": NUMBER, "staircase": _FLAG}

#: Name of a class of keras.optimizers.schedules -> its arguments, except `name`.
SCHEDULES: dict[str, dict[str, Argument]] = {
    "ExponentialDecay": _DECAY,
    "InverseTimeDecay": _DECAY,
    "PiecewiseConstantDecay": {"boundaries": Argument(list), "values": Argument(list)},
    "PolynomialDecay": {
        **_INITIAL,
        "decay_steps": _STEPS,
        "end_learning_rate": NUMBER,
        "power": NUMBER,
        "cycle": _FLAG,
    },
    "CosineDecay": {
        **_INITIAL,
        "decay_steps": _STEPS,
        "alpha": NUMBER,
        "warmup_target": Argument(optional=True),
        "warmup_steps": _NOT_NEGATIVE,
    },
    "CosineDecayRestarts": {
        **_INITIAL,
        "first_decay_steps": _STEPS,
        "t_mul": NUMBER,
        "m_mul": NUMBER,
        "alpha": NUMBER,
    },
}

_AXIS = Argument(tuple, -_MOST_AXES, _MOST_AXES - 1)

#: Name of a class of keras.constraints -> its arguments.
CONSTRAINTS: dict[str, dict[str, Argument]] = {
    "MaxNorm": {"max_value": NUMBER, "axis": _AXIS},
    "MinMaxNorm": {
        "min_value": NUMBER,
        "max_value": NUMBER,
        "rate": NUMBER,
        "axis": _AXIS,
    },
    "NonNeg": {},
    "UnitNorm": {"axis": _AXIS},
}


def arguments(name: str) -> tuple[str, ...]:
    """Return the argument names of an optimizer on the allow-list, without `learning_rate`."""
    return (*_COMMON, *OPTIMIZERS[name])


def check_optimizer(described: Described) -> None:
    """Raise an error if an optimizer is not on the allow-list or has an illegal argument.

    Raises:
        ConfigurationError: The optimizer's class or the value of an argument is not allowed. The
            message names the class, the argument and the legal values.
    """
    config = dict(described.config)
    rate = config.pop("learning_rate", None)
    known = {name: _COMMON | own for name, own in OPTIMIZERS.items()}
    _check("optimizer", Described(described.name, config), known)
    if isinstance(rate, Mapping):
        check_schedule(schedule_of(rate))
    elif not NUMBER.allows(rate):
        raise ConfigurationError(
            f"{described.name}(learning_rate={rate!r:.100}): expected a finite number, or a "
            "learning-rate schedule given by its name and config."
        )
    clips = [name for name in ("clipnorm", "clipvalue", "global_clipnorm") if config.get(name)]
    if len(clips) > 1:
        raise ConfigurationError(
            f"{described.name}({', '.join(clips)}): expected at most one kind of gradient clipping."
        )


def check_schedule(described: Described) -> None:
    """Raise an error if a learning rate schedule is not allow-listed or has an illegal argument.

    Raises:
        ConfigurationError: The class of the learning rate schedule or the value of an argument is
            not allowed. The message names the class, the argument and the legal values.
    """
    if "boundaries" in _check("schedule", described, SCHEDULES):
        boundaries = described.config.get("boundaries", [])
        values = described.config.get("values", [])
        if len(values) != len(boundaries) + 1 or list(boundaries) != sorted(boundaries):
            raise ConfigurationError(
                f"schedule {described.name} has {len(boundaries)} boundaries and {len(values)} "
                "values; expected ascending boundaries, and one value more than boundaries."
            )


def check_constraint(described: Described) -> None:
    """Raise an error if a constraint is not on the allow-list or has an illegal argument.

    Raises:
        ConfigurationError: The constraint class, or the value of an argument, is not allowed. The
            message names the class, the argument and the legal values.
    """
    _check("constraint", described, CONSTRAINTS)


def schedule_of(row: Mapping[str, Any]) -> Described:
    """Return the learning rate schedule in an optimizer's config, without checking its class.

    Args:
        row: Description of the learning rate schedule: a dict with its class "name" and its
            arguments, "config".

    Raises:
        ConfigurationError: `row` does not consist of the keys "name" and "config".
    """
    if set(row) != {"name", "config"} or not isinstance(row["config"], Mapping):
        raise ConfigurationError(
            f"learning_rate={dict(row)!r:.100}: expected a schedule, given by its name and config."
        )
    return Described(row["name"], row["config"])


def _check(
    what: str, described: Described, known: Mapping[str, Mapping[str, Argument]]
) -> Mapping[str, Argument]:
    """Check the class and arguments of a Keras object; return the legal arguments of the class."""
    name = described.name
    if not isinstance(name, str) or name not in known:
        raise ConfigurationError(
            f"the {what} {name!r:.100} is unknown; expected one of {', '.join(sorted(known))}."
        )
    legal = known[name]
    for argument, value in described.config.items():
        if argument not in legal:
            raise ConfigurationError(
                f"{what} {name} has no argument {argument!r:.100}; expected the arguments "
                f"{', '.join(sorted(legal)) or 'none'}."
            )
        if not legal[argument].allows(value):
            raise ConfigurationError(
                f"{what} {name}({argument}={value!r:.100}): expected {legal[argument]}."
            )
    return legal
