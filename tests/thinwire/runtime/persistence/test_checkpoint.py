"""Checkpoints hold any plain state, survive kills, and detect damage."""

import errno
import logging
import math
import os
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as extra

from tests.checkpoint_files import arrays_of, entries, load
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.persistence import checkpoint_log
from thinwire.runtime.persistence.checkpoint import Checkpoints, DamagedCheckpointError
from thinwire.runtime.persistence.object_store import LocalObjects, StorageError

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


def saved(folder, step, state):
    """Save a checkpoint; return its log entry."""
    Checkpoints.in_folder(folder).save(step, state)
    return entries(folder)[-1]


def test_gives_back_what_it_was_given(tmp_path):
    assert same(load(saved(tmp_path / "new", 12, STATE)), (12, STATE))
    assert same(Checkpoints.in_folder(tmp_path / "new").load_latest(), (12, STATE))


def test_loaded_arrays_are_writable_and_aligned(tmp_path):
    _, state = load(saved(tmp_path, 0, {"a": np.ones(3), "b": np.float32(1), "c": STATE}))
    state["a"] += 1
    assert state["a"].flags.owndata or state["a"].flags.writeable


def test_accepts_strided_and_big_endian_arrays(tmp_path):
    state = {"strided": np.arange(10)[::-3], "fortran": np.ones((2, 3), order="F")}
    state["big"] = np.arange(3, dtype=">i4")
    _, loaded = load(saved(tmp_path, 0, state))
    assert same(loaded, state)


PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | extra.arrays(st.sampled_from(["f4", "u1", "i8", "?", "c8"]), extra.array_shapes()),
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
    _, loaded = load(saved(directory, 1, state))
    assert same(loaded, state)


def test_keeps_the_newest_and_clears_leftovers(tmp_path):
    checkpoints = Checkpoints.in_folder(tmp_path, keep=2)
    for name in ("log/.tmp-killed", "parts/.tmp-killed", "parts/killed-1-0.bin", "journal-1.bin"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"half")
    for step in (10, 20, 30):
        checkpoints.save(step, {"step": step, "w": np.ones(step)})
    kept = entries(tmp_path)
    assert [entry.name for entry in kept] == ["000000002.json", "000000003.json"]
    files = {path for path in tmp_path.rglob("*") if path.is_file()}
    assert files == {*kept, *map(arrays_of, kept), tmp_path / "journal-1.bin"}


def test_the_last_saved_is_the_newest_even_after_a_step_back(tmp_path):
    checkpoints = Checkpoints.in_folder(tmp_path, keep=2)
    checkpoints.save(300, {"life": 1})
    checkpoints.save(200, {"life": 2})
    checkpoints.save(200, {"life": 3})
    assert checkpoints.load_latest() == (200, {"life": 3})


def test_nothing_there_is_none(tmp_path):
    assert Checkpoints.in_folder(tmp_path / "missing").load_latest() is None
    assert Checkpoints.in_folder(tmp_path).load_latest() is None


def flip(path, position):
    data = bytearray(path.read_bytes())
    data[position] ^= 0x40
    path.write_bytes(data)


