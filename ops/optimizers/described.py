"""Describe a script's compiled optimizer as plain data on a worker, and rebuild it on the PS.

The `get_config` of a Keras optimizer lacks two kinds of settings: variables passed to
`exclude_from_weight_decay`, and rules that match variable paths. The worker has the model's
variables, so the worker evaluates settings that match variables, and sends the paths of the
matching variables. `describe` raises an error for an optimizer that plain data cannot describe. The
error about an optimizer that plain data cannot describe lists training methods whose workers run
the optimizer themselves.

Source: design, section 11, which lists the traps of Keras 3.15.
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

#: Last sentence of an error about an optimizer that a PS cannot build: it lists training methods
#: that avoid the error.
WAYS_OUT = (
    "Use a method whose workers apply the script's optimizer themselves: --method=dgs, "
    "--method=dgc, --method=gd or --method=esync."
)


@dataclasses.dataclass(frozen=True)
class DescribedOptimizer:
    """A script's compiled Keras optimizer as plain data.

    Attributes:
        offer: Description of the optimizer for the parameter server, without a LossScaleOptimizer
            around it.
        loss_scale: Loss scale of the LossScaleOptimizer around the optimizer; None without a
            LossScaleOptimizer.
    """

    offer: OptimizerOffer
    loss_scale: LossScale | None = None


def describe(
    optimizer: keras.optimizers.Optimizer,
    variables: Sequence[keras.Variable],
    clock: str = "batches",
    paths: Sequence[str] = (),
) -> DescribedOptimizer:
    """Describe a compiled Keras optimizer as plain data, with its current argument values.

    Args:
        optimizer: Compiled Keras optimizer of the script, built or not built yet.
        variables: The model's variables that all workers share, in their order on the parameter
            server.
        clock: The argument of the optimizer's learning rate schedule: the number of "batches" of
            the script, or of "steps" of the optimizer.
        paths: Names under which the variables are shared. Empty means the Keras paths of the
            variables.

    Raises:
        ConfigurationError: A parameter server cannot build the optimizer. The message contains the
            optimizer's class and training methods whose workers can run this optimizer.
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
    if name not in allow_list.OPTIMIZERS or not _is_of_keras(optimizer):
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


def _is_of_keras(optimizer: Any) -> bool:
    """Return True if an optimizer's class is the class of keras.optimizers with the same name.

    On PyTorch, Keras makes an object of a subclass with the same name, from another Keras module.
    """
    import keras

    made = type(optimizer)
    is_own = made.__module__.partition(".")[0] == "keras"
    return is_own and issubclass(made, getattr(keras.optimizers, made.__name__))


def describe_constraints(
    variables: Sequence[keras.Variable], paths: Sequence[str] = ()
) -> dict[str, Described]:
    """Return variable path -> constraint, for the variables that have a Keras constraint.

    Raises:
        ConfigurationError: A parameter server cannot build one of the Keras constraints.
    """
    import keras

    constraints = {}
    for path, variable in zip(paths or [v.path for v in variables], variables, strict=True):
        constraint = variable.constraint
        if constraint is None:
            continue
        constraints[path] = _described(
            constraint,
            keras.constraints,
            allow_list.CONSTRAINTS,
            f"the constraint of {path} is",
            "expected one of",
        )
        allow_list.check_constraint(constraints[path])
    return constraints


def own_schedule(optimizer: Any) -> Any:
    """Return an optimizer's learning rate schedule if the script defines the schedule's class.

    A parameter server cannot build a learning rate schedule whose class a script defines. With a
    learning rate schedule that the script defines, the worker evaluates the schedule and sends the
    learning rate with each push.
    """
    import keras

    schedules, rate = keras.optimizers.schedules, optimizer._learning_rate
    name = type(rate).__name__
    if not isinstance(rate, schedules.LearningRateSchedule):
        return None
    is_known = name in allow_list.SCHEDULES and type(rate) is getattr(schedules, name)
    return None if is_known else rate


