"""The work's model in torch, for every peer that trains with torch."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from bench.peers import work


def build_model(flat: NDArray[np.float32]) -> nn.Module:
    """Return Keras' mnist_cnn with these weights."""
    model = nn.Sequential(
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
    set_weights(model, flat)
    return model


def set_weights(model: nn.Module, flat: NDArray[np.float32]) -> None:
    """Overwrite a model's weights."""
    with torch.no_grad():
        tensors = work.to_channels_first(flat)
        for weights, values in zip(model.parameters(), tensors, strict=True):
            weights.copy_(torch.from_numpy(values))


def get_weights(model: nn.Module) -> NDArray[np.float32]:
    """Return a model's weights, flat in Keras' layout."""
    return work.from_channels_first([w.detach().numpy() for w in model.parameters()])


class Batches:
    """Batches drawn at random from one worker's part of the data."""

    def __init__(self, task: work.Work, rank: int) -> None:
        images, labels = work.load()
        self._images = torch.from_numpy(images[rank :: task.workers, None])
        self._labels = torch.from_numpy(labels[rank :: task.workers])
        self._size = task.batch_size
        self._generator = torch.Generator().manual_seed(task.seed + rank)

    def next(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return images [batch, 1, 28, 28] and labels [batch]."""
        chosen = torch.randint(len(self._labels), (self._size,), generator=self._generator)
        return self._images[chosen], self._labels[chosen]


def use_one_thread(task: work.Work, rank: int) -> None:
    """Compute with one thread, with a seed of this worker's own."""
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    torch.manual_seed(task.seed + rank)
