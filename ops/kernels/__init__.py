"""The array work of the policies: select, quantise, apply, count hits.

Policies call a `Kernels`, whose functions numpy or TensorFlow implement, so that the same policy
runs on a processor and on a GPU. `load_kernels` returns the ones that --kernels names.
"""

from thinwire.ops.kernels.base import Kernels
from thinwire.ops.kernels.loading import KERNEL_CHOICES, load_kernels

__all__ = ["KERNEL_CHOICES", "Kernels", "load_kernels"]
