"""Rejects models and optimizers that cannot be trained in a run, before the run starts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import keras

from thinwire.ops.methods.method import Method
from thinwire.ops.optimizers.server import keras_optimizer
from thinwire.ops.sharding.w_global import W_global
from thinwire.ops.types import ConfigurationError
from thinwire.ops.weighting.dc_asgd import DcAsgd
from thinwire.script.backends.present import backend
from thinwire.script.data.place import WorkerPlace
from thinwire.script.gradient_sgd import differing_settings

#: Maps a setting of a Keras optimizer to a text that names the Thinwire setting with the same
#: effect.
_INSTEAD = {
    "momentum": "mode dgs or dgc, which apply the momentum; or `momentum` for all nodes",
    "weight_decay": "`worker_weight_decay` for the worker",
    "global_clipnorm": "`clip_norm` for the worker",
    "clipnorm": "`clip_norm` for the worker, which clips all gradients together",
}
#: Names of Thinwire optimizers with steps proportional to the gradients, and "script" (the script
#: sets the rate itself). For these, scaling a worker's gradients has the effect of another learning
#: rate.
_IN_PROPORTION = ("sgd", "momentum", "script")


def check_model(model: Any) -> None:
    """Raise a ConfigurationError if an object is not a Keras model."""
    if not isinstance(model, keras.Model):
        raise ConfigurationError(
            f"distribute() received type {type(model).__name__}; expected a keras.Model."
        )


def check_exchanges(model: Any) -> None:
    """Reject a Keras model that cannot be trained in a distributed run.

    Raises:
        ConfigurationError: Keras uses a backend on which Thinwire does not train, a strategy of
            tf.distribute created the model's variables, or the model is on several devices.
    """
    backend().check_model(model)
    strategy = getattr(model, "_distribute_strategy", None)
    if strategy is not None:
        raise ConfigurationError(
            f"{model.name!r} was created in the scope of a {type(strategy).__name__} of "
            f"tf.distribute ({strategy.num_replicas_in_sync} replicas); expected no strategy: a "
            "worker trains on one device, and Thinwire exchanges the gradients between the "
            "workers. Remove `with strategy.scope():`, and start one worker for each device."
        )


def check_states(model: Any, place: WorkerPlace) -> None:
    """Reject a model with stateful layers if the workers divide the rows of a data set.

    Args:
        model: Keras model that the script trains.
        place: This worker's number in the run, and the rules by which workers divide the data set.

    Raises:
        ConfigurationError: The model has a stateful layer, and the workers divide the rows of the
            data set.
    """
    layers = model._flatten_layers() if place.is_shared else ()
    for layer in layers:
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise ConfigurationError(
                f"{layer.path} of {model.name!r} is stateful: each row of a batch must continue "
                "the same row of the previous batch, but the workers divide the rows of the data "
                'set. Give distribute() shard="off" (or --shard=off), and let the script select '
                "the sequences of each worker with thinwire.worker_id() and "
                "thinwire.num_workers()."
            )


def momentum_of(optimizer: Any) -> float | None:
    """Return the momentum of a compiled SGD; None for other optimizers and for momentum 0."""
    if not isinstance(optimizer, keras.optimizers.SGD) or not optimizer.momentum:
        return None
    return float(optimizer.momentum)


def sgd_momentum(optimizer: Any) -> float:
    """Return the momentum of a plain SGD, which a method may apply; 0 for other optimizers."""
    if type(optimizer) is not keras.optimizers.SGD or optimizer.nesterov:
        return 0.0
    return float(optimizer.momentum)


def check_optimizer(optimizer: Any, method: Method, takes_momentum: bool) -> None:
    """Reject a compiled optimizer if settings have no effect because the server updates weights.

    A compiled optimizer that is plain SGD is always accepted. A compiled optimizer other than plain
    SGD must equal the server's optimizer.

    Args:
        optimizer: Optimizer with which the script has compiled its model.
        method: Training method of the run.
        takes_momentum: True if the training method applies the momentum of the compiled optimizer
            itself.

    Raises:
        ConfigurationError: A setting of the compiled optimizer would have no effect in the run.
    """
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ConfigurationError(
            "the model scales its loss, as with mixed_float16, but a parameter server whose flags "
            "define the model does not support loss scaling; expected float32 or mixed_bfloat16. "
            "Or start the script with `thinwire run`, whose server supports loss scaling."
        )
    compiled = optimizer.get_config()
    if not isinstance(compiled["learning_rate"], float):
        raise ConfigurationError(
            "the optimizer has a learning-rate schedule, which would count only the steps of this "
            "worker; expected a number as the learning rate. Start the script with `thinwire "
            "run`, give the server --lr_schedule, or fit the callback LearningRateScheduler."
        )
    if takes_momentum:
        compiled["momentum"] = 0.0
    # If workers take local steps, the server's optimizer applies changes of weights, not gradients.
    # The server's optimizer is then no counterpart of a compiled optimizer, so only plain SGD is
    # accepted.
    plain = keras.optimizers.SGD()
    server = plain
    if not method.takes_local_steps:
        server = keras_optimizer(method.server, method.choices["server_optimizer"])
    alike = [known for known in (server, plain) if type(known) is type(optimizer)]
    if not alike:
        raise ConfigurationError(
            f"the model is compiled with {type(optimizer).__name__}, but the parameter server "
            f"applies updates with {type(server).__name__}. Start the script with `thinwire run`, "
            "whose server uses the compiled optimizer; or compile the model with SGD, or set "
            "`server_optimizer` on all nodes."
        )
    known = [like.get_config() for like in alike]
    differences = [differing_settings(compiled, config) for config in known]
    if not all(differences):
        return
    name = differences[0][0]
    instead = f"; to set it in the run, use {_INSTEAD[name]}" if name in _INSTEAD else ""
    raise ConfigurationError(
        f"the optimizer's {name}={compiled[name]!r} would have no effect, because the parameter "
        f"server applies the updates; expected {name}={known[0][name]!r}{instead}. Or "
        "start the script with `thinwire run`, whose server uses the compiled optimizer."
    )


def check_rate_change(rate: float, method: Method) -> None:
    """Reject a learning rate that this worker cannot achieve by scaling its gradients.

    Args:
        rate: Learning rate that the script has set on its optimizer.
        method: Training method of the run.

    Raises:
        ConfigurationError: The learning rate is negative or not finite, or the training method's
            steps are not proportional to gradients.
    """
    if not 0 <= rate < math.inf:
        raise ConfigurationError(f"learning_rate={rate:g}: expected a finite number >= 0.")
    of_server, of_workers = method.choices["server_optimizer"], method.local.optimizer
    blind = {
        f"--server_optimizer={of_server}": of_server not in _IN_PROPORTION,
        "--weighting=dc_asgd": isinstance(method.weighting, DcAsgd),
        f"--local_optimizer={of_workers}": method.takes_local_steps
        and of_workers not in _IN_PROPORTION,
    }
    for flag in (flag for flag, is_used in blind.items() if is_used):
        raise ConfigurationError(
            f"learning_rate={rate:g}: a worker changes its rate by scaling its gradients, but "
            f"with {flag} steps are not proportional to gradients. Remove the callback that "
            "sets the rate (LearningRateScheduler, ReduceLROnPlateau), and give the server "
            "--lr_schedule."
        )


def check_variables(variables: Iterable[Any]) -> None:
    """Reject variables with a Keras constraint, which a server ignores if flags define its model.

    Raises:
        ConfigurationError: One of the variables has a Keras constraint.
    """
    for variable in variables:
        if variable.constraint is not None:
            raise ConfigurationError(
                f"{variable.path} has a constraint, which the server would not apply; expected no "
                "constraint. Remove the constraint from the layer, or the variable from W_global; "
                "or start the script with `thinwire run`, whose server receives constraints."
            )


def check_same_variables(shared: Sequence[Any], stepped: Sequence[Any]) -> None:
    """Reject trainable variables that workers do not share: only this worker would train them.

    If the model's W_global is set, the script has chosen the shared variables itself, and no
    variable is rejected.

    Args:
        shared: Variables that all workers of the run train.
        stepped: Variables that the model's optimizers update.

    Raises:
        ConfigurationError: The script made variables trainable but did not compile the model again.
    """
    known = {id(variable) for variable in shared}
    new = [variable for variable in stepped if id(variable) not in known]
    if new and not W_global:
        raise ConfigurationError(
            f"{new[0].path} and {len(new) - 1} more variables have become trainable since the "
            "model was compiled; expected the same trainable variables as when it was compiled, "
            "because the run shares only these variables. Compile the model again after changing "
            "`trainable`, as Keras requires too."
        )
