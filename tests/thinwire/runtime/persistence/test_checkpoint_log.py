"""Checkpoints as objects: complete or absent, and never mixed from two writers."""

import json
import secrets

import numpy as np
import pytest

from tests.object_storage import BUCKET, FailingObjects, environment_of, s3_server
from tests.thinwire.runtime.persistence.test_checkpoint import STATE, same
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.persistence import checkpoint_log
from thinwire.runtime.persistence.checkpoint import Checkpoints
from thinwire.runtime.persistence.checkpoint_log import CheckpointLog, Fenced
from thinwire.runtime.persistence.fsspec_objects import FsspecObjects, open_objects
from thinwire.runtime.persistence.object_store import (
    LocalObjects,
    ObjectExistsError,
    ObjectMissingError,
    StorageError,
)


@pytest.fixture(scope="module")
def s3():
    with s3_server() as environment, environment_of(environment):
        yield


@pytest.fixture(params=["folder", "memory", pytest.param("s3", marks=pytest.mark.engines)])
def store(request, tmp_path):
    name = secrets.token_hex(4)
    if request.param == "folder":
        return LocalObjects(tmp_path / name)
    if request.param == "memory":
        from fsspec.implementations.memory import MemoryFileSystem

        return FsspecObjects(MemoryFileSystem(), f"memory://{name}/ps-0")
    request.getfixturevalue("s3")
    return open_objects(f"s3://{BUCKET}/{name}", "checkpoint_dir", is_start=True)


@pytest.fixture
def memory():
    from fsspec.implementations.memory import MemoryFileSystem

    return FsspecObjects(MemoryFileSystem(), f"memory://{secrets.token_hex(4)}")


def state(step):
    return {"theta": np.full(300, step, np.float32), "clock": step, "name": "a", "none": []}


def owner(store, generation=None, keep=2, name="PS 0"):
    checkpoints = Checkpoints(store, keep, part_bytes=500)
    checkpoints.load_latest()
    if generation is None:
        generation = checkpoints.log.generation_before + 1
    assert checkpoints.log.claim(generation, name)
    return checkpoints


def newest(store):
    found = Checkpoints(store, part_bytes=500).load_latest()
    if found is None:
        return None
    step, kept = found
    np.testing.assert_array_equal(kept["theta"], np.full(300, step, np.float32))
    assert kept["clock"] == step
    return step


def referred(store):
    """Return the names that the log needs."""
    logs = [name for name in store.names() if name.startswith("log/")]
    contents = [json.loads(store.get(name))["content"] for name in logs]
    return {*logs, *(part["name"] for each in contents for part in each.get("parts", []))}


def test_objects_are_written_read_listed_and_removed(store):
    assert store.names() == []
    store.put("a/b", b"1")
    store.put("a/b", b"22")
    store.create("a/c", b"3")
    with pytest.raises(ObjectExistsError):
        store.create("a/c", b"4")
    with pytest.raises(ObjectMissingError):
        store.get("a/d")
    assert (store.names(), store.get("a/b"), store.get("a/c")) == (["a/b", "a/c"], b"22", b"3")
    assert store.below("a").names() == ["b", "c"]
    store.remove(["a/b", "a/b", "a/d"])
    assert store.names() == ["a/c"]
    store.check()
    assert store.names() == ["a/c"]


def test_what_is_saved_comes_back_and_the_oldest_go(store):
    assert newest(store) is None
    kept = owner(store)
    for step in range(1, 5):
        kept.save(step, state(step))
        assert newest(store) == step
    assert [each["clock"] for each in Checkpoints(store).load_all()] == [3, 4]
    assert set(store.names()) == referred(store)


def test_parts_of_any_size_hold_any_state(memory):
    """Arrays begin and end within parts, and the last array is empty."""
    for part_bytes in (1, 7, 64, 65, 10_000):
        checkpoints = Checkpoints(memory, part_bytes=part_bytes)
        checkpoints.save(12, STATE)
        assert same(checkpoints.load_latest(), (12, STATE))


def test_an_old_owner_that_wakes_up_cannot_write(store):
    old = owner(store, name="PS 0, pid 1")
    old.save(1, state(1))
    new = owner(store, name="PS 0, pid 2")
    with pytest.raises(Fenced, match="taken over by PS 0, pid 2, as generation 1; .* generation 0"):
        old.save(99, state(99))
    assert newest(store) == 1
    for step in range(2, 6):  # the claim itself is removed some day
        new.save(step, state(step))
    for _ in range(2):
        with pytest.raises(Fenced):
            old.save(99, state(99))
    assert newest(store) == 5
    assert set(store.names()) == referred(store)


def test_nobody_is_fenced_by_an_entry_that_it_has_read(memory):
    owner(memory).save(1, state(1))
    reader = Checkpoints(memory)
    reader.load_latest()
    reader.log.check_owner()
    owner(memory)
    with pytest.raises(Fenced):
        reader.log.check_owner()


