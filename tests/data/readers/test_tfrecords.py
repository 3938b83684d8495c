"""The index of TFRecord files finds TensorFlow's records and rejects damaged records."""

import struct
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.data.imagenet_files import encoded, example, write_records
from thinwire.data.readers import tfrecords
from thinwire.ops.crc32c import masked_crc32c
from thinwire.ops.types import ConfigurationError


def write(path: Path, *records: bytes) -> Path:
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)
    return path


def files_in(folder: Path) -> list[Path]:
    return tfrecords.files_of([folder], ["train"])


def images_of(files: list[Path], found: tfrecords.RecordIndex) -> list[bytes]:
    images = []
    for number, path in enumerate(files):
        for row in range(*found.file_offsets[number : number + 2]):
            start, length = int(found.starts[row]), int(found.lengths[row])
            images.append(path.read_bytes()[start : start + length])
    return images


def test_every_image_and_label_is_found(tmp_path: Path) -> None:
    write_records(tmp_path)
    files = files_in(tmp_path)
    found = tfrecords.index(files)
    assert [path.name[-8:] for path in files] == ["of-00003"] * 3
    assert found.file_offsets.tolist() == [0, 5, 10, 15]
    assert found.labels.tolist() == [1] * 5 + [2] * 5 + [3] * 5
    assert images_of(files, found) == encoded("train")


def message(field: int, content: bytes) -> bytes:
    """A field of a message that is a message, a text or bytes."""
    length = bytes([len(content)]) if len(content) < 128 else bytes([len(content) % 128 + 128, 1])
    return bytes([field << 3 | 2]) + length + content


def with_features(*entries: tuple[bytes, bytes]) -> bytes:
    """An Example of these names and Features, in this order."""
    pairs = (message(1, name) + message(2, feature) for name, feature in entries)
    return message(1, b"".join(message(1, pair) for pair in pairs))


SEVEN = b"\x1a\x02\x08\x07"  # int64_list { value: 7 } in the unpacked form


def test_labels_of_all_kinds(tmp_path: Path) -> None:
    """Negative, large, and in the unpacked form that older writers use."""
    labels = [-1, 0, 127, 128, 2**40]
    records = [example(b"an image", label) for label in labels]
    image = message(1, message(1, b"x"))
    unpacked = with_features((b"image/encoded", image), (b"image/class/label", SEVEN))
    found = tfrecords.index([write(tmp_path / "a", *records, unpacked)])
    assert found.labels.tolist() == [*labels, 7]
    assert found.lengths.tolist() == [8] * 5 + [1]


def test_an_image_whose_first_bytes_occur_before_it(tmp_path: Path) -> None:
    image = b"\xff\xd8" + bytes(80) + b"the rest"
    record = with_features(
        (b"image/thumb", message(1, message(1, image[:70]))),
        (b"image/encoded", message(1, message(1, image))),
        (b"image/class/label", SEVEN),
    )
    files = [write(tmp_path / "a", record)]
    assert images_of(files, tfrecords.index(files)) == [image]


@pytest.mark.parametrize("content", [b"", b"123456789", bytes(range(64))])
def test_checksum_is_that_of_tensorflow(tmp_path: Path, content: bytes) -> None:
    written = write(tmp_path / "a", content).read_bytes()
    assert masked_crc32c(content) == struct.unpack("<I", written[-4:])[0]
    assert masked_crc32c(written[:8]) == struct.unpack("<I", written[8:12])[0]


@pytest.mark.parametrize(
    "name",
    [
        "train-00000-of-00001",
        "imagenet-train-00000-of-00001.tfrecord",
        "train.tfrecord-00000-of-00001",
    ],
)
def test_names(tmp_path: Path, name: str) -> None:
    write(tmp_path / name, example(b"x", 1))
    write(tmp_path / name.replace("train", "trained"), b"")
    assert [path.name for path in files_in(tmp_path)] == [name]


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    write_records(tmp_path)
    (tmp_path / "train-00001-of-00003").unlink()
    with pytest.raises(ConfigurationError, match="contains 2 TFRecord files .* and 1 is missing"):
        files_in(tmp_path)
    (tmp_path / "train-00001-of-00004").write_bytes(b"")
    with pytest.raises(ConfigurationError, match="0 to 3 of one set"):
        files_in(tmp_path)


RECORD = example(b"image" * 100, 1)
WITHOUT_LABEL = tf.train.Example(
    features=tf.train.Features(
        feature={"image/encoded": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"x"]))}
    )
).SerializeToString()


