"""What of a script's model cannot be trained by exchanges, refused before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import keras

from thinwire.models.flat_model import SharedModel
from thinwire.ops.methods.method import Method
from thinwire.ops.offer import Offer
from thinwire.ops.optimizers.server import keras_optimizer
from thinwire.ops.sharding.w_global import W_global
from thinwire.ops.types import ConfigurationError
from thinwire.ops.weighting.dc_asgd import DcAsgd
from thinwire.script.data.place import WorkerPlace
from thinwire.script.keras.plan import named

#: Setting of a Keras optimizer -> what does the same here.
_INSTEAD = {
    "momentum": "mode dgs or dgc, whose momentum it then is; or `momentum` for all nodes",
    "weight_decay": "`worker_weight_decay` for the worker",
    "global_clipnorm": "`clip_norm` for the worker",
    "clipnorm": "`clip_norm` for the worker, which clips all gradients together",
}
_FREE = ("name", "learning_rate")

#: Optimizers whose steps are in proportion to gradients, or to which the script itself gives rates.
_IN_PROPORTION = ("sgd", "momentum", "script")


def check_model(model: Any) -> None:
    """Refuse what is no Keras model. Raises ConfigurationError."""
    if not isinstance(model, keras.Model):
        raise ConfigurationError(
            f"distribute() was given a {type(model).__name__}; expected a keras.Model."
        )


def check_exchanges(model: Any) -> None:
    """Refuse a model that cannot be trained by exchanges at all.

    Raises:
        ConfigurationError: Another backend, or variables that tf.distribute has made.
    """
    if keras.backend.backend() != "tensorflow":
        raise ConfigurationError(
            f"Keras runs on {keras.backend.backend()}; expected KERAS_BACKEND=tensorflow."
        )
    strategy = getattr(model, "_distribute_strategy", None)
    if strategy is not None:
        raise ConfigurationError(
            f"{model.name!r} was made in the scope of a {type(strategy).__name__} of tf.distribute "
            f"({strategy.num_replicas_in_sync} replicas); expected none: a worker trains on one "
            "device, and the exchange takes the strategy's place. Leave `with strategy.scope():` "
            "out, and start a worker for each device."
        )


def check_states(model: Any, place: WorkerPlace) -> None:
    """Refuse stateful layers where the workers share the rows of a data set.

    Raises:
        ConfigurationError: The model has one.
    """
    layers = model._flatten_layers() if place.is_shared else ()
    for layer in layers:
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise ConfigurationError(
                f"{layer.path} of {model.name!r} is stateful: each row of a batch goes on where "
                "that row of the batch before has ended, and the parts of a data set that is "
                'shared by rows do not. Give distribute() shard="off" (or --shard=off), and let '
                "the script give each worker sequences of its own, by thinwire.worker_id() and "
                "thinwire.num_workers()."
            )


def momentum_of(optimizer: Any) -> float | None:
    """Return the momentum of a compiled optimizer, if it is SGD and has one."""
    if not isinstance(optimizer, keras.optimizers.SGD) or not optimizer.momentum:
        return None
    return float(optimizer.momentum)


def check_optimizer(optimizer: Any, method: Method, takes_momentum: bool) -> None:
    """Refuse an optimizer that does what neither the server nor the method will do.

    Plain SGD stands for whatever they do; else it must be what the server steps with.

    Args:
        optimizer: Compiled.
        method: Of the run.
        takes_momentum: Whether the method has taken over the optimizer's momentum.

    Raises:
        ConfigurationError: A setting that would have no effect.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ConfigurationError(
            "the model scales its loss, as mixed_float16 does, and this server's model comes from "
            "flags; expected float32 or mixed_bfloat16. Start the script with `thinwire run`."
        )
    compiled = optimizer.get_config()
    if not isinstance(compiled["learning_rate"], float):
        raise ConfigurationError(
            "the optimizer has a learning-rate schedule, which would count the steps of this "
            "worker alone; expected a number. Start the script with `thinwire run`, give the "
            "server --lr_schedule, or fit the callback LearningRateScheduler."
        )
    if takes_momentum:
        compiled["momentum"] = 0.0
    plain = keras.optimizers.SGD()  # with local steps that of the server is no one's of gradients
    server = plain if method.takes_local_steps else keras_optimizer(method.server)
    for known in (plain, server):
        if type(known) is type(optimizer) and not _differences(compiled, known.get_config()):
            return
    like = server if type(server) is type(optimizer) else plain
    if type(like) is not type(optimizer):
        raise ConfigurationError(
            f"the model is compiled with {type(optimizer).__name__}, but the server steps with "
            f"{type(server).__name__}. Start the script with `thinwire run`, whose server steps "
            "with what the script compiles; or compile it with SGD, or give all nodes a "
            "`server_optimizer`."
        )
    name = _differences(compiled, like.get_config())[0]
    instead = f"; instead there is {_INSTEAD[name]}" if name in _INSTEAD else ""
    raise ConfigurationError(
        f"the optimizer's {name}={compiled[name]!r} would have no effect: the server steps. "
        f"Expected {like.get_config()[name]!r} here{instead}. Or start the script with "
        "`thinwire run`, whose server steps with what the script compiles."
    )


