"""Names the extras of this package that install a missing backend of Keras."""

from __future__ import annotations

#: Keras backend -> extras of this package that install it, for an error message.
_EXTRAS = {
    "tensorflow": "'thinwire[cpu]', or 'thinwire[gpu]' for NVIDIA GPUs",
    "jax": "'thinwire[jax]'",
    "torch": "'thinwire[torch]'",
}


def explained(error: ModuleNotFoundError) -> ModuleNotFoundError:
    """Return the error to raise for a missing module: for a backend, one that names the extras."""
    if error.name not in _EXTRAS:
        return error
    return ModuleNotFoundError(
        f"{error.name} is not installed, which is the Keras backend of this process: pip install "
        f"{_EXTRAS[error.name]}. Without KERAS_BACKEND in the environment, Keras takes tensorflow; "
        "KERAS_BACKEND=jax or torch chooses another installed backend.",
        name=error.name,
    )
