"""A small CIFAR-10 in its binary format, generated from the format's description."""

import tarfile
from pathlib import Path

import numpy as np

STEMS = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
PER_BATCH = 4


def batches() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Stem -> (pixels [n, 3072] uint8 as stored, labels [n])."""
    rng = np.random.default_rng(10)
    return {
        stem: (
            rng.integers(256, size=(PER_BATCH, 3072), dtype=np.uint8),
            rng.integers(10, size=PER_BATCH),
        )
        for stem in STEMS
    }


def write_binary(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for stem, (pixels, labels) in batches().items():
        records = [
            bytes([label]) + row.tobytes() for row, label in zip(pixels, labels, strict=True)
        ]
        (folder / f"{stem}.bin").write_bytes(b"".join(records))


def pack(folder: Path, archive: Path, packing: str = "gz") -> None:
    """Put a folder and its files into an archive; the published one is packed by gzip."""
    with tarfile.open(archive, f"w:{packing}") as out:
        out.add(folder, arcname=folder.name)
