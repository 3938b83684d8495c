"""The work every peer does, how it is measured, and how a peer reports.

Keras' mnist_cnn (1,199,882 parameters, Glorot-uniform weights, zero biases, dropout 0.25 and 0.5)
on Fashion-MNIST, SGD with momentum, one thread a worker. Imports neither TensorFlow nor torch, so
each peer's own virtual environment can use it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from data import idx

_ROOT = Path(__file__).resolve().parents[2]
_FOLDERS = (Path("/usr/share/datasets/fashion-mnist"), _ROOT / "data" / "fashion_mnist_sample")
NUM_PARAMETERS = 1_199_882
PIXEL_MEAN, PIXEL_DEVIATION = 72.94, 90.02  # of Fashion-MNIST


@dataclasses.dataclass(frozen=True)
class Work:
    """What to train, and how long."""

    seconds: float
    warmup_steps: int
    workers: int
    batch_size: int
    learning_rate: float
    momentum: float
    seed: int


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the options all peers share."""
    result = argparse.ArgumentParser(description=description)
    result.add_argument("--seconds", type=float, default=20.0, help="measured time")
    result.add_argument("--warmup_steps", type=int, default=30, help="steps before, per worker")
    result.add_argument("--workers", type=int, default=2)
    result.add_argument("--batch_size", type=int, default=64)
    result.add_argument("--learning_rate", type=float, default=0.01)
    result.add_argument("--momentum", type=float, default=0.9)
    result.add_argument("--seed", type=int, default=1)
    return result


def from_arguments(arguments: argparse.Namespace) -> Work:
    """Return the work asked for on the command line."""
    names = [field.name for field in dataclasses.fields(Work)]
    return Work(**{name: getattr(arguments, name) for name in names})


def files() -> tuple[Path, Path]:
    """Return the IDX files of training images and labels.

    Those of the full set where it is installed, else of the shipped sample.
    """
    folder = next(path for path in _FOLDERS if path.is_dir())
    return folder / "train-images-idx3-ubyte.gz", folder / "train-labels-idx1-ubyte.gz"


def load() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return training images float32 [N, 28, 28], standardised, and labels int64 [N]."""
    images, labels = idx.read_pair(*files())
    scaled = images.astype(np.float32)
    scaled -= PIXEL_MEAN
    scaled /= PIXEL_DEVIATION
    return scaled, labels.astype(np.int64)


def full_set_is_installed() -> bool:
    """Return whether `load` reads all 60,000 training images."""
    return _FOLDERS[0].is_dir()


def loopback_bytes() -> int:
    """Return the bytes that the loopback interface of this network namespace has carried."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == "lo":
            return int(counters.split()[0])
    return 0


def report(peer: str, work: Work, steps: int, seconds: float, num_bytes: int) -> None:
    """Print the one JSON line of a peer; `steps` are those of all workers together."""
    result = {
        "peer": peer,
        "samples_per_second": round(steps * work.batch_size / seconds, 1),
        "bytes_per_step": round(num_bytes / steps),
        "steps": steps,
        "seconds": round(seconds, 2),
    }
    sys.stdout.write(json.dumps(result) + "\n")
    sys.stdout.flush()
