"""Checks that examples fit a model, before a training step fails with an error of Keras."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from thinwire.ops.types import ConfigurationError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MEND = (
    "With --network, set --image_size, --image_depth and --nb_classes, or choose another --dataset."
    " With --model, correct build_model() or load_data()."
)


def check_examples(model: Any, images: Any, labels: NDArray[Any], part: str = "training") -> None:
    """Reject examples whose shape differs from the model's input, and labels beyond its outputs.

    The inputs (outputs) are not checked if the model has several inputs (outputs), or if their
    shape is unknown.

    Args:
        model: Keras model that will be trained or evaluated on the examples.
        images: Examples [N, ...] of the data set, an array or another object with a shape.
        labels: Labels of the examples, [N, ...].
        part: Name of the part of the data set ("training" or "test"), for the error message.

    Raises:
        ConfigurationError: The examples or labels do not fit the model's inputs or outputs.
    """
    expected, shape = _shape(model, "input_shape"), tuple(images.shape[1:])
    if expected is not None and not _takes(expected, shape):
        raise ConfigurationError(
            f"the {part} examples have the shape {shape}, but model {model.name!r} takes "
            f"{_text(expected)}. {_MEND}"
        )
    outputs = _shape(model, "output_shape")
    if outputs and outputs[-1] and _compares_classes(model, labels) and len(labels):
        highest = int(labels.max())
        if highest >= outputs[-1]:
            raise ConfigurationError(
                f"the {part} labels go up to {highest}, but model {model.name!r} has "
                f"{outputs[-1]} outputs; expected labels from 0 to {outputs[-1] - 1}. {_MEND}"
            )


def _shape(model: Any, name: str) -> tuple[int | None, ...] | None:
    """Return the shape of a model's input or output for one example; None if several or unknown."""
    try:
        shape = getattr(model, name)
    except (AttributeError, ValueError):
        return None
    return shape[1:] if isinstance(shape, tuple) and not isinstance(shape[0], tuple) else None


def _takes(expected: tuple[int | None, ...], given: tuple[int, ...]) -> bool:
    if len(expected) != len(given):  # Keras itself adds or drops a last axis of size 1
        longer, shorter = sorted((expected, given), key=len, reverse=True)
        return longer[-1] in (1, None) and len(longer) == len(shorter) + 1
    return all(size in (None, other) for size, other in zip(expected, given, strict=True))


def _text(shape: tuple[int | None, ...]) -> str:
    sizes = ", ".join("any" if size is None else str(size) for size in shape)
    return f"({sizes},)" if len(shape) == 1 else f"({sizes})"


def _compares_classes(model: Any, labels: NDArray[Any]) -> bool:
    """Return True if a model's loss interprets integer labels as class numbers.

    A model without a compiled loss is trained with its task's loss, which interprets integer labels
    as class numbers.
    """
    loss = getattr(model, "loss", None)
    name = getattr(loss, "name", loss)
    return labels.dtype.kind in "iu" and name in (None, "sparse_categorical_crossentropy")
