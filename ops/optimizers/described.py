"""A script's compiled optimizer as plain data on the worker, and built again on the PS.

What Keras cannot send is evaluated on the worker, where the variables are: `exclude_from_weight_
decay`, which is no argument, and rules about paths. What cannot be sent at all steps on the
workers, with a method that lets it; the refusal names such methods.

Source: design, section 11, with the traps of Keras 3.15 that are listed there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from thinwire.ops.offer import Described, LossScale, OptimizerOffer
from thinwire.ops.optimizers import allow_list
from thinwire.ops.types import ConfigurationError

if TYPE_CHECKING:
    import keras

#: What lets an optimizer step that a PS cannot build.
WAYS_OUT = (
    "Take a method whose workers step with it themselves: --method=dgs, --method=dgc, "
    "--method=gd or --method=esync."
)
#: Rules about paths, which stay on the worker.
_ON_WORKER = ("exclude_layers", "exclude_embeddings")


@dataclasses.dataclass(frozen=True)
class DescribedOptimizer:
    """A compiled optimizer in plain data.

    Attributes:
        offer: The optimizer itself.
        loss_scale: Of the LossScaleOptimizer around it; None: there is none.
    """

    offer: OptimizerOffer
    loss_scale: LossScale | None = None


def describe(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
    clock: str = "batches",
    paths: Sequence[str] = (),
) -> DescribedOptimizer:
    """Describe a compiled optimizer with the values that it has now.

    Args:
        optimizer: Any instance of a class of keras.optimizers; built or not.
        variables: The shared variables, in order.
        clock: "batches" or "steps"; see OptimizerOffer.
        paths: Of the variables as they are shared; not given: their own.

    Raises:
        ConfigurationError: A PS cannot build it; the message names it, and methods that can.
    """
    import keras

    names = list(paths) or [variable.path for variable in variables]
    loss_scale = None
    if type(optimizer) is keras.optimizers.LossScaleOptimizer:
        scale = float(optimizer.dynamic_scale) if optimizer.built else optimizer.initial_scale
        streak = int(optimizer.step_counter) if optimizer.built else 0
        loss_scale = LossScale(float(scale), int(optimizer.dynamic_growth_steps), streak)
        optimizer = optimizer.inner_optimizer
    name = type(optimizer).__name__
    if name not in allow_list.OPTIMIZERS or type(optimizer) is not getattr(keras.optimizers, name):
        raise ConfigurationError(
            f"the compiled optimizer is a {type(optimizer).__module__}.{name}, which a PS cannot "
            "build: expected a class of keras.optimizers itself, other than MultiOptimizer. "
            f"{WAYS_OUT}"
        )
    config = {
        argument: _plain(getattr(optimizer, argument), f"{name}({argument})")
        for argument in allow_list.arguments(name)
    }
    config["learning_rate"] = _rate(optimizer, name)
    described = Described(name, config)
    allow_list.check_optimizer(described)
    offer = OptimizerOffer(
        described,
        _where(names, variables, lambda variable: not _decays(optimizer, variable)),
        clock,
        _where(names, variables, lambda variable: _is_by_adamw(optimizer, variable)),
        int(optimizer._iterations),
        has_slots=int(optimizer._iterations) > 0,
    )
    return DescribedOptimizer(offer, loss_scale)


def describe_constraints(
    variables: Sequence[keras.Variable], paths: Sequence[str] = ()
) -> dict[str, Described]:
    """Return path -> constraint of those of the variables that have one.

    Raises:
        ConfigurationError: A PS cannot build it.
    """
    import keras

    found = {}
    for path, variable in zip(paths or [each.path for each in variables], variables, strict=True):
        constraint = variable.constraint
        if constraint is None:
            continue
        found[path] = _described(
            constraint,
            keras.constraints,
            allow_list.CONSTRAINTS,
            f"the constraint of {path} is",
            "expected one of",
        )
        allow_list.check_constraint(found[path])
    return found


def own_schedule(optimizer: Any) -> Any:
    """Return an optimizer's schedule if it is of a class of the script's own; else None.

    No PS builds that, so a worker reads it and sends the rate with each push.
    """
    import keras

    schedules, rate = keras.optimizers.schedules, optimizer._learning_rate
    name = type(rate).__name__
    if not isinstance(rate, schedules.LearningRateSchedule):
        return None
    is_known = name in allow_list.SCHEDULES and type(rate) is getattr(schedules, name)
    return None if is_known else rate


def _rate(optimizer: Any, name: str) -> Any:
    """Return the learning rate: a number, or a schedule's class and arguments."""
    import keras

    rate = optimizer._learning_rate
    if own_schedule(optimizer) is not None:
        return 0.0  # until the first push
    if not callable(rate) or isinstance(rate, keras.Variable):
        return float(rate)
    schedule = _described(
        rate,
        keras.optimizers.schedules,
        allow_list.SCHEDULES,
        f"{name}(learning_rate=...) is",
        "expected a number or one of",
    )
    return {"name": schedule.name, "config": schedule.config}