DAMAGE = {
    "truncated arrays": lambda at: arrays_of(at).write_bytes(b"\x00" * 8),
    "flipped array byte": lambda at: flip(arrays_of(at), 5),
    "flipped manifest byte": lambda at: flip(at, 60),
    "truncated manifest": lambda at: at.write_bytes(b'{"crc32":1'),
    "another format": lambda at: at.write_text('{"content":{"format":99}}'),
    "nested too deeply": lambda at: at.write_text("[" * 100_000),
    "missing arrays": lambda at: arrays_of(at).unlink(),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_one_is_reported_and_the_one_before_taken(tmp_path, caplog, damage):
    checkpoints = Checkpoints.in_folder(tmp_path)
    checkpoints.save(1, {"w": np.ones(4, np.float32)})
    newest = saved(tmp_path, 2, {"w": np.full(4, 2, np.float32)})
    DAMAGE[damage](newest)
    with caplog.at_level(logging.WARNING):
        step, state = checkpoints.load_latest()
    assert step == 1 and state["w"].tolist() == [1, 1, 1, 1] and checkpoints.num_skipped == 1
    assert newest.name in caplog.text
    with pytest.raises(DamagedCheckpointError, match=newest.name):
        load(newest)


def test_every_flipped_byte_is_noticed(tmp_path):
    entry = saved(tmp_path, 3, {"w": np.arange(5, dtype=np.int16), "n": 1.5})
    for path in (entry, arrays_of(entry)):
        whole = path.read_bytes()
        for position in range(len(whole.rstrip())):
            flip(path, position)
            with pytest.raises(DamagedCheckpointError):
                load(entry)
            path.write_bytes(whole)
    assert load(entry)[0] == 3


def test_none_whole_is_none(tmp_path):
    checkpoints = Checkpoints.in_folder(tmp_path)
    checkpoints.save(1, {})
    entries(tmp_path)[0].write_bytes(b"")
    assert checkpoints.load_latest() is None and checkpoints.num_skipped == 1
    assert checkpoints.load_values() is None and checkpoints.load_all() == []


def test_values_of_an_older_checkpoint_replace_a_damaged_entry(tmp_path):
    checkpoints = Checkpoints.in_folder(tmp_path)
    for step in (1, 2):
        checkpoints.save(step, {"step": step, "w": np.ones(4)})
    for entry in entries(tmp_path):
        arrays_of(entry).unlink()
    assert checkpoints.load_values()["step"] == 2, "arrays are not read"
    entries(tmp_path)[1].write_bytes(b"")
    assert checkpoints.load_values()["step"] == 1


def test_a_log_that_cannot_be_read_is_no_empty_log(tmp_path, monkeypatch):
    """A run would otherwise begin from nothing. A test as root may read every folder."""
    Checkpoints.in_folder(tmp_path).save(1, {})
    scan = os.scandir

    def refused(path):
        if str(path).endswith("log"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return scan(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(ConfigurationError, match="Permission denied"):
        Checkpoints.in_folder(tmp_path).load_latest()


def test_the_checkpoint_of_another_version_is_kept_and_named(tmp_path, monkeypatch):
    checkpoints = Checkpoints.in_folder(tmp_path, keep=2)
    checkpoints.save(1, {"w": np.ones(4, np.float32)})
    with monkeypatch.context() as later:
        later.setattr(checkpoint_log, "FORMAT_VERSION", checkpoint_log.FORMAT_VERSION + 1)
        newest = saved(tmp_path / "later", 2, {"w": np.zeros(4, np.float32)})
        newest = newest.rename(entries(tmp_path)[0].with_name("000000002.json"))
    words = (
        rf"{tmp_path} holds checkpoints of format 3, but this version of Thinwire reads format 2"
    )
    for attempt in (checkpoints.load_latest, lambda: checkpoints.save(3, {})):
        with pytest.raises(ConfigurationError, match=words):
            attempt()
    assert newest.exists() and len(entries(tmp_path)) == 2


def test_checkpoints_of_format_1_are_refused_and_kept(tmp_path):
    """In format 1 each checkpoint was a directory with two files."""
    before = tmp_path / "000012-step-40"
    before.mkdir()
    for name in ("arrays.bin", "manifest.json"):
        (before / name).write_bytes(b"{}")
    files = sorted(tmp_path.rglob("*"))
    checkpoints = Checkpoints.in_folder(tmp_path)
    words = (
        rf"{tmp_path} holds checkpoints of format 1 \(for example 000012-step-40\), but this "
        "version of Thinwire reads format 2; continue with the version that wrote the "
        "checkpoints, or start again with --overwrite"
    )
    for attempt in (
        checkpoints.load_latest,
        checkpoints.load_values,
        checkpoints.load_all,
        lambda: checkpoints.save(41, {"w": np.ones(4)}),
        lambda: checkpoints.log.take_over("PS 0"),
    ):
        with pytest.raises(ConfigurationError, match=words):
            attempt()
    assert sorted(tmp_path.rglob("*")) == files


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
        Checkpoints.in_folder(tmp_path).save(1, state)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_is_left_as_it_was(tmp_path, monkeypatch):
    """A checkpoint that cannot fit is not started, and a partial one is removed."""
    checkpoints = Checkpoints.in_folder(tmp_path)
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


def test_a_full_disk_keeps_no_parts_of_a_checkpoint_without_an_entry(tmp_path, monkeypatch):
    """Other processes need the space."""
    checkpoints = Checkpoints.in_folder(tmp_path)
    checkpoints.save(1, {"w": np.ones(4)})
    before, put = sorted(tmp_path.rglob("*")), LocalObjects.put

    def full(store, name, data):
        if name.startswith("log/"):
            raise StorageError(errno.ENOSPC, "No space left on device")
        put(store, name, data)

    with monkeypatch.context() as patch:
        patch.setattr(LocalObjects, "put", full)
        with pytest.raises(OSError, match="No space left"):
            checkpoints.save(2, {"w": np.ones(4)})
    assert sorted(tmp_path.rglob("*")) == before
    checkpoints.save(3, {"w": np.ones(4)})
    assert checkpoints.load_latest()[0] == 3


def test_a_failure_after_the_entry_keeps_the_checkpoint(tmp_path, monkeypatch):
    """Its name may be on the disk although the directory could not be synced."""
    checkpoints, put = Checkpoints.in_folder(tmp_path), LocalObjects.put

    def unsynced(store, name, data):
        put(store, name, data)
        if name.startswith("log/"):
            raise StorageError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(LocalObjects, "put", unsynced)
        with pytest.raises(OSError, match="Input/output error"):
            checkpoints.save(2, {"w": np.ones(4)})
    assert checkpoints.load_latest()[0] == 2
    checkpoints.save(3, {"w": np.ones(4)})
    assert [load(entry)[0] for entry in entries(tmp_path)] == [2, 3]


def test_a_folder_that_was_deleted_is_written_again(tmp_path):
    checkpoints = Checkpoints.in_folder(tmp_path / "ps-0")
    checkpoints.save(1, {"w": np.ones(4)})
    shutil.rmtree(tmp_path / "ps-0")
    for step in (2, 3):
        checkpoints.save(step, {"w": np.ones(4)})
    assert [load(entry)[0] for entry in entries(tmp_path / "ps-0")] == [2, 3]


def test_bad_numbers_are_refused(tmp_path):
    with pytest.raises(ValueError, match="keep"):
        Checkpoints.in_folder(tmp_path, keep=0)
    with pytest.raises(ValueError, match="step"):
        Checkpoints.in_folder(tmp_path).save(-1, {})
