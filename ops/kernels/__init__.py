"""Array operations of the policies: select, quantize, apply updates, count hits.

Policies call the functions of a `Kernels` object. numpy or TensorFlow implements these functions,
so the same policy runs on a CPU and on a GPU. `load_kernels` returns the implementation that
--kernels names.
"""

from thinwire.ops.kernels.base import Kernels
from thinwire.ops.kernels.loading import KERNEL_CHOICES, load_kernels

__all__ = ["KERNEL_CHOICES", "Kernels", "load_kernels"]
