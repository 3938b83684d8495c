"""Whether examples fit a model: found out before a step, which fails in Keras' own words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from thinwire.ops.types import ConfigurationError

if TYPE_CHECKING:
    from numpy.typing import NDArray

_MEND = (
    "Of a --network, set --image_size, --image_depth and --nb_classes, or take another --dataset; "
    "of --model, mend build_model() or load_data()."
)


def check_examples(model: Any, images: Any, labels: NDArray[Any], part: str = "training") -> None:
    """Refuse examples of another shape than the model's input, and classes that it does not have.

    Models of several inputs or outputs, and what is not known of a model, are left to Keras.

    Args:
        model: Keras model.
        images: [N, ...], an array or anything with a shape.
        labels: [N, ...].
        part: Of the data set, for the message.

    Raises:
        ConfigurationError: They do not fit.
    """
    expected, given = _shape(model, "input_shape"), tuple(images.shape[1:])
    if expected is not None and not _takes(expected, given):
        raise ConfigurationError(
            f"the {part} examples have the shape {given}, and model {model.name!r} takes "
            f"{_text(expected)}. {_MEND}"
        )
    outputs = _shape(model, "output_shape")
    if outputs and outputs[-1] and _compares_classes(model, labels) and len(labels):
        highest = int(labels.max())
        if highest >= outputs[-1]:
            raise ConfigurationError(
                f"the {part} labels go up to {highest}, and model {model.name!r} has {outputs[-1]} "
                f"outputs; expected labels 0 to {outputs[-1] - 1}. {_MEND}"
            )


def _shape(model: Any, name: str) -> tuple[int | None, ...] | None:
    """Return the shape of one example, None where it is not known or there are several."""
    try:
        shape = getattr(model, name)
    except (AttributeError, ValueError):
        return None
    return shape[1:] if isinstance(shape, tuple) and not isinstance(shape[0], tuple) else None


def _takes(expected: tuple[int | None, ...], given: tuple[int, ...]) -> bool:
    if len(expected) != len(given):  # Keras adds or drops a last axis of 1
        longer, shorter = sorted((expected, given), key=len, reverse=True)
        return longer[-1] in (1, None) and len(longer) == len(shorter) + 1
    return all(size in (None, other) for size, other in zip(expected, given, strict=True))


def _text(shape: tuple[int | None, ...]) -> str:
    sizes = ", ".join("any" if size is None else str(size) for size in shape)
    return f"({sizes},)" if len(shape) == 1 else f"({sizes})"


def _compares_classes(model: Any, labels: NDArray[Any]) -> bool:
    """Return whether the loss takes whole numbers for classes; that of a task does."""
    loss = getattr(model, "loss", None)
    name = getattr(loss, "name", loss)
    return labels.dtype.kind in "iu" and name in (None, "sparse_categorical_crossentropy")