def header(length: int) -> bytes:
    """Return a record header that announces this many bytes, with a valid checksum."""
    announced = struct.pack("<Q", length)
    return announced + struct.pack("<I", masked_crc32c(announced))


def text_label() -> tf.train.Feature:
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"cat"]))


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda data: data[:-1], "record 1: .* ends 1 bytes before"),
        (lambda data: data[: len(data) // 2 + 5], "record 1: .*after 5 of 12 bytes"),
        (lambda data: b"\xff" + data[1:], "record 0: .*checksum"),
        (lambda data: b"not a record at all", "record 0: .*checksum"),
        (lambda data: data + header(2**40), "record 2: .* ends 10995[0-9]* bytes"),
        (lambda data: data[:20] + b"?" + data[21:], "record 0: corrupted record at 12"),
        (lambda data: data[:-20] + b"?" + data[-19:], r"record 1: corrupted record at \d+\. Exp"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, change, expected: str) -> None:
    path = write(tmp_path / "train-00000-of-00001", RECORD, RECORD)
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ConfigurationError, match=expected) as caught:
        tfrecords.index([path])
    assert str(path) in str(caught.value)
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        (WITHOUT_LABEL, "no image/class/label"),
        (b"", "no image/encoded"),
        (b"\x0f" + RECORD[1:], "Error parsing message"),
        (RECORD[:-1], "Error parsing message"),
        (example(b"", 1), "empty"),
        (example(b"x", 1, **{"image/class/label": text_label()}), "of another type"),
    ],
)
def test_records_without_what_is_needed(tmp_path: Path, record: bytes, expected: str) -> None:
    with pytest.raises(ConfigurationError, match=f"record 1: .*{expected}"):
        tfrecords.index([write(tmp_path / "a", RECORD, record)])


def test_the_index_is_kept_until_a_file_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(tmp_path / "train-00000-of-00001", RECORD)
    scanned = []
    scan = tfrecords._scan
    monkeypatch.setattr(tfrecords, "_scan", lambda path: scanned.append(path) or scan(path))
    first, again = tfrecords.index([path]), tfrecords.index([path])
    assert len(scanned) == 1
    for field in ("starts", "lengths", "labels", "file_offsets"):
        np.testing.assert_array_equal(getattr(first, field), getattr(again, field))
    write(path, RECORD, RECORD)
    assert len(tfrecords.index([path]).labels) == 2 and len(scanned) == 2
    (kept,) = tmp_path.glob(".thinwire-*")
    for damage in (b"", b"PK\x03\x04", kept.read_bytes()[:-100]):
        kept.write_bytes(damage)
        assert len(tfrecords.index([path]).labels) == 2
    assert len(scanned) == 5


def test_a_kept_index_that_points_beyond_the_file_is_not_used(tmp_path: Path) -> None:
    path = write(tmp_path / "train-00000-of-00001", RECORD)
    true = tfrecords.index([path])
    (kept,) = tmp_path.glob(".thinwire-*")
    with np.load(kept) as content:
        arrays = dict(content)
    np.savez(str(kept), **arrays | {"lengths": arrays["lengths"] + 10_000})
    assert tfrecords.index([path]).lengths.tolist() == true.lengths.tolist()


def test_a_folder_that_may_not_be_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(tfrecords, "replace_file", refuse)
    path = write(tmp_path / "train-00000-of-00001", RECORD)
    assert len(tfrecords.index([path]).labels) == 1
    assert [each.name for each in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("spoil", ["version", "encrypted", "an array"])
def test_a_damaged_index_is_made_again(tmp_path: Path, spoil: str) -> None:
    write_records(tmp_path)
    files = files_in(tmp_path)
    found = tfrecords.index(files)
    (kept,) = tmp_path.glob(".thinwire-train*.npz")
    content = bytearray(kept.read_bytes())
    directory = content.index(b"PK\1\2")
    if spoil == "version":
        content[directory + 6] = 200  # one that zipfile does not know
    elif spoil == "encrypted":
        content[directory + 8] |= 1
        content[content.index(b"PK\3\4") + 6] |= 1
    kept.write_bytes(bytes(content))
    if spoil == "an array":
        with kept.open("wb") as out:
            np.save(out, np.zeros(3))
    spoilt = kept.read_bytes()
    again = tfrecords.index(files)
    assert again.labels.tolist() == found.labels.tolist()
    assert kept.read_bytes() != spoilt
