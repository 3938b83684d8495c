"""Definition of the first work, options of all works, and the progress files of processes.

The first work is Keras' mnist_cnn (1,199,882 parameters, Glorot-uniform weights, zero biases,
dropout 0.25 and 0.5) on Fashion-MNIST, trained by SGD with momentum and one thread per worker. All
contenders start from the same weights. This module imports neither TensorFlow nor torch, so that
every peer's virtual environment can import it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thinwire.data.readers import idx

#: Names of the models: the CNN of this module, the decoder of `decoder_work`, the perceptron of
#: `wide_work`.
MNIST_CNN, DECODER, WIDE = "mnist_cnn", "decoder", "wide"
_ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = (Path("/usr/share/datasets/fashion-mnist"), _ROOT / "data" / "fashion_mnist_sample")
#: Name and shape of each tensor in Keras' order and layout; weights are flat in this order.
TENSORS = (
    ("conv1/kernel", (3, 3, 1, 32)),
    ("conv1/bias", (32,)),
    ("conv2/kernel", (3, 3, 32, 64)),
    ("conv2/bias", (64,)),
    ("hidden/kernel", (9216, 128)),
    ("hidden/bias", (128,)),
    ("logits/kernel", (128, 10)),
    ("logits/bias", (10,)),
)
NUM_PARAMETERS = sum(math.prod(shape) for _, shape in TENSORS)
_FLATTENED = (12, 12, 64)  # height, width, channels; flattened to the hidden layer's 9,216 inputs
PIXEL_MEAN, PIXEL_DEVIATION = 72.94, 90.02  # over Fashion-MNIST's training images
_LINE_SECONDS = 0.25  # minimum time between two lines of progress


@dataclasses.dataclass(frozen=True)
class Work:
    """Model, hyperparameters and length of a training run.

    The run ends after `seconds`, or after `steps` steps of one worker if that is earlier; 0 steps
    mean no limit. `text` is the folder of the decoder's text, the standard library.
    """

    seconds: float
    warmup_steps: int
    workers: int
    batch_size: int
    learning_rate: float
    momentum: float
    seed: int
    steps: int = 0
    snapshot_seconds: float = 2.0
    folder: str = "."
    model: str = MNIST_CNN
    text: str = ""


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all peers share."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument(
        "--seconds", type=float, default=20.0, help="length of the run from the first step"
    )
    result.add_argument(
        "--steps", type=int, default=0, help="maximum steps of one worker; 0: no limit"
    )
    result.add_argument("--warmup_steps", type=int, default=0, help="most peers ignore it")
    result.add_argument("--workers", type=int, default=2)
    result.add_argument("--batch_size", type=int, default=64)
    result.add_argument("--learning_rate", type=float, default=0.01)
    result.add_argument("--momentum", type=float, default=0.9)
    result.add_argument("--seed", type=int, default=1)
    result.add_argument("--snapshot_seconds", type=float, default=2.0)
    result.add_argument("--folder", default=".", help="folder for progress files and snapshots")
    result.add_argument("--model", choices=(MNIST_CNN, DECODER, WIDE), default=MNIST_CNN)
    result.add_argument("--text", default="", help="folder of the decoder's text")
    return result


def from_arguments(arguments: argparse.Namespace) -> Work:
    """Return the work that the command line describes."""
    names = [field.name for field in dataclasses.fields(Work)]
    return Work(**{name: getattr(arguments, name) for name in names})


def to_arguments(task: Work) -> list[str]:
    """Return the command line that `from_arguments` reads."""
    return [f"--{name}={value}" for name, value in dataclasses.asdict(task).items()]


# -- data --------------------------------------------------------------------------------------


def files(part: str = "train") -> tuple[Path, Path]:
    """Return the IDX files of images and labels of a part, "train" or "t10k".

    The files are from the full data set if it is installed, else from the shipped sample.
    """
    folder = next(path for path in _FOLDERS if path.is_dir())
    return folder / f"{part}-images-idx3-ubyte.gz", folder / f"{part}-labels-idx1-ubyte.gz"


def load(part: str = "train") -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return a part's standardized images [N, 28, 28] float32, and labels [N] int64."""
    images, labels = idx.read_pair(*files(part))
    scaled = images.astype(np.float32)
    scaled -= PIXEL_MEAN
    scaled /= PIXEL_DEVIATION
    return scaled, labels.astype(np.int64)


def full_set_is_installed() -> bool:
    """Return True if `load` reads all 60,000 training images."""
    return _FOLDERS[0].is_dir()


# -- weights -----------------------------------------------------------------------------------


