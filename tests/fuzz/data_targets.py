"""Fuzz targets: training data files (images, labels, records, archives) and their index."""

from __future__ import annotations

import contextlib
import gzip
import io
import struct
import tarfile
import zlib

import numpy as np

from tests.fuzz.target import FOLDER, Reader, Target, joined
from thinwire.data.pipeline import decode
from thinwire.data.readers import adacomp as readers_adacomp
from thinwire.data.readers import cifar10, idx, tfrecords
from thinwire.ops.crc32c import masked_crc32c
from thinwire.ops.types import ConfigurationError

_PIXELS = 3072


# -- IDX -----------------------------------------------------------------------------------------


def idx_file(data: bytes) -> None:
    """Read images and labels, packed or not."""
    source = Reader(data)
    suffix = source.choice(("", ".gz"))
    first, second = source.piece(), source.rest()
    if suffix and source:
        second = gzip.compress(second, 1)
    images, labels = FOLDER.write(f"images{suffix}", first), FOLDER.write(f"labels{suffix}", second)
    with contextlib.suppress(ConfigurationError):
        found, numbers = idx.read_pair(images, labels)
        assert len(found) == len(numbers) and found.dtype == np.uint8
    with contextlib.suppress(ConfigurationError):
        idx.read(labels, ranks=(1,))


def _idx_seeds() -> list[bytes]:
    images = idx.header((2, 3, 3)) + bytes(range(18))
    labels = idx.header((2,)) + b"\1\2"
    bomb = gzip.compress(idx.header((2**32 - 1, 2**32 - 1, 9)) + bytes(100_000), mtime=0)
    return [
        b"\0" + joined([images]) + labels,
        b"\1" + joined([gzip.compress(images, mtime=0)]) + gzip.compress(labels, mtime=0),
        b"\1" + joined([bomb]) + bomb,
    ]


def adacomp(data: bytes) -> None:
    """Read a file of AdaComp's layout, with or without a header."""
    source = Reader(data)
    shape = source.choice(((), (2, 2, 1), (3, 3, 3), (28, 28, 1)))
    path = FOLDER.write("shard", source.rest())
    with contextlib.suppress(ConfigurationError):
        found = readers_adacomp._read_records(path, shape)
        assert found.shape[1:] == shape and len(found)


def _adacomp_seeds() -> list[bytes]:
    return [
        b"\0\1\2\3",
        b"\1" + bytes(8),
        b"\1" + idx.header((2, 2, 2)) + bytes(8),
        b"\2" + idx.header((1, 3, 3, 3)) + bytes(27),
    ]


# -- CIFAR-10 ------------------------------------------------------------------------------------


def cifar(data: bytes) -> None:
    """Read the test batch, from a file or from an archive."""
    source = Reader(data)
    kind, content = source.number() % 3, source.rest()
    folder = FOLDER.empty("cifar")
    # A record is mostly pixels, which need not be mutated.
    records = b"".join(bytes([label]) + bytes(_PIXELS) for label in content[:40]) + content[40:]
    if kind == 0:
        (folder / "test_batch.bin").write_bytes(records)
    elif kind == 1:
        (folder / "cifar-10-binary.tar.gz").write_bytes(content)
    else:
        (folder / "cifar-10-binary.tar.gz").write_bytes(_packed("b/test_batch.bin", records))
    with contextlib.suppress(ConfigurationError):
        found = cifar10.find(folder, "test")
        assert found is not None and len(found[0]) == len(found[1])
        assert found[1].min() >= 0 and found[1].max() < 10


def _packed(name: str, content: bytes) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as out:
        member = tarfile.TarInfo(name)
        member.size = len(content)
        out.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def _cifar_seeds() -> list[bytes]:
    packed = _packed("b/test_batch.bin", b"\3" + bytes(_PIXELS))
    return [b"\0\1\2\3", b"\1" + gzip.compress(packed, mtime=0), b"\2\1\2\3"]


# -- TFRecords -----------------------------------------------------------------------------------


