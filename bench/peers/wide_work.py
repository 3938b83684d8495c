"""Definition of the third work: a wide multi-layer perceptron on Fashion-MNIST, which fills a link.

The perceptron has 24,925,082 parameters (100 MB), Glorot-uniform weights and zero biases, and is
trained by SGD with momentum. This module imports neither TensorFlow nor torch.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
from numpy.typing import NDArray

from bench.peers import work

#: Number of inputs, number of units of each hidden layer, number of outputs.
WIDTHS = (784, 4096, 4096, 1200, 10)
#: Name and shape of each tensor in Keras' order and layout; weights are flat in this order.
TENSORS: tuple[tuple[str, tuple[int, ...]], ...] = tuple(
    (f"dense{number}/{name}", shape)
    for number, (inputs, outputs) in enumerate(itertools.pairwise(WIDTHS))
    for name, shape in (("kernel", (inputs, outputs)), ("bias", (outputs,)))
)
NUM_PARAMETERS = sum(math.prod(shape) for _, shape in TENSORS)


def initial(seed: int) -> NDArray[np.float32]:
    """Return the initial weights of all contenders, flat in Keras' order."""
    random = np.random.default_rng(seed)
    return work.flatten([work.glorot(shape, random) for _, shape in TENSORS])


def to_outputs_first(flat: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    """Return the tensors in torch's and MXNet's layout; kernels are [outputs, inputs]."""
    return [np.ascontiguousarray(tensor.T) for tensor in work.unflatten(flat, TENSORS)]


def from_outputs_first(tensors: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Return the flat weights in Keras' order: the inverse of `to_outputs_first`."""
    return work.flatten([np.asarray(tensor).T for tensor in tensors])
