"""Pickles of data are read; pickles that name anything else are not run."""

import contextlib
import io
import os
import pickle
import pickletools
import tracemalloc

import numpy as np
import pytest

from tests.data.cifar_files import python2_pickle
from thinwire.data.readers.cifar10 import load_dict
from thinwire.ops.types import ConfigurationError

CONTENT = {
    b"batch_label": b"training batch 1 of 5",
    b"labels": [6, 9, 0],
    b"data": np.arange(12, dtype=np.uint8).reshape(3, 4),
    b"filenames": [b"leptodactylus_pentadactylus_s_000004.png"] * 3,
}


def load(content: bytes) -> dict:
    return load_dict(io.BytesIO(content), "the file")


def same(loaded: dict) -> None:
    assert loaded.keys() == CONTENT.keys()
    np.testing.assert_array_equal(loaded[b"data"], CONTENT[b"data"])
    assert loaded[b"data"].dtype == np.uint8
    assert all(loaded[key] == CONTENT[key] for key in CONTENT if key != b"data")


def test_as_python_2_wrote_it() -> None:
    content = python2_pickle(CONTENT)
    names = {argument for _, argument, _ in pickletools.genops(content) if argument is not None}
    assert "numpy.core.multiarray _reconstruct" in names and "numpy ndarray" in names
    assert "_codecs encode" not in names
    same(load(content))
    # The writer of these tests writes what pickle itself reads.
    same(pickle.loads(content, encoding="bytes"))  # noqa: S301


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_as_python_3_writes_it(protocol: int) -> None:
    same(load(pickle.dumps(CONTENT, protocol=protocol)))


def test_fortran_order() -> None:
    values = np.asfortranarray(CONTENT[b"data"])
    loaded = load(pickle.dumps({b"data": values}, protocol=2))
    np.testing.assert_array_equal(loaded[b"data"], values)


class Runs:
    def __reduce__(self) -> tuple:
        return os.mkdir, ("ran",)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (pickle.dumps({b"data": Runs()}, protocol=2), "names posix.mkdir"),
        (b"cos\nsystem\n(S'touch ran'\ntR.", "names os.system"),
        (b"c__builtin__\neval\n(S'1'\ntR.", "names __builtin__.eval"),
        (pickle.dumps({b"data": np.array([{}])}, protocol=2), "something else than unsigned bytes"),
        (pickle.dumps({b"data": np.arange(3)}, protocol=2), "something else than unsigned bytes"),
        (b"cnumpy\nndarray\n)R.", "calls numpy.ndarray"),
        (b"\x80\x02P1\n.", "outside of it|persistent"),
        (pickle.dumps([1, 2]), "holds a list"),
        (python2_pickle(CONTENT)[:-40], "."),
        (b"", "."),
        (b"not a pickle", "."),
    ],
)
def test_everything_else_is_refused(
    content: bytes, expected: str, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigurationError, match=f"the file cannot be read: .*({expected})"):
        load(content)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("shape", [b"K\x63K\x04\x86", b"J\xff\xff\xff\xffK\x04\x86"])
def test_an_array_that_lies_about_its_shape(shape: bytes) -> None:
    right = b"K\x03K\x04\x86"
    content = python2_pickle(CONTENT)
    assert content.count(right) == 1
    with pytest.raises(ConfigurationError, match="array of shape"):
        load(content.replace(right, shape))


@pytest.mark.parametrize(
    "content",
    [b"\x80\x02}r\x00\x00\x00\x04.", b"\x80\x04\x8e\x00\x00\x00\x40\x00\x00\x00\x00a."],
    ids=["place in the memo", "length of a text"],
)
def test_a_few_bytes_take_no_gigabytes(content):
    tracemalloc.start()
    try:
        with contextlib.suppress(ConfigurationError):
            load_dict(io.BytesIO(content), "here")
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