def initial(seed: int) -> NDArray[np.float32]:
    """Return the initial weights of all contenders, flat in Keras' order."""
    random = np.random.default_rng(seed)
    return flatten([glorot(shape, random) for _, shape in TENSORS])


def glorot(shape: tuple[int, ...], random: np.random.Generator) -> NDArray[np.float32]:
    """Return a tensor's initial values: Glorot-uniform for a kernel, zeros for a bias."""
    if len(shape) == 1:
        return np.zeros(shape, np.float32)
    field = math.prod(shape[:-2])
    limit = math.sqrt(6.0 / (field * (shape[-2] + shape[-1])))
    return random.uniform(-limit, limit, shape).astype(np.float32)


def flatten(tensors: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Return the tensors concatenated to one vector."""
    return np.concatenate([np.asarray(tensor, np.float32).ravel() for tensor in tensors])


def unflatten(
    flat: NDArray[np.float32], named: Sequence[tuple[str, tuple[int, ...]]] = TENSORS
) -> list[NDArray[np.float32]]:
    """Return a vector's tensors in Keras' layout; `named` lists a model's names and shapes."""
    ends = list(itertools.accumulate(math.prod(shape) for _, shape in named))
    parts = np.split(flat, ends[:-1])
    return [part.reshape(shape) for part, (_, shape) in zip(parts, named, strict=True)]


def to_channels_first(flat: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    """Return a vector's tensors in torch's and MXNet's layout.

    Filters are [out, in, height, width] and matrices are [out, in]. The 9,216 inputs of the hidden
    layer are ordered channel by channel.
    """
    tensors = unflatten(flat)
    hidden = tensors[4].reshape(*_FLATTENED, 128).transpose(3, 2, 0, 1).reshape(128, -1)
    tensors[0] = tensors[0].transpose(3, 2, 0, 1)
    tensors[2] = tensors[2].transpose(3, 2, 0, 1)
    tensors[4], tensors[6] = hidden, tensors[6].T
    return [np.ascontiguousarray(tensor) for tensor in tensors]


def from_channels_first(tensors: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Return the flat weights in Keras' order: the inverse of `to_channels_first`."""
    layers = [np.asarray(tensor) for tensor in tensors]
    height, width, channels = _FLATTENED
    layers[0] = layers[0].transpose(2, 3, 1, 0)
    layers[2] = layers[2].transpose(2, 3, 1, 0)
    layers[4] = layers[4].reshape(128, channels, height, width).transpose(2, 3, 1, 0)
    layers[6] = layers[6].T
    return flatten(layers)


# -- progress ----------------------------------------------------------------------------------


class PeerProgress:
    """File of one process's progress: lines of time, steps of the process, and snapshot file.

    Each process writes the file progress-NAME.jsonl. The harness sums the steps of all files. It
    evaluates the snapshots after the run, so that evaluation does not slow the processes down.

    Args:
        task: Work that is trained.
        name: Name of the process.
        snapshots: True if the process writes snapshots of the model.
    """

    def __init__(self, task: Work, name: str, snapshots: bool) -> None:
        self._task = task
        self._folder = Path(task.folder)
        self._file = open(self._folder / f"progress-{name}.jsonl", "a", buffering=1)  # noqa: SIM115
        self._snapshots = snapshots
        self._began: float | None = None
        self._next_line = self._next_snapshot = 0.0
        self._num_snapshots = 0

    def report(
        self,
        steps: int | None,
        weights: Callable[[], NDArray[np.float32]] | None = None,
        last: bool = False,
    ) -> bool:
        """Record the steps; write a snapshot if one is due; return True if the run must end.

        Args:
            steps: Steps that the process has counted so far; None if it does not count steps.
            weights: Function that returns the weights, flat in Keras' layout; None: no snapshot.
            last: True if the run ends now, before its limits are reached.
        """
        now = time.monotonic()
        if self._began is None:
            self._began = now
            # A process that counts no steps reports once per round, so snapshot the first round.
            self._next_snapshot = now + (0.0 if steps is None else self._task.snapshot_seconds)
        over = last or now - self._began >= self._task.seconds
        over = over or (0 < self._task.steps <= (steps or 0))
        due = self._snapshots and weights is not None and (now >= self._next_snapshot or over)
        if not (due or over or now >= self._next_line):
            return False
        snapshot = None
        if due:
            snapshot = f"{self._num_snapshots:05d}.npy"
            np.save(self._folder / snapshot, weights())
            self._num_snapshots += 1
            self._next_snapshot = max(now, self._next_snapshot + self._task.snapshot_seconds)
        self._next_line = now + _LINE_SECONDS
        line = {"time": now, "steps": steps, "snapshot": snapshot}
        self._file.write(json.dumps(line) + "\n")
        return over
