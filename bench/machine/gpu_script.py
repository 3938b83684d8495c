"""A script for `bench.machine.gpu_runs`: a convolutional network in torch, or in Keras on JAX.

    python gpu_script.py torch|jax METHOD STEPS BATCH

It prints one line of JSON: device, steps per second after the warm-up, and accuracy. It trains
alone, or as a worker if `thinwire run` starts it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import numpy as np

#: Steps that are not timed, in which frameworks compile and connections open.
_WARM = 30
_RATE = 0.001


class StepTimer:
    """Measures steps per second."""

    def __init__(self) -> None:
        self._num_steps, self._begun = 0, 0.0

    def step(self) -> None:
        """Count a step; the clock begins after the warm-up."""
        self._num_steps += 1
        if self._num_steps == _WARM:
            self._begun = time.monotonic()

    def rate(self) -> float:
        """Return the number of steps per second since the warm-up."""
        return (self._num_steps - _WARM) / (time.monotonic() - self._begun)


def batches(
    images: np.ndarray[Any, Any], labels: np.ndarray[Any, Any], place: tuple[int, int], size: int
) -> Any:
    """Yield mini-batches of a worker's rows without end, in a new order in each pass."""
    number, count = place
    rng = np.random.default_rng(number)
    own = np.arange(number, len(images), count)
    while True:
        order = rng.permutation(own)
        for start in range(0, len(order) - size + 1, size):
            rows = order[start : start + size]
            yield images[rows], labels[rows]


def with_torch(data: Any, steps: int, size: int) -> tuple[str, float, float]:
    """Train in plain torch; return the device, the steps per second and the accuracy."""
    import torch
    from torch import nn

    import thinwire

    torch.manual_seed(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module = nn.Sequential(
        *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10)),
    ).to(device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=_RATE)
    optimizer = thinwire.distribute(optimizer, model=module)
    place, timer = (max(0, thinwire.worker_id() - 1), thinwire.num_workers()), StepTimer()
    rows = batches(data.train_images.transpose(0, 3, 1, 2), data.train_labels, place, size)
    for _ in range(steps):
        x, y = (torch.from_numpy(np.ascontiguousarray(each)).to(device) for each in next(rows))
        optimizer.zero_grad()
        nn.functional.cross_entropy(module(x), y.long()).backward()
        optimizer.step()
        timer.step()
    if device.type == "cuda":
        torch.cuda.synchronize()
    rate = timer.rate()
    if optimizer.thinwire.active:
        optimizer.thinwire.refresh()
    images = torch.from_numpy(np.ascontiguousarray(data.test_images.transpose(0, 3, 1, 2)))
    with torch.no_grad():
        found = module(images.to(device)).argmax(1).cpu().numpy()
    name = torch.cuda.get_device_name() if device.type == "cuda" else "processor"
    return name, rate, float((found == data.test_labels).mean())


def with_jax(data: Any, steps: int, size: int) -> tuple[str, float, float]:
    """Train in Keras on JAX; return the device, the steps per second and the accuracy."""
    import jax
    import keras

    import thinwire

    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            *(layers.Conv2D(32, 3, activation="relu"), layers.Conv2D(64, 3, activation="relu")),
            *(layers.MaxPooling2D(), layers.Flatten(), layers.Dense(128, activation="relu")),
            layers.Dense(10),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.AdamW(_RATE), loss)
    model = thinwire.distribute(model, shard="off")
    place, timer = (max(0, thinwire.worker_id() - 1), thinwire.num_workers()), StepTimer()

    class Rate(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no annotations
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            timer.step()

        def on_train_end(self, logs: Any = None) -> None:
            self.rate = timer.rate()

    measured = Rate()
    rows = batches(data.train_images, data.train_labels, place, size)
    model.fit(rows, steps_per_epoch=steps, epochs=1, verbose=0, callbacks=[measured])
    found = model.predict(data.test_images, batch_size=500, verbose=0).argmax(1)
    device = jax.devices()[0]
    name = "processor" if device.platform == "cpu" else str(device.device_kind)
    return name, measured.rate, float((found == data.test_labels).mean())


def main() -> None:
    framework, method, steps, size = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    os.environ.setdefault("KERAS_BACKEND", framework)
    from thinwire.data import registry

    data = registry.load("fashion_mnist_sample", None, 28, 1, 10, "standardize", 1)
    train = with_torch if framework == "torch" else with_jax
    device, rate, accuracy = train(data, steps, size)
    row = {"framework": framework, "method": method, "device": device}
    line = json.dumps(row | {"steps_per_second": rate, "accuracy": accuracy})
    sys.stdout.write(f"measured {line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
