"""Errors of Keras and TensorFlow that a script's data brings about, in words that name the data.

They are found by their text when a step has failed already, so that a step that fits costs nothing
and no data is refused that Keras takes. Data comes in every form that `fit` knows: arrays, dicts,
tf.data, generators.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from thinwire.ops.types import ConfigurationError
from thinwire.script.data.place import WorkerPlace

#: What an error has in its text that a fixed number of rows may have brought about.
_OF_ROWS = re.compile(r"shape|rank|dimension|size|batch", re.IGNORECASE)
#: An error of this library's, raised while TensorFlow was reading the data.
_REFUSED = re.compile(rf"{ConfigurationError.__name__}: ([^\n]*)")
_LABEL = re.compile(r"label value of (-?\d+) which is outside the valid range of \[0, (\d+)\)")
#: An input of another width or rank, or none; one of another number of rows is `explain_batch`'s.
_INPUTS = re.compile(
    r"Input \d+ [^\n]*is incompatible with the layer: expected (?!shape=\(\d)[^\n\x1b]*"
    r"|Expected shape \(None[^\n\x1b]*"
    r"|Missing data for input [^\n\x1b]*"
)
_TARGETS = re.compile(
    r"target\.shape=(?P<target>\([^)]*\)), output\.shape=(?P<output>\([^)]*\))"
    r"|Dimensions must be equal[^\n]* for '\{\{node compile_loss/[^\n]* with input shapes: "
    r"(?P<first>\[[^\]]*\]), (?P<second>\[[^\]]*\])"
)


@contextlib.contextmanager
def refusing_unfit(model: Any) -> Iterator[None]:
    """Refuse data that does not fit a model, where Keras has failed with it.

    Args:
        model: Keras model.

    Raises:
        ConfigurationError: In the place of Keras' or TensorFlow's error; all others stay.
    """
    try:
        yield
    except (ValueError, tf.errors.InvalidArgumentError, tf.errors.UnknownError) as error:
        mismatch = _mismatch(str(error), model)
        if mismatch is None:
            raise
        raise ConfigurationError(mismatch) from error


def _mismatch(text: str, model: Any) -> str | None:
    """Return what does not fit, by the text of an error; None: it is of something else."""
    if found := _REFUSED.search(text):
        return found[1]
    if found := _LABEL.search(text):
        label, classes = found.groups()
        return (
            f"a batch has the label {label}, and {model.name!r} has {classes} outputs; expected "
            f"labels 0 to {int(classes) - 1}. Give its last layer a unit for each class, or number "
            "the classes from 0."
        )
    if found := _INPUTS.search(text):
        taken = getattr(model, "input_shape", None) if getattr(model, "inputs", None) else None
        takes = "" if taken is None else f", which takes {taken}"
        return (
            f"a batch does not fit {model.name!r}{takes}: {found[0].strip()}. Give its keras.Input "
            "the shape of one example, or change the data."
        )
    if found := _TARGETS.search(text):
        labels, outputs = found["target"] or found["first"], found["output"] or found["second"]
        return (
            f"a batch has labels of the shape {labels}, and {model.name!r} has outputs of "
            f"{outputs}; the loss expected the same of both. Give its last layer as many units as "
            "a label has values, or take a loss for the labels as they are."
        )
    return None


def explain_batch(error: BaseException, place: WorkerPlace | None, batch_size: int | None) -> None:
    """Add to an error of a script's first step that its batches are parts here.

    Args:
        error: Of the step.
        place: This worker's; None: the script shares its data itself.
        batch_size: The script's, as far as it is known.
    """
    is_foreign = isinstance(error, ValueError | tf.errors.InvalidArgumentError)
    if not (is_foreign and _OF_ROWS.search(str(error))) or place is None or not place.divides_batch:
        return
    error.add_note(
        f"Thinwire: a batch of {batch_size or 'fit'} is the whole run's here, and each of "
        f"{place.num_workers} workers takes its part of the rows. If the model or its train_step "
        "fixes a number of rows, give --batch=worker: every batch is then as the script makes it."
    )
