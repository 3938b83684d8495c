"""Computes exact metrics over a whole test set from sums over its batches.

A mean of the batches' means would depend on the split of the test set into batches, but sums over
all examples do not. The sums over examples are float64, in which counts are exact. Only the
functions of the module `scores` import TensorFlow, so that flags can read the tasks without
TensorFlow.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from thinwire.ops.types import ConfigurationError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: Name of a quantity -> sum of the quantity over all test examples, a float64 array of any shape.
Sums = Mapping[str, "NDArray[np.float64]"]
#: Number of largest outputs among which top-5 accuracy looks for the correct class.
_TOP = 5


@dataclasses.dataclass(frozen=True)
class ScoreGroup:
    """Metrics that share sums over the examples of a test set, from which they are computed.

    Attributes:
        sums: Function of (labels [B, ...], outputs [B, ...], loss) that returns name -> sum over a
            batch, for use inside a tf.function. The argument `loss` is the task's Keras loss.
        values: Function of the sums over all test examples that returns name -> metric.
    """

    sums: Callable[[Any, Any, Any], Mapping[str, Any]]
    values: Callable[[Sums], dict[str, float]]


def _class_sums(labels: Any, outputs: Any, loss: Any) -> dict[str, Any]:
    import tensorflow as tf

    if outputs.shape.rank != 2 or outputs.shape[-1] == 1:
        raise ConfigurationError(
            f"The model gives outputs of shape {outputs.shape}; expected one value per class, "
            "[n, classes], with at least two classes. Choose the --task that fits the outputs."
        )
    answers = tf.argmax(outputs, axis=-1, output_type=tf.int64)
    return {"right": _total(answers == tf.cast(labels, tf.int64)), "all": _size(labels)}


def _accuracy(sums: Sums) -> dict[str, float]:
    return {"accuracy": _ratio(sums["right"], sums["all"])}


#: Metrics of classification tasks: labels [B] int32, outputs [B, classes].
CLASSES = ScoreGroup(_class_sums, _accuracy)


def _top5_sums(labels: Any, outputs: Any, loss: Any) -> dict[str, Any]:
    import tensorflow as tf

    if outputs.shape[-1] <= _TOP:
        raise ConfigurationError(
            f"--top5: the model has {outputs.shape[-1]} classes; expected more than {_TOP} "
            "classes. Leave --top5 out."
        )
    classes, values = tf.cast(labels, tf.int64), tf.cast(outputs, tf.float32)
    return {"right": _total(tf.math.in_top_k(classes, values, _TOP)), "all": _size(labels)}


#: Top-5 accuracy, for more than five classes: labels [B] int32, outputs [B, classes].
TOP5 = ScoreGroup(_top5_sums, lambda sums: {"top5_accuracy": _ratio(sums["right"], sums["all"])})


def _token_sums(labels: Any, outputs: Any, loss: Any) -> dict[str, Any]:
    import tensorflow as tf

    if outputs.shape.rank != 3:
        raise ConfigurationError(
            f"The model gives outputs of shape {outputs.shape}; expected one value per token and "
            "word of the vocabulary, [n, tokens, words]."
        )
    answers = tf.argmax(outputs, axis=-1, output_type=tf.int64)
    return {
        "right": _total(answers == tf.cast(labels, tf.int64)),
        "entropy": _total(loss.call(labels, outputs)),
        "all": _size(labels),
    }


def _token_values(sums: Sums) -> dict[str, float]:
    entropy = _ratio(sums["entropy"], sums["all"])
    # exp(709.8) exceeds the largest float64, and math.exp would raise OverflowError.
    perplexity = math.exp(entropy) if entropy < 700 else math.inf if entropy > 0 else math.nan
    return {"perplexity": perplexity, **_accuracy(sums)}


#: Metrics of token models: labels [B, T] int32, outputs [B, T, words].
TOKENS = ScoreGroup(_token_sums, _token_values)


def _number_sums(labels: Any, outputs: Any, loss: Any) -> dict[str, Any]:
    import tensorflow as tf

    targets, predictions = tf.cast(labels, tf.float64), tf.cast(outputs, tf.float64)
    return {
        "absolute": tf.reduce_sum(tf.abs(predictions - targets)),
        "squared": tf.reduce_sum(tf.square(predictions - targets)),
        "label": tf.reduce_sum(targets, axis=0),  # [...], a sum over examples for each output
        "label_squared": tf.reduce_sum(tf.square(targets), axis=0),
        "rows": tf.cast(tf.shape(labels)[0], tf.float64),
        "all": _size(labels),
    }


def _number_values(sums: Sums) -> dict[str, float]:
    import numpy as np

    variation = np.sum(sums["label_squared"] - np.square(sums["label"]) / sums["rows"])
    return {
        "mae": _ratio(sums["absolute"], sums["all"]),
        "rmse": math.sqrt(_ratio(sums["squared"], sums["all"])),
        "r2": 1 - _ratio(sums["squared"], variation),
    }


#: Metrics of regression tasks: labels and outputs [B, ...] float32 of the same shape.
NUMBERS = ScoreGroup(_number_sums, _number_values)


def _label_set_sums(labels: Any, outputs: Any, loss: Any) -> dict[str, Any]:
    import tensorflow as tf

    targets = labels > 0.5
    predictions = outputs > (0.0 if loss.from_logits else 0.5)
    hits, right = tf.logical_and(targets, predictions), tf.equal(targets, predictions)
    return {
        "found": tf.reduce_sum(tf.cast(hits, tf.float64), axis=0),  # [labels] true positives
        "wanted": tf.reduce_sum(tf.cast(targets, tf.float64), axis=0),
        "given": tf.reduce_sum(tf.cast(predictions, tf.float64), axis=0),
        "exact": _total(tf.reduce_all(right, axis=-1)),
        "right": _total(right),
        "rows": tf.cast(tf.shape(labels)[0], tf.float64),
        "all": _size(labels),
    }


def _label_set_values(sums: Sums) -> dict[str, float]:
    import numpy as np

    hits, positives = sums["found"], sums["wanted"] + sums["given"]
    f1_by_label = np.divide(2 * hits, positives, out=np.zeros_like(hits), where=positives > 0)
    return {
        "f1": 2 * _ratio(hits.sum(), positives.sum()) if positives.any() else 0.0,
        "f1_macro": float(f1_by_label.mean()),
        "exact_match": _ratio(sums["exact"], sums["rows"]),
        **_accuracy(sums),
    }


#: Metrics of multilabel tasks: labels [B, labels] float32, each 0 or 1; outputs of the same shape.
LABEL_SETS = ScoreGroup(_label_set_sums, _label_set_values)


def _total(values: Any) -> Any:
    import tensorflow as tf

    return tf.reduce_sum(tf.cast(values, tf.float64))


def _size(values: Any) -> Any:
    import tensorflow as tf

    return tf.cast(tf.size(values), tf.float64)


def _ratio(part: Any, whole: Any) -> float:
    return float(part) / float(whole) if whole else math.nan
