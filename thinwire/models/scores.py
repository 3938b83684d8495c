"""Metrics over a whole test set, exactly: sums over batches, then values of the sums.

A mean of batches' means would depend on how the set is cut; sums do not. They are float64, in which
counts are exact. TensorFlow is imported where it is used, so that flags can read the tasks.
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

#: Sums by name, float64 of any shape, over all examples.
Sums = Mapping[str, "NDArray[np.float64]"]
#: The right answer is looked for among this many best answers of the model.
_TOP = 5


@dataclasses.dataclass(frozen=True)
class ScoreGroup:
    """Metrics that are computed together.

    Attributes:
        sums: (labels [B, ...], outputs [B, ...], loss) -> tensors by name, for use inside a
            tf.function; the loss is the task's own, a Keras loss.
        values: Sums over all examples -> metrics by name.
    """

    sums: Callable[[Any, Any, Any], Mapping[str, Any]]
    values: Callable[[Sums], dict[str, float]]


def _class_sums(labels: Any, outputs: Any, loss: Any) -> dict[str, Any]:
    import tensorflow as tf

    del loss
    if outputs.shape.rank != 2 or outputs.shape[-1] == 1:
        raise ConfigurationError(
            f"The model gives outputs of shape {outputs.shape}; expected one value per class, "
            "[n, classes], with at least two classes. Of another --task it may give others."
        )
    answers = tf.argmax(outputs, axis=-1, output_type=tf.int64)
    return {"right": _total(answers == tf.cast(labels, tf.int64)), "all": _size(labels)}


def _accuracy(sums: Sums) -> dict[str, float]:
    return {"accuracy": _ratio(sums["right"], sums["all"])}


#: labels [B] int32, outputs [B, classes].
CLASSES = ScoreGroup(_class_sums, _accuracy)


def _top5_sums(labels: Any, outputs: Any, loss: Any) -> dict[str, Any]:
    import tensorflow as tf

    del loss
    if outputs.shape[-1] <= _TOP:
        raise ConfigurationError(
            f"--top5: the model has {outputs.shape[-1]} classes; expected more than {_TOP}. "
            "Leave --top5 out."
        )
    classes, values = tf.cast(labels, tf.int64), tf.cast(outputs, tf.float32)
    return {"right": _total(tf.math.in_top_k(classes, values, _TOP)), "all": _size(labels)}


#: The same with more than five classes.
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
    # exp of 709.8 is beyond float64.
    perplexity = math.exp(entropy) if entropy < 700 else math.inf if entropy > 0 else math.nan
    return {"perplexity": perplexity, **_accuracy(sums)}


#: labels [B, T] int32, outputs [B, T, words].
TOKENS = ScoreGroup(_token_sums, _token_values)


def _number_sums(labels: Any, outputs: Any, loss: Any) -> dict[str, Any]:
    import tensorflow as tf

    del loss
    wanted, found = tf.cast(labels, tf.float64), tf.cast(outputs, tf.float64)
    return {
        "absolute": tf.reduce_sum(tf.abs(found - wanted)),
        "squared": tf.reduce_sum(tf.square(found - wanted)),
        "label": tf.reduce_sum(wanted, axis=0),  # [...] of each output
        "label_squared": tf.reduce_sum(tf.square(wanted), axis=0),
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


#: labels and outputs [B, ...] float32 of the same shape.
NUMBERS = ScoreGroup(_number_sums, _number_values)


def _label_set_sums(labels: Any, outputs: Any, loss: Any) -> dict[str, Any]:
    import tensorflow as tf

    wanted = labels > 0.5
    found = outputs > (0.0 if loss.from_logits else 0.5)
    both, right = tf.logical_and(wanted, found), tf.equal(wanted, found)
    return {
        "found": tf.reduce_sum(tf.cast(both, tf.float64), axis=0),  # [labels]
        "wanted": tf.reduce_sum(tf.cast(wanted, tf.float64), axis=0),
        "given": tf.reduce_sum(tf.cast(found, tf.float64), axis=0),
        "exact": _total(tf.reduce_all(right, axis=-1)),
        "right": _total(right),
        "rows": tf.cast(tf.shape(labels)[0], tf.float64),
        "all": _size(labels),
    }


def _label_set_values(sums: Sums) -> dict[str, float]:
    import numpy as np

    found, either = sums["found"], sums["wanted"] + sums["given"]
    each = np.divide(2 * found, either, out=np.zeros_like(found), where=either > 0)
    return {
        "f1": 2 * _ratio(found.sum(), either.sum()) if either.any() else 0.0,
        "f1_macro": float(each.mean()),
        "exact_match": _ratio(sums["exact"], sums["rows"]),
        **_accuracy(sums),
    }


#: labels [B, labels] float32, each 0 or 1, outputs of the same shape.
LABEL_SETS = ScoreGroup(_label_set_sums, _label_set_values)


def _total(values: Any) -> Any:
    import tensorflow as tf

    return tf.reduce_sum(tf.cast(values, tf.float64))


def _size(values: Any) -> Any:
    import tensorflow as tf

    return tf.cast(tf.size(values), tf.float64)


def _ratio(part: Any, whole: Any) -> float:
    return float(part) / float(whole) if whole else math.nan
