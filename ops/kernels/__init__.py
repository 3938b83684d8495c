"""Kernels (array operations) of gradient codecs and other policies, in numpy and TensorFlow.

Policies call the functions of a `Kernels` object, for example to select or quantize gradient
entries. Each function has an implementation in numpy and one in TensorFlow, so that policies run on
CPUs and GPUs. `load_kernels` returns the implementation of the kernels that the flag --kernels
names.
"""

from __future__ import annotations

from thinwire.ops.kernels.base import Kernels
from thinwire.ops.types import ConfigurationError

__all__ = ["KERNEL_CHOICES", "Kernels", "load_kernels"]

KERNEL_CHOICES = ("auto", "tf", "numpy")


def load_kernels(choice: str, on_gpu: bool = False) -> Kernels:
    """Return the kernels (array functions) that a value of the flag --kernels selects.

    Without a GPU, the value "auto" of the flag --kernels selects numpy, which is faster on CPUs
    (`bench/machine/kernels.py`).

    Args:
        choice: Kernels to use: "auto", "tf" or "numpy". TensorFlow is imported only if its kernels
            are selected.
        on_gpu: Whether the gradient tensors are on a GPU. If so, the choice "auto" selects "tf".

    Raises:
        ConfigurationError: `choice` is not "auto", "tf" or "numpy".
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

    By default, the GNU C library returns freed memory blocks to the operating system, which fills
    each newly allocated block page by page. If the C library returns freed memory to the operating
    system, selecting 1 % of 25 million array entries takes a third longer. The GNU C library does
    not return freed memory blocks up to the size of the largest block that was ever freed (at most
    32 MiB), and twice that size in total. The memory block that `_keep_freed_memory` frees is never
    written, so the block takes no memory. `_keep_freed_memory` has no effect with C libraries other
    than GNU's.
    """
    import numpy as np

    np.empty(31 << 20, np.uint8)