def _rate(optimizer: Any, name: str) -> Any:
    """Return the optimizer's learning rate: a number, or a schedule's class name and arguments."""
    import keras

    rate = optimizer._learning_rate
    if own_schedule(optimizer) is not None:
        # 0.0 is a placeholder, because each push contains the learning rate
        return 0.0
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
    """Return the class name and the arguments of a learning rate schedule or constraint.

    Args:
        made: The Keras object to describe: a learning rate schedule or a constraint.
        module: Keras module that must contain the class of the schedule or constraint.
        known: Keras class name -> argument names, for the classes that a parameter server builds.
        what: Beginning of the error message about an object that a parameter server cannot build.
        expected: Words that precede the list of accepted Keras classes in the error message.

    Raises:
        ConfigurationError: A parameter server cannot build the schedule or constraint.
    """
    name = type(made).__name__
    if name not in known or type(made) is not getattr(module, name):
        raise ConfigurationError(
            f"{what} a {type(made).__module__}.{name}, which a PS cannot build; {expected} "
            f"{', '.join(known)} of {module.__name__}. {WAYS_OUT}"
        )
    arguments = made.get_config()
    config = {key: _plain(arguments[key], f"{name}({key})") for key in known[name]}
    return Described(name, config)


def _plain(value: Any, what: str) -> Any:
    """Return a value as a JSON type: a number, a string, a boolean, None, or a list.

    Raises:
        ConfigurationError: The value, for example a function or a learning rate schedule, has no
            JSON type.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(element, what) for element in value]
    if hasattr(value, "shape"):  # a variable or tensor of Keras' backend, or a numpy array
        import keras

        value = keras.ops.convert_to_numpy(value)
    if hasattr(value, "item") and getattr(value, "size", 0) == 1:
        return value.item()
    raise ConfigurationError(
        f"{what} is a {type(value).__module__}.{type(value).__name__}; expected a number, because "
        f"a PS cannot build other objects. {WAYS_OUT}"
    )


def _where(names: Sequence[str], variables: Sequence[Any], rule: Any) -> tuple[str, ...]:
    return tuple(name for name, variable in zip(names, variables, strict=True) if rule(variable))


def _decays(optimizer: Any, variable: Any) -> bool:
    """Return True if the optimizer applies weight decay to the given variable."""
    import keras

    # On TensorFlow, Keras matches the names from `exclude_from_weight_decay` against the name of
    # the TensorFlow variable, which contains the names of layers. On other backends, and for the
    # optimizer Muon, Keras matches these names against the name of the Keras variable.
    is_native = keras.backend.backend() == "tensorflow"
    by_keras = isinstance(optimizer, keras.optimizers.Muon) or not is_native
    return bool(optimizer._use_weight_decay(variable if by_keras else variable.value))


def _is_by_adamw(optimizer: Any, variable: Any) -> bool:
    """Return True if a path rule of a Muon optimizer selects AdamW for the given variable.

    The optimizer Muon uses AdamW for variables that path rules select and for every variable that
    is not two-dimensional. The worker does not report variables that Muon steps with AdamW because
    of their shape, because the parameter server knows the shapes of variables.
    """
    if not hasattr(optimizer, "exclude_layers") or len(variable.shape) != 2:
        return False
    return bool(optimizer._should_use_adamw(variable))


def build_optimizer(described: Described, by_adamw: str = "") -> Any:
    """Build a Keras optimizer with learning rate 0; the caller sets the rate before each step.

    Args:
        described: Class and arguments of the Keras optimizer, from an untrusted client.
        by_adamw: Name prefix of the variables for which the optimizer Muon uses AdamW. Empty means
            that no variable name selects AdamW.

    Raises:
        ConfigurationError: The optimizer is not on the allow-list, or Keras rejects its arguments.
    """
    import keras

    allow_list.check_optimizer(described)
    config = {**described.config, "learning_rate": 0.0}
    if described.name == "Muon":
        config |= {"exclude_embeddings": False, "exclude_layers": [f"^{by_adamw}"] * bool(by_adamw)}
    return _build(getattr(keras.optimizers, described.name), config)


def build_constraint(described: Described) -> Any:
    """Build the Keras constraint of a variable from its description.

    Raises:
        ConfigurationError: The constraint is not on the allow-list, or Keras rejects its arguments.
    """
    import keras

    allow_list.check_constraint(described)
    return _build(getattr(keras.constraints, described.name), described.config)


def _build(made: Any, config: Mapping[str, Any]) -> Any:
    try:
        return made(**config)
    except (ValueError, TypeError) as error:
        raise ConfigurationError(
            f"Keras cannot build {made.__name__} from the arguments in its config: {error!s:.300}"
        ) from error
