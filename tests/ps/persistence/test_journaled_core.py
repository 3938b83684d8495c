"""The core journals events before it handles them; disk failures; when a journal is kept."""

import contextlib
import errno

import numpy as np
import pytest

from tests.pushes import push_event
from tests.virtual.run import MiniRun
from tests.virtual.shard import guarded, joined, of
from tests.virtual.toy import KERNELS, method
from thinwire.ops.types import ModelSpec, ShardLayout, Slice, TensorSpec, Update
from thinwire.ps.core import events
from thinwire.ps.persistence import journal
from thinwire.ps.persistence.journal import (
    STOP_REASON,
    Journal,
    JournaledCore,
    JournalFailed,
    path_of,
)
from thinwire.ps.persistence.journal_format import DamagedRecord, EventCoder, bodies
from thinwire.ps.persistence.policy import push_fraction
from thinwire.ps.persistence.replay import ReplaySettings
from thinwire.runtime.run.settings import EXIT_CONFIGURATION, EXIT_OF_STOP, is_finished

MODEL = ModelSpec((TensorSpec("kernel", (300, 400)), TensorSpec("b", (400,))))


class FullDisk:
    """A file on a disk with this many free bytes; a write that does not fit is cut short."""

    def __init__(self, path, space):
        self.file = open(path, "xb", buffering=0)  # noqa: SIM115 - it is the journal's to close
        self.space = space

    def write(self, data):
        if not self.space:
            raise OSError(errno.ENOSPC, "No space left on device")
        size = self.file.write(data[: self.space[0]])
        self.space[0] -= size
        if not self.space[0]:
            self.space.clear()
        return size

    def close(self):
        self.file.close()


class Written(MiniRun):
    """One shard that writes a journal on a disk with this many free bytes."""

    def __init__(self, folder, space):
        super().__init__(method("adacomp", 2, compression_rate=0.2), iter_max=500)
        core, self.folder = self.shards[0], folder
        self.coder = coder = EventCoder(self.layouts[0], self.method, KERNELS, core.averages.size)
        left = [space]
        self.journal = Journal(folder, coder, 112, create=lambda path: FullDisk(path, left))
        self.journaled = JournaledCore(core)
        self.journaled.write_to(self.journal, ReplaySettings(core.config, 10.0).to_plain())

    def feed(self, shard, event):
        core, self.shards = self.shards[0], [self.journaled]
        try:
            self.journaled.config = core.config
            return super().feed(shard, event)
        finally:
            self.shards = [core]


def written(run):
    """Return the events in the journal, up to the record that was cut short."""
    found = []
    with contextlib.suppress(DamagedRecord):
        for _, body in bodies(journal.contents(path_of(run.folder, 1))):
            found.append(body)
    return [run.coder.decode(body)[0] for body in found[1:]]  # behind the head


@pytest.mark.parametrize("space", range(1500, 1700, 29))
def test_a_full_disk_ends_the_run_with_what_was_acknowledged(tmp_path, space):
    run = Written(tmp_path, space)
    assert run.journaled.begin()["journal"] == 1
    run.join_all()
    while run.shards[0].stop_reason is None:
        assert run.turn()
    core, kept = run.shards[0], written(run)
    assert core.stop_reason == STOP_REASON
    assert any(isinstance(each, events.RunEnded) for _, each in run.actions)
    assert len(kept) == run.journal.num_records
    assert core.version == sum(isinstance(each, events.Push) for each in kept)
    text = str(run.journaled.failure)
    assert str(path_of(tmp_path, 1)) in text and "No space left on device" in text
    assert "free space" in text and "--journal=off" in text
    version = core.version
    run.turn()  # a retry, or another worker: answered, not applied
    assert core.version == version and run.journaled.begin().keys() == {"recovered"}


def test_a_full_disk_at_a_new_file_ends_the_run_before_the_next_event(tmp_path):
    run = Written(tmp_path, 1)
    assert "journal" not in run.journaled.begin()
    assert isinstance(run.journaled.failure, JournalFailed)
    run.join_all()
    assert run.shards[0].stop_reason == STOP_REASON and run.shards[0].version == 0


