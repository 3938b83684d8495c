"""Loading of the kernels that a value of --kernels names."""

from __future__ import annotations

from thinwire.ops.kernels.base import Kernels
from thinwire.ops.types import ConfigurationError

KERNEL_CHOICES = ("auto", "tf", "numpy")


def load_kernels(choice: str, on_gpu: bool = False) -> Kernels:
    """Return the kernels for a value of --kernels.

    Without a GPU, "auto" selects numpy, which is faster there (`bench/machine/kernels.py`).

    Args:
        choice: "auto", "tf" or "numpy". TensorFlow is imported only if its kernels are selected.
        on_gpu: True if the tensors are on a GPU. "auto" then selects "tf".

    Raises:
        ConfigurationError: The choice is unknown.
    """
    if choice not in KERNEL_CHOICES:
        raise ConfigurationError(
            f"--kernels={choice!r}: expected one of {', '.join(KERNEL_CHOICES)}."
        )
    _keep_freed_memory()
    if choice == "numpy" or (choice == "auto" and not on_gpu):
        from thinwire.ops.kernels import numpy_ops

        return numpy_ops.KERNELS
    from thinwire.ops.kernels import tensorflow_ops

    return tensorflow_ops.KERNELS


def _keep_freed_memory() -> None:
    """Make the C library keep freed memory, so that temporary arrays reuse the memory.

    By default, the GNU C library returns freed blocks to the system, and the system fills each new
    block page by page. Selecting 1 % of 25 M entries then takes a third longer. The library keeps
    blocks up to the largest size (at most 32 MiB) of a block that was ever freed, and twice that
    size in total. The block that this function frees is never touched, so the block takes no
    memory. With other C libraries, this function has no effect.
    """
    import numpy as np

    np.empty(31 << 20, np.uint8)
