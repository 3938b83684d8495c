"""Kernels (array operations) of codecs and other policies, in numpy, TensorFlow, JAX and torch.

Policies call the functions of a `Kernels` object, for example to select or quantize gradient
entries. Each function has an implementation in numpy and one in each framework, so that policies
run on CPUs and GPUs. `load_kernels` returns the implementation of the kernels that the flag
--kernels names.
"""

from __future__ import annotations

import importlib

from thinwire.ops.kernels.base import Kernels
from thinwire.ops.types import ConfigurationError

__all__ = ["KERNEL_CHOICES", "Kernels", "load_kernels"]

#: Value of the flag --kernels -> module with these kernels.
_MODULES = {"tf": "tensorflow_ops", "jax": "jax_ops", "torch": "torch_ops", "numpy": "numpy_ops"}
KERNEL_CHOICES = ("auto", *_MODULES)


def load_kernels(
    choice: str, on_gpu: bool = False, framework: str = "tf", on_host: bool = False
) -> Kernels:
    """Return the kernels (array functions) that a value of the flag --kernels selects.

    Without a GPU, the value "auto" of the flag --kernels selects numpy, which is faster on CPUs
    (`bench/machine/kernels.py`).

    Args:
        choice: Kernels to use: "auto", "tf", "jax", "torch" or "numpy". A framework is imported
            only if its kernels are selected.
        on_gpu: Whether the gradient tensors are on a GPU. If so, the choice "auto" selects the
            kernels of `framework`.
        framework: Framework that computes the gradients: "tf", "jax" or "torch".
        on_host: Whether all arrays are in host memory, as on a PS. If so, the choices "jax" and
            "torch" select numpy: the kernels of JAX and torch are numpy's for arrays of the host,
            and a PS need not have the framework.

    Raises:
        ConfigurationError: `choice` is not one of these words, or its framework is not installed.
    """
    if choice not in KERNEL_CHOICES:
        raise ConfigurationError(
            f"--kernels={choice!r}: expected one of {', '.join(KERNEL_CHOICES)}."
        )
    _keep_freed_memory()
    if choice == "auto":
        choice = framework if on_gpu else "numpy"
    if on_host and choice in ("jax", "torch"):
        choice = "numpy"
    try:
        module = importlib.import_module(f"thinwire.ops.kernels.{_MODULES[choice]}")
    except ModuleNotFoundError as error:
        if choice not in ("jax", "torch") or error.name != choice:
            raise
        raise ConfigurationError(
            f"--kernels={choice}: the package {choice} is not installed; expected an environment "
            f"with it (pip install 'thinwire[{choice}]')."
        ) from None
    kernels: Kernels = module.KERNELS
    return kernels


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
