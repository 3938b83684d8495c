"""The work every peer does, and how each of its processes reports its progress.

Keras' mnist_cnn (1,199,882 parameters, Glorot-uniform weights, zero biases, dropout 0.25 and 0.5)
on Fashion-MNIST, SGD with momentum, one thread a worker. All begin with the same weights. Imports
neither TensorFlow nor torch, so each peer's own virtual environment can use it.
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

#: What is trained: the CNN of this module, the decoder of `decoder_work`, the perceptron of
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
_FLATTENED = (12, 12, 64)  # height, width, channels of what becomes 9,216 inputs
PIXEL_MEAN, PIXEL_DEVIATION = 72.94, 90.02  # of Fashion-MNIST
_LINE_SECONDS = 0.25  # between two lines of progress


@dataclasses.dataclass(frozen=True)
class Work:
    """What to train, and how long.

    `steps` are those of one worker, 0 for no limit; whichever of `seconds` and `steps` is over
    first ends the run. `text` is the decoder's: the folder of the standard library.
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
    """Return a parser with the options all peers share."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--seconds", type=float, default=20.0, help="from the first step")
    result.add_argument("--steps", type=int, default=0, help="of one worker; 0: no limit")
    result.add_argument("--warmup_steps", type=int, default=0, help="unused by most")
    result.add_argument("--workers", type=int, default=2)
    result.add_argument("--batch_size", type=int, default=64)
    result.add_argument("--learning_rate", type=float, default=0.01)
    result.add_argument("--momentum", type=float, default=0.9)
    result.add_argument("--seed", type=int, default=1)
    result.add_argument("--snapshot_seconds", type=float, default=2.0)
    result.add_argument("--folder", default=".", help="of progress and snapshots")
    result.add_argument("--model", choices=(MNIST_CNN, DECODER, WIDE), default=MNIST_CNN)
    result.add_argument("--text", default="", help="folder that the decoder reads")
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

    Those of the full set where it is installed, else of the shipped sample.
    """
    folder = next(path for path in _FOLDERS if path.is_dir())
    return folder / f"{part}-images-idx3-ubyte.gz", folder / f"{part}-labels-idx1-ubyte.gz"


def load(part: str = "train") -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return a part's images float32 [N, 28, 28], standardised, and labels int64 [N]."""
    images, labels = idx.read_pair(*files(part))
    scaled = images.astype(np.float32)
    scaled -= PIXEL_MEAN
    scaled /= PIXEL_DEVIATION
    return scaled, labels.astype(np.int64)


def full_set_is_installed() -> bool:
    """Return whether `load` reads all 60,000 training images."""
    return _FOLDERS[0].is_dir()


# -- weights -----------------------------------------------------------------------------------


def initial(seed: int) -> NDArray[np.float32]:
    """Return the weights that everybody begins with, flat in Keras' order."""
    random = np.random.default_rng(seed)
    return flatten([glorot(shape, random) for _, shape in TENSORS])


def glorot(shape: tuple[int, ...], random: np.random.Generator) -> NDArray[np.float32]:
    """Return a kernel's initial values, uniform by its fans; zeros of a bias."""
    if len(shape) == 1:
        return np.zeros(shape, np.float32)
    field = math.prod(shape[:-2])
    limit = math.sqrt(6.0 / (field * (shape[-2] + shape[-1])))
    return random.uniform(-limit, limit, shape).astype(np.float32)


def flatten(tensors: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Return tensors as one vector."""
    return np.concatenate([np.asarray(tensor, np.float32).ravel() for tensor in tensors])


def unflatten(
    flat: NDArray[np.float32], named: Sequence[tuple[str, tuple[int, ...]]] = TENSORS
) -> list[NDArray[np.float32]]:
    """Return a vector's tensors in Keras' layout; `named` are those of another model."""
    ends = list(itertools.accumulate(math.prod(shape) for _, shape in named))
    parts = np.split(flat, ends[:-1])
    return [part.reshape(shape) for part, (_, shape) in zip(parts, named, strict=True)]


def to_channels_first(flat: NDArray[np.float32]) -> list[NDArray[np.float32]]:
    """Return a vector's tensors as torch and MXNet lay them out.

    Filters are [out, in, height, width], matrices [out, in], and the 9,216 inputs of the hidden
    layer come channel by channel.
    """
    tensors = unflatten(flat)
    hidden = tensors[4].reshape(*_FLATTENED, 128).transpose(3, 2, 0, 1).reshape(128, -1)
    tensors[0] = tensors[0].transpose(3, 2, 0, 1)
    tensors[2] = tensors[2].transpose(3, 2, 0, 1)
    tensors[4], tensors[6] = hidden, tensors[6].T
    return [np.ascontiguousarray(tensor) for tensor in tensors]


def from_channels_first(tensors: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Return what `to_channels_first` was made from."""
    found = [np.asarray(tensor) for tensor in tensors]
    height, width, channels = _FLATTENED
    found[0] = found[0].transpose(2, 3, 1, 0)
    found[2] = found[2].transpose(2, 3, 1, 0)
    found[4] = found[4].reshape(128, channels, height, width).transpose(2, 3, 1, 0)
    found[6] = found[6].T
    return flatten(found)


# -- progress ----------------------------------------------------------------------------------


class PeerProgress:
    """Progress of one process for the harness: lines of time, own steps, snapshot.

    The file has the name of the process. The harness sums the steps of all files and evaluates
    the snapshots after the run, so that evaluation takes no process any time.

    Args:
        task: What to train.
        name: Of this process.
        snapshots: Whether this process keeps the model's snapshots.
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
        """Record the steps done; keep a snapshot when it is due; return whether to end.

        Args:
            steps: Of those that this process counts; None: it counts none.
            weights: Gives the model, flat in Keras' layout.
            last: The run ends here, before its limits are reached.
        """
        now = time.monotonic()
        if self._began is None:
            self._began = now
            # A process that counts no steps reports whole rounds; the first is worth keeping.
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
