"""Replaces errors of Keras and TensorFlow about data by messages that name the data and the fix.

Errors about data are recognized by their text, after a step has failed. So successful steps take no
extra time, and data that Keras accepts is never rejected. The data passed to `fit` may be arrays,
dicts, tf.data or generators.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

from thinwire.ops.types import ConfigurationError
from thinwire.script.backends.present import backend
from thinwire.script.data.place import WorkerPlace

#: Words in an error's text which suggest that the model requires a certain number of rows.
_OF_ROWS = re.compile(r"shape|rank|dimension|size|batch", re.IGNORECASE)
#: Matches the text of a ConfigurationError of Thinwire that was raised while TensorFlow was reading
#: data.
_REFUSED = re.compile(rf"{ConfigurationError.__name__}: ([^\n]*)")
_LABEL = re.compile(r"label value of (-?\d+) which is outside the valid range of \[0, (\d+)\)")
#: Matches Keras' errors about a missing input, or an input with a wrong width or rank. The function
#: `explain_batch` handles an input with a wrong number of rows.
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
    """Replace an error of Keras or TensorFlow by a clear error if the data does not fit a model.

    Args:
        model: Keras model that the script trains.

    Raises:
        ConfigurationError: The data does not fit the model. An error with another cause is raised
            unchanged.
    """
    try:
        yield
    except backend().data_errors as error:
        mismatch = _mismatch(str(error), model)
        if mismatch is None:
            raise
        raise ConfigurationError(mismatch) from error


def _mismatch(text: str, model: Any) -> str | None:
    """Return a message about data that does not fit a model; None if the error has another cause.

    Args:
        text: Text of the error that Keras or TensorFlow raised.
        model: Keras model that the script trains.
    """
    if match := _REFUSED.search(text):
        return match[1]
    if match := _LABEL.search(text):
        label, classes = match.groups()
        return (
            f"a batch has the label {label}, and {model.name!r} has {classes} outputs; expected "
            f"labels 0 to {int(classes) - 1}. Give the model's last layer one unit for each class, "
            "or number the classes from 0."
        )
    if match := _INPUTS.search(text):
        taken = getattr(model, "input_shape", None) if getattr(model, "inputs", None) else None
        takes = "" if taken is None else f", which takes {taken}"
        return (
            f"a batch does not fit {model.name!r}{takes}: {match[0].strip()}. Give the model's "
            "keras.Input the shape of one example, or change the data."
        )
    if match := _TARGETS.search(text):
        labels, outputs = match["target"] or match["first"], match["output"] or match["second"]
        return (
            f"a batch has labels of shape {labels}, and {model.name!r} has outputs of shape "
            f"{outputs}; the loss expected equal shapes. Give the model's last layer as many units "
            "as a label has values, or choose a loss that fits the labels."
        )
    return None


def explain_batch(error: BaseException, place: WorkerPlace | None, batch_size: int | None) -> None:
    """Add a note to the error of a first step if the division of batches may be its cause.

    The workers divide the rows of each batch, so a model may get fewer rows than it requires.

    Args:
        error: Error of a first training step, to which a note is added.
        place: This worker's number in the run, and the rules that divide data among workers; None
            if the script divides its data itself.
        batch_size: Batch size that the script passes to `fit`, in rows; None if unknown.
    """
    is_foreign = isinstance(error, backend().data_errors)
    if not (is_foreign and _OF_ROWS.search(str(error))) or place is None or not place.divides_batch:
        return
    error.add_note(
        f"Thinwire: {place.num_workers} workers divide the rows of each batch of "
        f"{batch_size or 'fit'} among themselves. If the model or its train_step requires a fixed "
        "number of rows, give --batch=worker: every worker then trains on whole batches."
    )