def test_an_old_owner_in_mid_upload_is_fenced_at_the_manifest(memory):
    class Interrupted(FsspecObjects):
        def put(self, name, data):
            super().put(name, data)
            if not self.new:
                self.new.append(owner(memory, name="the successor"))

    slow = Interrupted(memory._files, memory.address)
    slow.new = [None]
    old = owner(slow)
    old.save(1, state(1))
    slow.new.clear()
    with pytest.raises(Fenced, match="the successor"):
        old.save(99, state(99))
    (new,) = slow.new
    assert newest(memory) == 1
    new.save(2, state(2))
    assert newest(memory) == 2
    assert set(memory.names()) == referred(memory), "what the old one had uploaded is removed"


def test_whoever_claims_has_seen_what_was_written_last(memory):
    old = owner(memory)
    new = Checkpoints(memory)
    new.load_latest()
    old.save(1, state(1))
    assert not new.log.claim(1, "new")
    assert new.load_latest()[0] == 1
    assert new.log.claim(1, "new")


@pytest.mark.parametrize("is_lost_reply", [False, True])
def test_a_storage_that_dies_at_any_request_leaves_the_newest_whole_one(memory, is_lost_reply):
    """Two saves, cut off at every request: the loaded checkpoint is complete, and the newest."""
    for most_writes in range(1, 40):
        store = memory.below(str(most_writes))
        owner(store).save(1, state(1))
        failing = FailingObjects(store, most_writes, is_lost_reply)
        done, failure = 1, None
        try:
            cut = owner(failing)
            for step in (2, 3):
                cut.save(step, state(step))
                done = step
        except (StorageError, ConfigurationError) as error:
            failure = error
        found = newest(store)
        assert found in (done, done + 1 if is_lost_reply else done), most_writes
        again = owner(store)
        again.save(9, state(9))
        assert newest(store) == 9
        assert set(store.names()) == referred(store)
        if failure is None and most_writes > 30:
            break
    else:
        pytest.fail("never came through")


def test_a_save_goes_on_after_a_reply_that_was_lost(memory):
    store = FailingObjects(memory, 1 + 3 + 1, is_lost_reply=True)  # claim, parts, the entry
    kept = owner(store)
    with pytest.raises(StorageError):
        kept.save(1, state(1))
    assert newest(memory) == 1
    kept.save(2, state(2))
    assert newest(memory) == 2
    assert set(memory.names()) >= referred(memory)


@pytest.mark.parametrize("damage", ["part changed", "part missing", "part cut", "entry changed"])
def test_a_damaged_one_is_passed_over(memory, caplog, damage):
    kept = owner(memory)
    kept.save(1, state(1))
    before = set(memory.names())
    kept.save(2, state(2))
    new = sorted(set(memory.names()) - before)
    entry, part = new[0], new[1]
    data = memory.get(part)
    if damage == "part changed":
        memory.put(part, b"x" + data[1:])
    elif damage == "part missing":
        memory.remove([part])
    elif damage == "part cut":
        memory.put(part, data[:-1])
    else:
        memory.put(entry, memory.get(entry).replace(b'"step":2', b'"step":7'))
    found = Checkpoints(memory)
    assert found.load_latest()[0] == 1 and found.num_skipped == 1
    assert "Skipping" in caplog.text


def test_a_storage_that_fails_is_no_damage(memory):
    owner(memory).save(1, state(1))

    class Away(FsspecObjects):
        def get(self, name):
            raise StorageError(f"cannot read {name}: the cable is out")

    with pytest.raises(ConfigurationError, match="the cable is out"):
        Checkpoints(Away(memory._files, memory.address)).load_latest()


def test_another_version_is_refused(memory, monkeypatch):
    with monkeypatch.context() as later:
        later.setattr(checkpoint_log, "FORMAT_VERSION", checkpoint_log.FORMAT_VERSION + 1)
        owner(memory).save(1, state(1))
    with pytest.raises(ConfigurationError, match="format 3, but this .* reads format 2"):
        newest(memory)
    assert len(memory.names()) == 4, "the entry and its parts"
    CheckpointLog(memory).take_over("--overwrite", discards=True)
    assert newest(memory) is None and set(memory.names()) == referred(memory)


def test_a_run_that_begins_anew_leaves_nothing_and_fences_the_old_one(memory):
    old = owner(memory)
    old.save(1, state(1))
    CheckpointLog(memory).take_over("--overwrite", discards=True)
    assert newest(memory) is None
    with pytest.raises(Fenced, match="--overwrite"):
        old.save(2, state(2))
    new = owner(memory)
    assert new.log.generation_before == 1
    new.save(1, state(1))
    assert newest(memory) == 1 and set(memory.names()) == referred(memory)
