"""Small CIFAR-10 in its published formats, written from their description."""

import struct
import tarfile
from pathlib import Path
from typing import Any

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


def write_pickled(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for stem, (pixels, labels) in batches().items():
        content = {
            b"data": pixels,
            b"labels": labels.tolist(),
            b"batch_label": b"a batch",
            b"filenames": [b"a.png"] * len(labels),
        }
        (folder / stem).write_bytes(python2_pickle(content))


def pack(folder: Path, archive: Path) -> None:
    """Pack a folder as it is published: it and its files."""
    with tarfile.open(archive, "w:gz") as out:
        out.add(folder, arcname=folder.name)


def python2_pickle(value: Any) -> bytes:
    """Pickle like cPickle of Python 2, protocol 2: texts of bytes, arrays by _reconstruct."""
    return b"\x80\x02" + _pickled(value) + b"."


def _pickled(value: Any) -> bytes:
    if isinstance(value, dict):
        items = b"".join(_pickled(key) + _pickled(item) for key, item in value.items())
        return b"}(" + items + b"u"
    if isinstance(value, list):
        return b"](" + b"".join(map(_pickled, value)) + b"e"
    if isinstance(value, bytes):
        short = len(value) < 256
        return (
            b"U" + bytes([len(value)]) if short else b"T" + struct.pack("<i", len(value))
        ) + value
    if isinstance(value, int):
        return b"K" + bytes([value]) if value < 256 else b"J" + struct.pack("<i", value)
    start = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    rows, columns = map(_pickled, value.shape)
    unset = b"J\xff\xff\xff\xff"
    kind = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNN" + 2 * unset + b"K\x00tb"
    return (
        start
        + b"(K\x01"
        + rows
        + columns
        + b"\x86"
        + kind
        + b"\x89"
        + _pickled(value.tobytes())
        + b"tb"
    )
