"""IDX files survive a round trip; each kind of damage is rejected with the file's name."""

import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.data.readers import idx
from thinwire.ops.types import ConfigurationError

IMAGES = np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3)


@pytest.mark.parametrize("name", ["x-idx3-ubyte", "x-idx3-ubyte.gz"])
def test_round_trip(tmp_path: Path, name: str) -> None:
    idx.write(tmp_path / name, IMAGES)
    np.testing.assert_array_equal(idx.read(tmp_path / name, ranks=(3,)), IMAGES)


def test_bytes_are_the_published_format(tmp_path: Path) -> None:
    idx.write(tmp_path / "labels", np.array([7, 9], dtype=np.uint8))
    assert (tmp_path / "labels").read_bytes() == bytes.fromhex("00000801 00000002 0709")


def test_same_array_gives_same_compressed_bytes(tmp_path: Path) -> None:
    idx.write(tmp_path / "one.gz", IMAGES)
    idx.write(tmp_path / "two.gz", IMAGES)
    assert (tmp_path / "one.gz").read_bytes() == (tmp_path / "two.gz").read_bytes()


WHOLE = idx.header(IMAGES.shape) + IMAGES.tobytes()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "(none)"),
        (b"\0\0\x08\x01" + WHOLE[4:], "00 00 08 01"),
        (b"\0\0\x0d\x03" + WHOLE[4:], "00 00 08 03"),
        (WHOLE[:10], "header has 10 bytes, expected 16"),
        (WHOLE[:-1], "only 17 bytes of data"),
        (WHOLE + b"!", "more bytes of data"),
        (idx.header((2**32 - 1,) * 3), "only 0 bytes of data"),
    ],
)
def test_damage_is_named(tmp_path: Path, content: bytes, expected: str) -> None:
    path = tmp_path / "damaged"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match="damaged") as caught:
        idx.read(path, ranks=(3,))
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    "content", [WHOLE, gzip.compress(WHOLE, mtime=0)[:-9], b"\x1f\x8b\x08" + b"\xff" * 40]
)
def test_damaged_compression_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "damaged.gz").write_bytes(content)
    with pytest.raises(ConfigurationError, match=r"damaged\.gz"):
        idx.read(tmp_path / "damaged.gz", ranks=(3,))


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="absent"):
        idx.read(tmp_path / "absent", ranks=(3,))


def test_images_and_labels_must_agree(tmp_path: Path) -> None:
    idx.write(tmp_path / "images", IMAGES)
    idx.write(tmp_path / "labels", np.zeros(3, dtype=np.uint8))
    with pytest.raises(ConfigurationError, match="2 images but .*labels holds 3"):
        idx.read_pair(tmp_path / "images", tmp_path / "labels")


def test_only_bytes_are_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="float64"):
        idx.write(tmp_path / "x", np.zeros(3))


@settings(max_examples=60, deadline=None)
@given(position=st.integers(0, len(WHOLE) - 1), value=st.integers(0, 255))
def test_any_flipped_byte_is_refused_or_harmless(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int
) -> None:
    content = bytearray(WHOLE)
    content[position] = value
    path = tmp_path_factory.getbasetemp() / "flipped"
    path.write_bytes(content)
    try:
        assert idx.read(path, ranks=(3, 4)).size == IMAGES.size
    except ConfigurationError:
        assert position < 16


def test_no_images_of_a_size_that_no_array_has_are_refused(tmp_path):
    path = tmp_path / "images"
    path.write_bytes(idx.header((0, 2**32 - 1, 2**32 - 1)))
    with pytest.raises(ConfigurationError, match="images cannot be read: array is too big"):
        idx.read(path, ranks=(3,))