def check_rate_change(rate: float, method: Method) -> None:
    """Refuse a learning rate that this worker's gradients cannot be scaled to.

    Raises:
        ConfigurationError: Not a rate, or the method does not step in proportion to gradients.
    """
    if not 0 <= rate < math.inf:
        raise ConfigurationError(f"learning_rate={rate:g}: expected a finite number from 0 on.")
    blind = (
        (
            method.server.optimizer not in _IN_PROPORTION,
            f"--server_optimizer={method.server.optimizer}",
        ),
        (isinstance(method.weighting, DcAsgd), "--weighting=dc_asgd"),
        (
            method.takes_local_steps and method.local.optimizer not in _IN_PROPORTION,
            f"--local_optimizer={method.local.optimizer}",
        ),
    )
    for is_used, flag in blind:
        if is_used:
            raise ConfigurationError(
                f"learning_rate={rate:g}: a worker changes its own rate by scaling its gradients, "
                f"to which steps are not in proportion with {flag}; expected none of "
                "LearningRateScheduler, ReduceLROnPlateau or the like. Give the server "
                "--lr_schedule."
            )


def check_variables(variables: Iterable[Any]) -> None:
    """Refuse constraints, which a server of flags does not know of. Raises ConfigurationError."""
    for variable in variables:
        if variable.constraint is not None:
            raise ConfigurationError(
                f"{variable.path} has a constraint, which the server would not keep; expected "
                "none. Leave it out of the layer, or the variable out of W_global; or start the "
                "script with `thinwire run`, whose server learns of it."
            )


def check_same_variables(shared: Sequence[Any], stepped: Sequence[Any]) -> None:
    """Refuse variables that would be trained here alone: others of the model than are shared.

    Those that a script leaves out of W_global on purpose are its own affair.

    Raises:
        ConfigurationError: The script has made further ones trainable without a new `compile`.
    """
    known = {id(variable) for variable in shared}
    new = [variable for variable in stepped if id(variable) not in known]
    if new and not W_global:
        raise ConfigurationError(
            f"{new[0].path} and {len(new) - 1} more variables have become trainable since the "
            "model was compiled, and a run shares those that were; expected the same. Compile the "
            "model again after `trainable` has changed, as Keras alone wants it, too."
        )


def refuse_step_alone(
    optimizer: Any, variables: Sequence[Any], shared: Iterable[Any], name: str
) -> None:
    """Refuse an optimizer that steps some of a model's variables without an exchange.

    Args:
        optimizer: Not distributed, or not known at the first step.
        variables: Those that it steps.
        shared: Those that only exchanges may change.
        name: Of the model.

    Raises:
        ConfigurationError: It steps one of these.
    """
    known = {id(each) for each in shared}
    touched = [variable for variable in variables if id(variable) in known]
    if not touched:
        return
    raise ConfigurationError(
        f"{named(optimizer)} steps {touched[0].path} and {len(touched) - 1} more variables of "
        f"{name!r} on this worker alone; expected an optimizer that exchanges. In a "
        "train_step let it step in the first call already, for what steps there is shared; in "
        "a loop of your own write `optimizer = thinwire.distribute(optimizer, model=model)`."
    )


def check_offered_step(
    optimizer: Any, number: int, variables: Sequence[Any], shared: SharedModel, offer: Offer
) -> None:
    """Refuse other variables than those that the PS steps with an optimizer.

    Args:
        optimizer: About to step.
        number: Its own among those of the offer.
        variables: Those that it is given.
        shared: The model.
        offer: As the PS has it.

    Raises:
        ConfigurationError: Those of another optimizer, or not all of its own.
    """
    unused, given = set(offer.unused), {id(variable) for variable in variables}
    for owner, numbers in enumerate(offer.groups()):
        for each in numbers:
            variable, path = shared.variables[each], shared.spec.tensors[each].path
            is_given = id(variable) in given
            if is_given == (owner == number) or (not is_given and path in unused):
                continue
            what = "steps" if is_given else "does not step"
            raise ConfigurationError(
                f"{named(optimizer)} {what} {path}, and the PS steps with it what was "
                "known of it at the first step; expected the same variables in each step. "
                "Distribute each optimizer with the model that it steps, as in "
                "thinwire.distribute(optimizer, model=generator), or build it before the loop: "
                "optimizer.build(generator.trainable_variables)."
            )


def _differences(compiled: dict[str, Any], known: dict[str, Any]) -> list[str]:
    return [name for name in compiled if name not in _FREE and compiled[name] != known.get(name)]
