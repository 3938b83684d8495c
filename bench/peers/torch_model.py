"""The works' models in torch, for all peers that train with torch."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from bench.peers import decoder_work, wide_work, work
from bench.peers.torch_decoder import TorchDecoder


def _mnist_cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(9216, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )


def _wide() -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise(wide_work.WIDTHS):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def _images(task: work.Work) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    images, labels = work.load()
    return images[:, None], labels


def _text(task: work.Work) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    inputs, labels = decoder_work.load("train", task.text)
    return inputs.astype(np.int64), labels.astype(np.int64)


def _sgd(task: work.Work, parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=task.learning_rate, momentum=task.momentum)


def _adamw(task: work.Work, parameters: Iterable[nn.Parameter]) -> Optimizer:
    return AdamW(
        parameters,
        lr=task.learning_rate,
        eps=decoder_work.EPSILON,
        weight_decay=decoder_work.WEIGHT_DECAY,
    )


@dataclasses.dataclass(frozen=True)
class _Parts:
    """Functions of one work that build its model, weights, data and optimizer."""

    build: Callable[[], nn.Module]
    initial: Callable[[int], NDArray[np.float32]]
    to_torch: Callable[[NDArray[np.float32]], Sequence[NDArray[np.float32]]]
    from_torch: Callable[[list[NDArray[np.float32]]], NDArray[np.float32]]
    load: Callable[[work.Work], tuple[NDArray[np.generic], NDArray[np.int64]]]
    optimizer: Callable[[work.Work, Iterable[nn.Parameter]], Optimizer]


_PARTS = {
    work.MNIST_CNN: _Parts(
        _mnist_cnn, work.initial, work.to_channels_first, work.from_channels_first, _images, _sgd
    ),
    work.WIDE: _Parts(
        _wide,
        wide_work.initial,
        wide_work.to_outputs_first,
        wide_work.from_outputs_first,
        _images,
        _sgd,
    ),
    work.DECODER: _Parts(
        TorchDecoder,
        decoder_work.initial,
        decoder_work.to_outputs_first,
        decoder_work.from_outputs_first,
        _text,
        _adamw,
    ),
}


def initial(task: work.Work) -> NDArray[np.float32]:
    """Return the initial weights of all contenders, flat in Keras' layout."""
    return _PARTS[task.model].initial(task.seed)


class TorchLayout:
    """Layout of a work's torch module as one flat vector, in the order of its parameters.

    Attributes:
        named: Name and shape of each parameter.
    """

    def __init__(self, task: work.Work) -> None:
        self._parts = _PARTS[task.model]
        parameters = self._parts.build().named_parameters()
        self.named = [(name, tuple(parameter.shape)) for name, parameter in parameters]

    def to_keras(self, flat: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return a vector of all parameters in Keras' order and layout."""
        return self._parts.from_torch(work.unflatten(flat, self.named))


class Trainee:
    """One worker's model with the common initial weights, and the worker's part of the data.

    Args:
        task: Work to train on.
        rank: Index of the worker, from 0.
    """

    def __init__(self, task: work.Work, rank: int) -> None:
        self._task, self._parts = task, _PARTS[task.model]
        self.model = self._parts.build()
        self.weights = initial(task)
        inputs, labels = self._parts.load(task)
        self._inputs = torch.from_numpy(np.ascontiguousarray(inputs[rank :: task.workers]))
        self._labels = torch.from_numpy(np.ascontiguousarray(labels[rank :: task.workers]))
        self._generator = torch.Generator().manual_seed(task.seed + rank)

    @property
    def weights(self) -> NDArray[np.float32]:
        """The model's weights, flat in Keras' layout."""
        return self._parts.from_torch([w.detach().numpy() for w in self.model.parameters()])

    @weights.setter
    def weights(self, flat: NDArray[np.float32]) -> None:
        with torch.no_grad():
            tensors = self._parts.to_torch(flat)
            for weights, values in zip(self.model.parameters(), tensors, strict=True):
                weights.copy_(torch.from_numpy(values))

    def optimizer(self) -> Optimizer:
        """Return a new optimizer of the work's kind for the model's parameters."""
        return self.optimizer_of(self.model.parameters())

    def optimizer_of(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        """Return a new optimizer of the work's kind for the given parameters."""
        return self._parts.optimizer(self._task, parameters)

    def step(self, optimizer: Optimizer, wrapped: nn.Module | None = None) -> None:
        """Take one step with a random mini-batch.

        Args:
            optimizer: Optimizer that applies the gradient.
            wrapped: Module that wraps the model in the forward pass; None uses the model.
        """
        size = (self._task.batch_size,)
        chosen = torch.randint(len(self._labels), size, generator=self._generator)
        outputs = (wrapped or self.model)(self._inputs[chosen])
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(outputs.flatten(0, -2), self._labels[chosen].flatten())
        loss.backward()
        optimizer.step()


def use_one_thread(task: work.Work, rank: int) -> None:
    """Set torch to one thread, and seed it with the sum of the work's seed and the rank."""
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    torch.manual_seed(task.seed + rank)
