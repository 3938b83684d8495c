"""Compiled metrics that exist before a step is traced.

Keras creates the metrics that `compile` was given by name within the first step. TensorFlow throws
a trace away that creates variables, and makes it a second time, which takes as long as the first.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras.src.models.functional import Functional

from thinwire.script.keras.plan import before_first_step


def create_before_trace(model: Any) -> None:
    """Let the next step of a model find its metrics, where it is known what Keras would create.

    Args:
        model: Compiled, with Keras' own train_step and a function that calls it.
    """
    metrics = getattr(model, "_compile_metrics", None)
    if metrics is None or metrics.built or model.run_eagerly or not _is_usual(model):
        return
    before_first_step(model, lambda data_spec: _create(model, metrics, data_spec))


def _is_usual(model: Any) -> bool:
    """Return whether Keras' own code calls a model with one output and updates its metrics."""
    call = getattr(model.call, "__func__", None)
    compute = getattr(model.compute_metrics, "__func__", None)
    if call not in (keras.Sequential.call, Functional.call):
        return False
    if compute is not keras.Model.compute_metrics:
        return False
    outputs: Any = getattr(model, "outputs", None)
    return bool(outputs) and len(outputs) == 1 and outputs[0].shape[-1:] not in ((), (None,))


def _create(model: Any, metrics: Any, data_spec: Any) -> None:
    """Create the metrics, whose kinds follow from the shapes of the labels and of the output."""
    _, labels, _ = keras.utils.unpack_x_y_sample_weight(data_spec)
    if not metrics.built and isinstance(labels, tf.TensorSpec) and labels.shape.rank:
        metrics.build(labels, model.outputs[0])
