"""Creates a model's compiled metrics before TensorFlow traces the first step.

A script may pass metrics to `compile` by name; Keras creates these metrics only within the first
step. TensorFlow discards a trace that creates variables and traces the step again, which doubles
the tracing time.
"""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras.src.models.functional import Functional

from thinwire.script.keras.plan import before_first_step


def create_before_trace(model: Any) -> None:
    """Create a model's metrics before its next step, if their classes can be predicted.

    Args:
        model: Compiled Keras model with Keras' own train_step.
    """
    metrics = getattr(model, "_compile_metrics", None)
    if metrics is None or metrics.built or model.run_eagerly or not _is_usual(model):
        return
    before_first_step(model, lambda data_spec: _create(model, metrics, data_spec))


def _is_usual(model: Any) -> bool:
    """Return True if a model has one output and uses Keras' own `call` and `compute_metrics`."""
    call = getattr(model.call, "__func__", None)
    compute = getattr(model.compute_metrics, "__func__", None)
    if call not in (keras.Sequential.call, Functional.call):
        return False
    if compute is not keras.Model.compute_metrics:
        return False
    outputs: Any = getattr(model, "outputs", None)
    return bool(outputs) and len(outputs) == 1 and outputs[0].shape[-1:] not in ((), (None,))


def _create(model: Any, metrics: Any, data_spec: Any) -> None:
    """Create compiled metrics with classes that fit the shapes of the labels and the output."""
    _, labels, _ = keras.utils.unpack_x_y_sample_weight(data_spec)
    if not metrics.built and isinstance(labels, tf.TensorSpec) and labels.shape.rank:
        metrics.build(labels, model.outputs[0])
