"""What of a compiled Keras model a parameter server can stand in for, and what not."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import keras

from ops.dc_asgd import DcAsgd
from ops.methods import Method
from ops.server_update import keras_optimizer
from ops.types import ConfigurationError

#: Setting of a Keras optimizer -> what does the same here.
_INSTEAD = {
    "momentum": "mode dgs or dgc, whose momentum it then is; or `momentum` for all nodes",
    "weight_decay": "`worker_weight_decay` for the worker",
    "global_clipnorm": "`clip_norm` for the worker",
    "clipnorm": "`clip_norm` for the worker, which clips all gradients together",
}
_FREE = ("name", "learning_rate")


def momentum_of(model: keras.Model) -> float | None:
    """Return the momentum that a compiled model's SGD asks for, if any."""
    optimizer = getattr(model, "optimizer", None)
    if not isinstance(optimizer, keras.optimizers.SGD) or not optimizer.momentum:
        return None
    return float(optimizer.momentum)


def rate_of(optimizer: Any) -> float:
    """Return the learning rate that a compiled optimizer has now."""
    return float(keras.ops.convert_to_numpy(optimizer.learning_rate))


def check_model(model: Any) -> None:
    """Refuse what cannot be trained by exchanges at all.

    Raises:
        ConfigurationError: Another backend, no compiled model, several replicas, or loss scaling.
    """
    if keras.backend.backend() != "tensorflow":
        raise ConfigurationError(
            f"Keras runs on {keras.backend.backend()}; expected KERAS_BACKEND=tensorflow."
        )
    if getattr(model, "optimizer", None) is None:
        raise ConfigurationError(
            "the model is not compiled with an optimizer; call model.compile(...) first."
        )
    if isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer):
        raise ConfigurationError(
            "the model scales its loss, as mixed_float16 does; expected float32 or mixed_bfloat16."
        )
    replicas = model.distribute_strategy.num_replicas_in_sync
    if replicas > 1:
        raise ConfigurationError(
            f"the model has {replicas} replicas by tf.distribute; expected one device a worker. "
            "Start a worker for each."
        )


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
    asked = optimizer.get_config()
    if not isinstance(asked["learning_rate"], float):
        raise ConfigurationError(
            "the optimizer has a learning-rate schedule, which would count the steps of this "
            "worker alone; expected a number. Give the server --lr_schedule, or fit the callback "
            "LearningRateScheduler."
        )
    if takes_momentum:
        asked["momentum"] = 0.0
    plain, server = keras.optimizers.SGD(), keras_optimizer(method.server)
    for known in (plain, server):
        if type(known) is type(optimizer) and not _differences(asked, known.get_config()):
            return
    like = server if type(server) is type(optimizer) else plain
    if type(like) is not type(optimizer):
        raise ConfigurationError(
            f"the model is compiled with {type(optimizer).__name__}, but the server steps with "
            f"{type(server).__name__}; compile it with that or with SGD, or give all nodes a "
            "`server_optimizer`."
        )
    name = _differences(asked, like.get_config())[0]
    instead = f"; instead there is {_INSTEAD[name]}" if name in _INSTEAD else ""
    raise ConfigurationError(
        f"the optimizer's {name}={asked[name]!r} would have no effect: the server steps. Expected "
        f"{like.get_config()[name]!r} here{instead}."
    )


def check_rate_change(rate: float, method: Method) -> None:
    """Refuse a learning rate that this worker's gradients cannot be scaled to.

    Raises:
        ConfigurationError: Not a rate, or the method does not step in proportion to gradients.
    """
    if not 0 <= rate < math.inf:
        raise ConfigurationError(f"learning_rate={rate:g}: expected a finite number from 0 on.")
    blind = (
        (method.server.optimizer == "adam", "--server_optimizer=adam"),
        (isinstance(method.weighting, DcAsgd), "--weighting=dc_asgd"),
        (method.takes_local_steps and method.local.optimizer == "adam", "--local_optimizer=adam"),
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
    """Refuse constraints, which the server does not know of. Raises ConfigurationError."""
    for variable in variables:
        if variable.constraint is not None:
            raise ConfigurationError(
                f"{variable.path} has a constraint, which the server would not keep; expected "
                "none. Leave it out of the layer, or the variable out of W_global."
            )


def _differences(asked: dict[str, Any], known: dict[str, Any]) -> list[str]:
    return [name for name in asked if name not in _FREE and asked[name] != known.get(name)]
