"""A third work: a wide multi-layer perceptron on Fashion-MNIST, for models that fill a link.

24,925,082 parameters (100 MB), Glorot-uniform weights, zero biases, SGD with momentum. As `work`,
it imports neither TensorFlow nor torch.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
from numpy.typing import NDArray

from bench.peers import work

#: Inputs, the units of each hidden layer, outputs.
WIDTHS = (784, 4096, 4096, 1200, 10)
#: Name and shape of each tensor in Keras' order and layout; weights are flat in this order.
TENSORS: tuple[tuple[str, tuple[int, ...]], ...] = tuple(
    (f"dense{number}/{name}", shape)
    for number, (inputs, outputs) in enumerate(itertools.pairwise(WIDTHS))
    for name, shape in (("kernel", (inputs, outputs)), ("bias", (outputs,)))
)
NUM_PARAMETERS = sum(math.prod(shape) for _, shape in TENSORS)


def initial(seed: int) -> NDArray[np.float32]:
    """Return the weights that everybody begins with, flat in Keras' order."""
    random = np.random.default_rng(seed)
    return work.flatten([work.glorot(shape, random) for _, shape in TENSORS])


def to_outputs_first(flat: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    """Return the tensors as torch and MXNet have them: of a kernel [outputs, inputs]."""
    return [np.ascontiguousarray(each.T) for each in work.unflatten(flat, TENSORS)]


def from_outputs_first(tensors: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Return what `to_outputs_first` was made from."""
    return work.flatten([np.asarray(each).T for each in tensors])
