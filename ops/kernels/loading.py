"""Which kernels a value of --kernels stands for."""

from __future__ import annotations

from thinwire.ops.kernels.base import Kernels
from thinwire.ops.types import ConfigurationError

KERNEL_CHOICES = ("auto", "tf", "numpy")


def load_kernels(choice: str, on_gpu: bool = False) -> Kernels:
    """Return the kernels for a value of --kernels.

    Without a GPU "auto" means numpy, which is ahead there (`bench/machine/kernels.py`).

    Args:
        choice: auto, tf or numpy. TensorFlow is imported only if its kernels are taken.
        on_gpu: Whether the tensors live on a GPU; there auto means tf.

    Raises:
        ConfigurationError: Another choice.
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
    """Have temporary arrays reuse memory instead of taking it from the system again and again.

    The GNU C library hands blocks back, so that each new one is filled in page by page: of 25 M
    entries selecting 1 % took a third longer for it. It stops doing so for blocks up to the largest
    of at most 32 MiB that was ever freed, and keeps twice that much. The block here is never
    touched, so takes no memory; elsewhere this does nothing.
    """
    import numpy as np

    np.empty(31 << 20, np.uint8)
