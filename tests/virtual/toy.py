"""A toy problem for runs on a virtual clock and in threads: softmax regression of six rows."""

from __future__ import annotations

import numpy as np

from thinwire.ops.kernels import load_kernels
from thinwire.ops.methods.builder import Choices, compose
from thinwire.ops.methods.method import Method
from thinwire.ops.types import ModelSpec, TensorSpec

KERNELS = load_kernels("numpy")
#: The six rows of weights in two tensors, so that three shards have something each.
SPEC = ModelSpec((TensorSpec("upper", (4, 4)), TensorSpec("lower", (2, 4)), TensorSpec("b", (4,))))


class Softmax:
    """Linear softmax regression on separable points: loss and flat gradient by hand."""

    def __init__(self, seed: int = 0, examples: int = 400) -> None:
        rng = np.random.default_rng(seed)
        self.x = rng.normal(size=(examples, 6)).astype(np.float32)
        truth = rng.normal(size=(6, 4))
        self.y = (self.x @ truth).argmax(1)

    def gradient(self, flat: np.ndarray, batch: np.ndarray) -> tuple[float, np.ndarray]:
        weights, bias = flat[:24].reshape(6, 4), flat[24:]
        x, y = self.x[batch], self.y[batch]
        logits = x @ weights + bias
        logits -= logits.max(1, keepdims=True)
        odds = np.exp(logits)
        odds /= odds.sum(1, keepdims=True)
        loss = float(-np.log(odds[np.arange(len(y)), y] + 1e-9).mean())
        odds[np.arange(len(y)), y] -= 1
        odds /= len(y)
        gradient = np.concatenate([(x.T @ odds).ravel(), odds.sum(0)])
        return loss, gradient.astype(np.float32)

    def accuracy(self, flat: np.ndarray) -> float:
        logits = self.x @ flat[:24].reshape(6, 4) + flat[24:]
        return float((logits.argmax(1) == self.y).mean())


def method(name: str = "asgd", nb_workers: int = 2, **choices) -> Method:
    overrides = choices.pop("overrides", {})
    return compose(Choices.of(method=name, nb_workers=nb_workers, overrides=overrides, **choices))