def tfrecord(data: bytes) -> None:
    """Find the images in a file of records; the framing is added if the first byte requests it."""
    source = Reader(data)
    if source.number() % 2:
        content = source.rest()
    else:
        content = b"".join(_framed(piece) for piece in source.pieces())
    path = FOLDER.write("train-00000-of-00001", content)
    with contextlib.suppress(ConfigurationError):
        rows = tfrecords._scan(path)
        assert rows.shape[0] == 3
        assert (rows[0] >= 0).all() and (rows[1] > 0).all()
        assert (rows[0] + rows[1] <= len(content)).all()


def _framed(record: bytes) -> bytes:
    length = struct.pack("<Q", len(record))
    checksums = [struct.pack("<I", masked_crc32c(part)) for part in (length, record)]
    return length + checksums[0] + record + checksums[1]


def _example() -> bytes:
    image = b"\x0a\x0dimage/encoded\x12\x05\x0a\x03\x0a\x01x"
    label = b"\x0a\x11image/class/label\x12\x05\x1a\x03\x0a\x01\x07"
    features = b"".join(b"\x0a" + bytes([len(one)]) + one for one in (image, label))
    return b"\x0a" + bytes([len(features)]) + features


def _tfrecord_seeds() -> list[bytes]:
    packed = joined([_example(), _example()])
    return [b"\0" + packed, b"\1" + _framed(_example()) * 2]


def index_file(data: bytes) -> None:
    """Read the index file of TFRecord files."""
    source = Reader(data)
    state = [("train-00000-of-00001", 100, 5)]
    if source.number() % 2:
        path = FOLDER.write("kept.npz", source.rest())
    else:
        columns = [np.frombuffer(piece[: len(piece) // 8 * 8], "<i8") for piece in source.pieces()]
        columns += [np.zeros(0, np.int64)] * 4
        found = tfrecords.RecordIndex(*columns[:4])
        path = FOLDER.path / "kept.npz"
        tfrecords._save(path, state, found)
    known = tfrecords._load(path, state)
    if known is not None:
        assert ((known.starts >= 0) & (known.starts + known.lengths <= 100)).all()


def _index_seeds() -> list[bytes]:
    columns = [np.array(column, "<i8").tobytes() for column in ([5], [10], [1], [0, 1])]
    path, state = FOLDER.path / "seed.npz", [("train-00000-of-00001", 100, 5)]
    arrays = [np.frombuffer(column, "<i8") for column in columns]
    tfrecords._save(path, state, tfrecords.RecordIndex(*arrays))
    return [b"\0" + joined(columns), b"\1" + path.read_bytes()]


def image_size(data: bytes) -> None:
    """Read the size in an image's header."""
    with contextlib.suppress(ValueError):
        height, width = decode.image_size(data)
        assert height > 0 and width > 0
        box = decode.random_box(height, width, [0.5] * decode.WIDTH)
        assert 0 <= box[0] <= height - box[2] and 0 <= box[1] <= width - box[3]
        assert box[2] > 0 and box[3] > 0


def _image_seeds() -> list[bytes]:
    chunk = b"IHDR" + struct.pack(">IIBBBBB", 5, 4, 8, 2, 0, 0, 0)
    png = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk
    png += struct.pack(">I", zlib.crc32(chunk))
    jpeg = b"\xff\xd8\xff\xe0\0\4ab\xff\xff\xc0\0\x11\x08\0\4\0\5\3"
    return [png, jpeg, b"\xff\xd8" + b"\xff\xd0" * 9 + jpeg[2:]]


TARGETS = {
    "idx": Target("IDX files, plain and gzip", idx_file, _idx_seeds),
    "cifar": Target("CIFAR-10's batches and archives", cifar, _cifar_seeds),
    "tfrecord": Target("TFRecords of images", tfrecord, _tfrecord_seeds),
    "index_file": Target("the index kept beside TFRecords", index_file, _index_seeds),
    "adacomp": Target("AdaComp's files, with and without header", adacomp, _adacomp_seeds),
    "image_size": Target("headers of JPEG and PNG", image_size, _image_seeds, longest=512),
}
