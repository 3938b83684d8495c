"""Describes a compiled model as text, to compare a resumed run with the original run."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterable, Mapping
from typing import Any

from thinwire.ops.offer import Offer
from thinwire.runtime.run.program import digest_of_bytes
from thinwire.script.keras.plan import StepPlan

#: Constructor arguments of Keras objects that do not change the training result.
_NAMES = ("name", "dtype", "module", "registered_name", "build_config")
_RATE = "learning_rate"
#: Fields of an offer (the description of a model for the PS) that are compared between the resumed
#: run and the original run, in addition to the model, the optimizer and the loss.
_OF_OFFER = ("constraints", "loss_scale", "num_examples", "statistics", "unused")


def describe_compiled(
    model: Any, plan: StepPlan, offer: Offer, batch_size: int | None = None
) -> dict[str, str]:
    """Return texts that describe a compiled model, by part ("optimizer", "loss", "model" and more).

    The description of a compiled model contains the learning rate only before the optimizer's first
    step. Training may change the learning rate, and a script that loads its optimizer from a file
    has the changed rate.

    Args:
        model: Keras model, or one of the models that a training loop trains.
        plan: Optimizers of the script, with the variables that each optimizer updates.
        offer: Description of the model that this worker sends to the PS.
        batch_size: Batch size that the script passes to `fit`, in rows; None if unknown.
    """
    description = {"optimizer": " + ".join(_optimizer(step.optimizer) for step in plan.steps)}
    description |= _losses(model)
    signature = [[tensor.path, list(tensor.shape)] for tensor in offer.spec.tensors]
    digest = digest_of_bytes(json.dumps(signature).encode())[:8]
    description["model"] = (
        f"{len(signature)} variables with {offer.spec.num_parameters:,} values (digest {digest})"
    )
    if batch_size:
        description["batch size"] = str(batch_size)
    document = json.loads(offer.to_json())
    return description | {name: json.dumps(document[name]) for name in _OF_OFFER if document[name]}


def _optimizer(optimizer: Any) -> str:
    """Return an optimizer's class and the arguments that differ from their default values.

    >>> import keras
    >>> _optimizer(keras.optimizers.SGD(0.25, momentum=0.5))
    'SGD(learning_rate=0.25, momentum=0.5)'
    """
    inner = getattr(optimizer, "inner_optimizer", None)
    if inner is not None:
        return f"{type(optimizer).__name__}({_optimizer(inner)})"
    known = inspect.signature(type(optimizer).__init__).parameters
    config = {
        name: value
        for name, value in _config(optimizer, known).items()
        if name == _RATE or name not in known or known[name].default != value
    }
    if int(optimizer.iterations) and isinstance(config.get(_RATE), int | float):
        del config[_RATE]
    return f"{type(optimizer).__name__}({_arguments(config)})"


def _config(optimizer: Any, known: Iterable[str]) -> dict[str, Any]:
    """Return an optimizer's arguments, also if its learning-rate schedule has no `get_config`.

    Keras trains with a schedule of the script's own that has no `get_config`, but then Keras'
    `optimizer.get_config` raises NotImplementedError. The schedule's class and its plain
    attributes then stand for the schedule.

    Args:
        optimizer: A Keras optimizer.
        known: Names of the arguments of the optimizer's constructor.
    """
    try:
        return dict(optimizer.get_config())
    except NotImplementedError:
        schedule = optimizer._learning_rate
    plain = {
        name: value
        for name, value in vars(schedule).items()
        if isinstance(value, int | float | str)
    }
    config = {name: getattr(optimizer, name, None) for name in known if name != _RATE}
    return {_RATE: {"class_name": type(schedule).__name__, "config": plain}, **config}


def _losses(model: Any) -> Iterable[tuple[str, str]]:
    """Yield pairs (name, description) of the compiled loss and of its weights, if there are any."""
    loss = getattr(model, "loss", None)
    if loss:
        yield "loss", _described(loss)
    try:
        config = model.get_compile_config() or {}
    except Exception:  # noqa: BLE001 - classes of the script may raise any error
        return
    if config.get("loss_weights"):
        yield "loss weights", _described(config["loss_weights"])


def _described(value: Any) -> str:
    """Describe a value on one line: an object by class and arguments, a function by its name."""
    if isinstance(value, bool | int | str) or value is None:
        return str(value)
    if isinstance(value, float):
        return f"{value:.6g}"  # round to float32, because Keras stores learning rates as float32
    if isinstance(value, Mapping):
        if "class_name" in value and isinstance(value.get("config"), Mapping):
            return f"{value['class_name']}({_arguments(value['config'])})"
        pairs = (f"{name}: {_described(item)}" for name, item in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_described(item) for item in value)}]"
    if hasattr(value, "get_config"):
        try:
            return f"{type(value).__name__}({_arguments(value.get_config())})"
        except Exception:  # noqa: BLE001 - a class of the script may raise any error
            return type(value).__name__
    return str(getattr(value, "__name__", type(value).__name__))


def _arguments(config: Mapping[str, Any]) -> str:
    """Return an object's constructor arguments as ``key=value``, without names and dtypes."""
    shown = (
        f"{name}={_described(value)}"
        for name, value in config.items()
        if name not in _NAMES and value not in (None, False)
    )
    return ", ".join(shown)
