"""Checkpoints hold any plain state, survive kills, and detect damage."""

import errno
import logging
import math
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

from thinwire.runtime.persistence.checkpoint import (
    Checkpoints,
    DamagedCheckpointError,
    copy_state,
    load,
)

STATE = {
    "weights": np.arange(6, dtype=np.float32).reshape(2, 3),
    "clocks": {1: 5, 2: 7},
    "rng": np.random.default_rng(3).bit_generator.state,
    "rate": 0.1,
    "name": "caf\u00e9 \ud800",
    "blob": b"\x00\xff",
    "flags": [True, None, (1, "two"), math.inf],
    "scalar": np.float64(2.5),
    "none_left": np.empty((0, 4), np.int64),
}


def same(left, right) -> bool:
    """Equality that also compares types, dtypes, shapes and bits."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, (np.ndarray, np.generic)):
        dtypes = left.dtype == right.dtype and left.shape == right.shape
        return dtypes and left.tobytes() == right.tobytes()
    return left == right or left != left


def test_gives_back_what_it_was_given(tmp_path):
    path = Checkpoints(tmp_path / "new").save(12, STATE)
    assert same(load(path), (12, STATE))
    assert same(Checkpoints(tmp_path / "new").load_latest(), (12, STATE))


def test_loaded_arrays_are_writable_and_aligned(tmp_path):
    _, state = load(
        Checkpoints(tmp_path).save(0, {"a": np.ones(3), "b": np.float32(1), "c": STATE})
    )
    state["a"] += 1
    assert state["a"].flags.owndata or state["a"].flags.writeable


def test_accepts_strided_and_big_endian_arrays(tmp_path):
    state = {"strided": np.arange(10)[::-3], "fortran": np.ones((2, 3), order="F")}
    state["big"] = np.arange(3, dtype=">i4")
    _, loaded = load(Checkpoints(tmp_path).save(0, state))
    assert same(loaded, state)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | arrays_of.arrays(st.sampled_from(["f4", "u1", "i8", "?", "c8"]), arrays_of.array_shapes()),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=60, deadline=None)
@given(state=st.dictionaries(st.text(max_size=5), PLAIN, max_size=4))
def test_any_plain_state_round_trips(tmp_path_factory, state):
    directory = tmp_path_factory.mktemp("any")
    _, loaded = load(Checkpoints(directory).save(1, state))
    assert same(loaded, state)


def test_keeps_the_newest_and_clears_leftovers(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    (tmp_path / ".tmp-killed").mkdir()
    (tmp_path / ".tmp-killed" / "arrays.bin").write_bytes(b"half")
    for step in (10, 20, 30):
        checkpoints.save(step, {"step": step})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000002-step-20", "000003-step-30"]


def test_the_last_saved_is_the_newest_even_after_a_step_back(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(300, {"life": 1})
    checkpoints.save(200, {"life": 2})
    checkpoints.save(200, {"life": 3})
    assert checkpoints.load_latest() == (200, {"life": 3})


def test_nothing_there_is_none(tmp_path):
    assert Checkpoints(tmp_path / "missing").load_latest() is None
    assert Checkpoints(tmp_path).load_latest() is None


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 0x40
    path.write_bytes(data)


DAMAGE = {
    "truncated arrays": lambda at: (at / "arrays.bin").write_bytes(b"\x00" * 8),
    "flipped array byte": lambda at: flip(at / "arrays.bin", 5),
    "flipped manifest byte": lambda at: flip(at / "manifest.json", 60),
    "truncated manifest": lambda at: (at / "manifest.json").write_bytes(b'{"crc32":1'),
    "another format": lambda at: (at / "manifest.json").write_text('{"content":{"format":99}}'),
    "nested too deeply": lambda at: (at / "manifest.json").write_text("[" * 100_000),
    "missing manifest": lambda at: (at / "manifest.json").unlink(),
    "missing arrays": lambda at: (at / "arrays.bin").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_one_is_reported_and_the_one_before_taken(tmp_path, caplog, damage):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"w": np.ones(4, np.float32)})
    newest = checkpoints.save(2, {"w": np.full(4, 2, np.float32)})
    DAMAGE[damage](newest)
    with caplog.at_level(logging.WARNING):
        step, state = checkpoints.load_latest()
    assert step == 1 and state["w"].tolist() == [1, 1, 1, 1]
    assert newest.name in caplog.text
    with pytest.raises(DamagedCheckpointError, match=newest.name):
        load(newest)


def test_every_flipped_byte_is_noticed(tmp_path):
    path = Checkpoints(tmp_path).save(3, {"w": np.arange(5, dtype=np.int16), "n": 1.5})
    for name in ("manifest.json", "arrays.bin"):
        whole = (path / name).read_bytes()
        for position in range(len(whole.rstrip())):
            flip(path / name, position)
            with pytest.raises(DamagedCheckpointError):
                load(path)
            (path / name).write_bytes(whole)
    assert load(path)[0] == 3


def test_none_whole_is_none(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    (checkpoints.save(1, {}) / "manifest.json").unlink()
    assert checkpoints.load_latest() is None


@pytest.mark.parametrize(
    ("state", "message"),
    [
        ({"f": print}, r"state\['f'\]"),
        ({"a": {"b": [np.array([object()])]}}, r"state\['a'\]\['b'\]\[0\]"),
        ({"a": {1.5: 2}}, "1.5"),
    ],
)
def test_refuses_what_is_not_plain_data(tmp_path, state, message):
    with pytest.raises(TypeError, match=message):
        Checkpoints(tmp_path).save(1, state)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_left_as_it_was(tmp_path, monkeypatch):
    """A checkpoint that cannot fit is not started, and a partial one is removed."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, {"w": np.ones(4)})
    before = sorted(tmp_path.rglob("*"))

    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space left"):
            checkpoints.save(2, {"w": np.ones(4)})
    assert sorted(tmp_path.rglob("*")) == before
    full = os.statvfs_result((512, 512, 9, 9, 2, 9, 9, 9, 0, 255))
    with monkeypatch.context() as patch:
        patch.setattr(os, "statvfs", lambda folder: full)
        with pytest.raises(OSError, match="1032 bytes are needed, 1024 are free") as caught:
            checkpoints.save(2, {"w": np.ones(129)})
        checkpoints.save(3, {"w": np.ones(128)})
    assert caught.value.errno == errno.ENOSPC and checkpoints.load_latest()[0] == 3


def test_bad_numbers_are_refused(tmp_path):
    with pytest.raises(ValueError, match="keep"):
        Checkpoints(tmp_path, keep=0)
    with pytest.raises(ValueError, match="step"):
        Checkpoints(tmp_path).save(-1, {})


def test_a_copy_does_not_follow_the_original():
    state = {"w": np.zeros(2), "inner": [{"n": np.ones(1)}]}
    copied = copy_state(state)
    state["w"] += 1
    state["inner"][0]["n"] += 1
    assert copied["w"].tolist() == [0, 0] and copied["inner"][0]["n"].tolist() == [1]
