"""Definition of the second work: a small byte-level decoder on Python's standard library.

The decoder has 867,328 parameters and context 64, and is trained by AdamW on the library's sources.
All contenders start from the same weights and read the same text. This module imports neither
TensorFlow nor torch, so that every peer's environment can import it.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from bench.peers import work
from thinwire.data.readers import source_text

WIDTH, BLOCKS, HEADS, VOCABULARY, CONTEXT = 128, 4, 4, 256, 64
_HEAD_WIDTH = WIDTH // HEADS
#: Keras' defaults for AdamW.
WEIGHT_DECAY, EPSILON = 0.004, 1e-7
NORM_EPSILON = 1e-5
_DEVIATION = 0.02
#: Number of sequences of the test part that a model is evaluated on.
NUM_TEST = 128


def _block(number: int) -> list[tuple[str, tuple[int, ...]]]:
    inner, wide = (HEADS, _HEAD_WIDTH), 4 * WIDTH
    parts: list[tuple[str, tuple[int, ...]]] = [
        ("norm_a/gamma", (WIDTH,)),
        ("norm_a/beta", (WIDTH,)),
    ]
    for name in ("query", "key", "value"):
        parts += [(f"{name}/kernel", (WIDTH, *inner)), (f"{name}/bias", inner)]
    parts += [("output/kernel", (*inner, WIDTH)), ("output/bias", (WIDTH,))]
    parts += [("norm_b/gamma", (WIDTH,)), ("norm_b/beta", (WIDTH,))]
    parts += [("wide/kernel", (WIDTH, wide)), ("wide/bias", (wide,))]
    parts += [("narrow/kernel", (wide, WIDTH)), ("narrow/bias", (WIDTH,))]
    return [(f"block{number}/{name}", shape) for name, shape in parts]


#: Name and shape of each tensor in Keras' order and layout; weights are flat in this order.
TENSORS: tuple[tuple[str, tuple[int, ...]], ...] = (
    ("token/embeddings", (VOCABULARY, WIDTH)),
    ("position/embeddings", (CONTEXT, WIDTH)),
    *(tensor for number in range(BLOCKS) for tensor in _block(number)),
    ("norm/gamma", (WIDTH,)),
    ("norm/beta", (WIDTH,)),
    ("logits/kernel", (WIDTH, VOCABULARY)),
    ("logits/bias", (VOCABULARY,)),
)
NUM_PARAMETERS = sum(math.prod(shape) for _, shape in TENSORS)


def load(part: str, folder: str) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return a part's sequences of bytes [N, 64], and the byte that follows each byte [N, 64].

    Args:
        part: "train" or "test".
        folder: Folder of the standard library, the same for all contenders.
    """
    inputs, labels = source_text.read(part, folder)
    if part == "test":
        chosen = np.arange(NUM_TEST) * len(inputs) // NUM_TEST
        return inputs[chosen], labels[chosen]
    return inputs, labels


def initial(seed: int) -> NDArray[np.float32]:
    """Return the initial weights of all contenders, flat in Keras' order."""
    random = np.random.default_rng(seed)

    def tensor(name: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
        kind = name.rpartition("/")[2]
        if kind in ("beta", "bias"):
            return np.zeros(shape, np.float32)
        if kind == "gamma":
            return np.ones(shape, np.float32)
        return random.normal(0.0, _DEVIATION, shape).astype(np.float32)

    return work.flatten([tensor(name, shape) for name, shape in TENSORS])


def to_outputs_first(flat: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    """Return the tensors in the layout of torch's layers; kernels are [outputs, inputs]."""
    tensors = work.unflatten(flat, TENSORS)
    return [_turned(name, tensor) for (name, _), tensor in zip(TENSORS, tensors, strict=True)]


def _turned(name: str, tensor: NDArray[np.float32]) -> NDArray[np.float32]:
    kind = name.rpartition("/")[2]
    if kind == "kernel":
        num_inputs = WIDTH if tensor.shape[0] == WIDTH else tensor.size // WIDTH
        tensor = tensor.reshape(num_inputs, -1).T
    elif kind == "bias":
        tensor = tensor.reshape(-1)
    return np.ascontiguousarray(tensor)


def from_outputs_first(tensors: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Return the flat weights in Keras' order: the inverse of `to_outputs_first`."""
    named = zip(TENSORS, tensors, strict=True)
    return work.flatten(
        [tensor.T if name.endswith("/kernel") else tensor for (name, _), tensor in named]
    )
