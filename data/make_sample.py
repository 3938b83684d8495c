"""Makes ``data/fashion_mnist_sample``: a small random sample of Fashion-MNIST, balanced by class.

Run ``python -m thinwire.data.make_sample SOURCE_DIR [OUT_DIR]``; SOURCE_DIR holds the four files of
the full data set. Equal source files, seeds and zlib versions give byte-identical sample files.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from thinwire.data.readers import idx

SEED = 20240
NUM_TRAIN = 10_000
NUM_TEST = 2_000
_HERE = Path(__file__).resolve().parent


def draw_balanced(labels: NDArray[np.uint8], count: int, seed: int) -> NDArray[np.int64]:
    """Return the positions of ``count`` random examples, equally many of each class.

    Args:
        labels: Class of each example, [N] uint8.
        count: Number of examples to draw; a multiple of the number of classes.
        seed: Seed of the random draw of the sample's examples.

    Raises:
        ValueError: ``count`` is not a multiple of the number of classes, or a class has too few
            examples.
    """
    classes, available = np.unique(labels, return_counts=True)
    per_class, remainder = divmod(count, len(classes))
    if remainder or per_class > available.min():
        raise ValueError(f"cannot draw {count} equally from classes with {available} examples")
    rng = np.random.default_rng(seed)
    chosen = [
        rng.choice(np.flatnonzero(labels == value), size=per_class, replace=False)
        for value in classes
    ]
    return rng.permutation(np.concatenate(chosen)).astype(np.int64)


def make_sample(source: Path, out: Path) -> None:
    """Write the four files of the Fashion-MNIST sample from the four files of the full data set."""
    out.mkdir(parents=True, exist_ok=True)
    for index, (prefix, count) in enumerate((("train", NUM_TRAIN), ("t10k", NUM_TEST))):
        names = (f"{prefix}-images-idx3-ubyte.gz", f"{prefix}-labels-idx1-ubyte.gz")
        images, labels = idx.read_pair(source / names[0], source / names[1])
        chosen = draw_balanced(labels, count, SEED + index)
        idx.write(out / names[0], images[chosen])
        idx.write(out / names[1], labels[chosen])


def main() -> None:
    """Parse the command line and write the sample of Fashion-MNIST."""
    parser = argparse.ArgumentParser(description="Make the shipped sample of Fashion-MNIST.")
    parser.add_argument("source", type=Path, help="folder with the four full Fashion-MNIST files")
    parser.add_argument("out", type=Path, nargs="?", default=_HERE / "fashion_mnist_sample")
    arguments = parser.parse_args()
    make_sample(arguments.source, arguments.out)


if __name__ == "__main__":
    main()