def _described(
    made: Any, module: Any, known: Mapping[str, Iterable[str]], what: str, expected: str
) -> Described:
    """Return an object's class and arguments.

    Args:
        made: The object.
        module: Of Keras, in which its class must be.
        known: Names of the classes that a PS builds, and of their arguments.
        what: The beginning of a refusal.
        expected: How it continues: what is accepted, up to the names.

    Raises:
        ConfigurationError: A PS cannot build it.
    """
    name = type(made).__name__
    if name not in known or type(made) is not getattr(module, name):
        raise ConfigurationError(
            f"{what} a {type(made).__module__}.{name}, which a PS cannot build; {expected} "
            f"{', '.join(known)} of {module.__name__}. {WAYS_OUT}"
        )
    arguments = made.get_config()
    config = {each: _plain(arguments[each], f"{name}({each})") for each in known[name]}
    return Described(name, config)


def _plain(value: Any, what: str) -> Any:
    """Return a value as JSON has it.

    Raises:
        ConfigurationError: It is something else, such as a function or a schedule.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(each, what) for each in value]
    if hasattr(value, "numpy"):
        value = value.numpy()
    if hasattr(value, "item") and getattr(value, "size", 0) == 1:
        return value.item()
    raise ConfigurationError(
        f"{what} is a {type(value).__module__}.{type(value).__name__}; expected a number, as a "
        f"PS cannot build anything else. {WAYS_OUT}"
    )


def _where(names: Sequence[str], variables: Sequence[Any], rule: Any) -> tuple[str, ...]:
    return tuple(name for name, variable in zip(names, variables, strict=True) if rule(variable))


def _decays(optimizer: Any, variable: Any) -> bool:
    """Return whether a rule about weight decay leaves this variable in.

    Keras matches its names against TensorFlow's name of the variable, but in Muon against Keras'.
    """
    import keras

    by_keras = isinstance(optimizer, keras.optimizers.Muon)
    return bool(optimizer._use_weight_decay(variable if by_keras else variable.value))


def _is_by_adamw(optimizer: Any, variable: Any) -> bool:
    """Return whether a rule of a Muon, other than about dimensions, leaves this one to AdamW."""
    if not hasattr(optimizer, "exclude_layers") or len(variable.shape) != 2:
        return False
    return bool(optimizer._should_use_adamw(variable))


def build_optimizer(described: Described, by_adamw: str = "") -> Any:
    """Build a Keras optimizer that steps with a rate which is assigned to it.

    Args:
        described: From anybody.
        by_adamw: Prefix of the names of variables that a Muon leaves to AdamW; none: of no one.

    Raises:
        ConfigurationError: It is not on the allow-list, or Keras refuses it.
    """
    import keras

    allow_list.check_optimizer(described)
    config = {**described.config, "learning_rate": 0.0}
    if described.name == "Muon":
        config |= {"exclude_embeddings": False, "exclude_layers": [f"^{by_adamw}"] * bool(by_adamw)}
    return _build(getattr(keras.optimizers, described.name), config)


def build_schedule(described: Described) -> Any:
    """Build a schedule of learning rates; a function of the step.

    Raises:
        ConfigurationError: It is not on the allow-list, or Keras refuses it.
    """
    import keras

    allow_list.check_schedule(described)
    return _build(getattr(keras.optimizers.schedules, described.name), described.config)


def build_constraint(described: Described) -> Any:
    """Build a constraint of a variable.

    Raises:
        ConfigurationError: It is not on the allow-list, or Keras refuses it.
    """
    import keras

    allow_list.check_constraint(described)
    return _build(getattr(keras.constraints, described.name), described.config)


def _build(made: Any, config: Mapping[str, Any]) -> Any:
    try:
        return made(**config)
    except (ValueError, TypeError) as error:
        raise ConfigurationError(
            f"Keras refuses {made.__name__} with these arguments: {error!s:.300}"
        ) from error
