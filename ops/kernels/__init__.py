"""Kernels (array operations) of gradient codecs and other policies, in numpy and TensorFlow.

Policies call the functions of a `Kernels` object, for example to select or quantize gradient
entries. Each function has an implementation in numpy and one in TensorFlow, so that policies run on
CPUs and GPUs. `load_kernels` returns the implementation of the kernels that the flag --kernels
names.
"""

from thinwire.ops.kernels.base import Kernels
from thinwire.ops.kernels.loading import KERNEL_CHOICES, load_kernels

__all__ = ["KERNEL_CHOICES", "Kernels", "load_kernels"]