def test_the_exit_code_is_that_of_a_directory_that_cannot_be_written():
    assert EXIT_OF_STOP[STOP_REASON] == EXIT_CONFIGURATION
    assert not is_finished(None, STOP_REASON, None)  # the same command continues


def test_a_snapshot_comes_when_the_journal_has_become_long(tmp_path, monkeypatch):
    monkeypatch.setattr(journal, "LEAST_BYTES", 3000)
    run = Written(tmp_path, 1 << 30)
    run.journaled.begin()
    run.join_all()
    for _ in range(200):
        run.turn()
    taken = [each for _, each in run.actions if isinstance(each, events.SaveSnapshot)]
    assert taken and taken[0].state["model"]["version"] == taken[0].version > 0
    summary = run.journaled.summary()
    assert summary == {}  # no node has sent the summary's content
    run.journaled.about = {"on": True}
    found = run.journaled.summary()["journal"]
    assert found["events"] == run.journal.num_records and found["bytes"] > 3000
    assert found["replayed"] == 0 and found["cuts"] == []
    run.journaled.close()


@pytest.mark.parametrize(
    ("name", "choices", "low", "high"),
    [
        ("adacomp", {}, 0.008, 0.02),
        ("dgs", {}, 0.008, 0.02),
        ("dgc", {"warmup_epochs": 4}, 0.008, 0.02),
        ("adacomp", {"compression_rate": 0.3}, 0.2, 0.4),
        ("asgd", {"overrides": {"codec": "powersgd"}}, 0.005, 0.03),
        ("asgd", {"value_dtype": "int8"}, 0.24, 0.26),
        ("gsp", {}, 1.0, 1.0),
        ("dgt", {}, 1.0, 1.0),
        ("bsp", {"collective": "ring"}, 1.0, 1.0),
    ],
)
def test_the_size_of_pushes_is_measured(name, choices, low, high):
    assert low <= push_fraction(method(name, 2, **choices), MODEL) <= high


def test_a_following_shard_whose_disk_is_full_acknowledges_no_push(tmp_path):
    """A following shard cannot end the run; updates that it acknowledged would be in no journal."""
    core = joined(guarded(method("asgd"), leads=False))
    core.handle(events.MembershipEpoch(1, (1, 2), True, None, (1, 2)), 0.0)
    coder = EventCoder(ShardLayout((Slice(0, 0, 4),)), core.model.method, KERNELS)
    journaled, left = JournaledCore(core), [300]
    journaled.write_to(Journal(tmp_path, coder, 16, create=lambda path: FullDisk(path, left)), {})
    journaled.begin()
    update = Update(None, np.ones(4, np.float32))
    replies, step = [], 0
    while journaled.failure is None:
        step += 1
        event = push_event(1, 1, step, core.version, 0, 1, update)
        replies = of(events.Reply, journaled.handle(event, 0.0))
    applied = core.version
    assert step > 1 and not [each for each in replies if each.stop_reason is None]
    for again in (step, step + 1):  # a retry and later events
        event = push_event(1, 1, again, applied, 0, 1, update)
        assert journaled.handle(event, 1.0) == []
    assert core.version == applied


def test_the_last_snapshot_has_what_was_handled_while_it_was_made(tmp_path):
    run = Written(tmp_path, 1 << 30)
    run.journaled.begin()
    run.join_all()
    early = run.shards[0].snapshot()
    assert run.journaled.consistent(early) is early
    for _ in range(9):
        run.turn()
    run.feed(0, events.Stop("iter_max"))
    last = run.journaled.consistent(early)
    assert last["model"]["version"] == run.shards[0].version > early["model"]["version"]
    assert last["lifecycle"]["stop_reason"] == "iter_max"
    run.journaled.close()
    assert run.journaled.consistent(early) is early  # nothing is replayed on it any more
