"""The files that a starting shard finds, and the check that they are the shard's own."""

import errno
import threading

import numpy as np
import pytest

from tests.checkpoint_files import entries
from tests.command_line import given
from tests.virtual.run import MiniRun
from tests.virtual.toy import SPEC, method
from tests.waiting import patience
from thinwire.flags.run import read_run
from thinwire.ops.routing.counters import ReassemblyCounters
from thinwire.ops.types import ConfigurationError, ModelSpec, TensorSpec
from thinwire.ps.datagrams.counters import DatagramCounts
from thinwire.ps.persistence.journal import (
    HighWaterLog,
    HighWaterMark,
    JournaledCore,
    JournalPosition,
    numbers,
    path_of,
    read_mark,
)
from thinwire.ps.persistence.policy import JournalPolicy
from thinwire.ps.persistence.replay import Replayed
from thinwire.ps.persistence.shard_checkpoint import ShardCheckpoint, model_rows
from thinwire.ps.persistence.shard_store import SavedShard, Saver
from thinwire.runtime.persistence.checkpoint import Checkpoints
from thinwire.runtime.persistence.checkpoint_log import Fenced
from thinwire.runtime.run.resuming import OtherRun

RECEIVED = DatagramCounts({2: ReassemblyCounters.zero(3)}, {"unknown session": 4})


def contents(core, **more):
    return ShardCheckpoint(core=core, run_id="abc", model=model_rows(SPEC), **more)


def shard(folder, *flags, spec=SPEC):
    with given("--nb_workers=2", f"--run_dir={folder}", *flags):
        run = read_run()
    saved = SavedShard(run, "ps-0")
    saved.check(spec)
    return saved


def save(folder, stop_reason=None, *flags):
    saved = shard(folder, *flags)
    saved.open()
    core = {"theta": np.arange(3, dtype=np.float32), "generation": 0}
    core["lifecycle"] = {"stop_reason": stop_reason}
    received = {"bytes_down": {1: 10, 2: 20}, "reports": {(1, 2): "{}"}, "datagrams": RECEIVED}
    saved.put(7, contents(core, **received))
    saved.flush()


def test_a_new_run_finds_nothing(tmp_path):
    saved = shard(tmp_path)
    assert saved.last.core is None and saved.finished is None
    assert saved.last.run_id == "" and saved.last.reports == {} and saved.last.bytes_down == {}
    assert saved.last.datagrams == DatagramCounts()


def test_a_start_in_a_run_directory_writes_nothing(tmp_path):
    """The lock of the run directory excludes other writers, so no claim counts as a generation."""
    assert [shard(tmp_path).generation for _ in range(2)] == [0, 0]
    assert not (tmp_path / "checkpoints").exists()


def test_everything_comes_back(tmp_path):
    save(tmp_path)
    saved = shard(tmp_path)
    np.testing.assert_array_equal(saved.last.core["theta"], np.arange(3, dtype=np.float32))
    assert saved.last.run_id == "abc" and saved.finished is None
    assert saved.last.bytes_down == {1: 10, 2: 20} and saved.last.reports == {(1, 2): "{}"}
    assert saved.last.datagrams == RECEIVED


def test_a_raised_limit_makes_a_finished_run_go_on(tmp_path):
    save(tmp_path, "iter_max", "--iter_max=5")
    assert shard(tmp_path, "--iter_max=5").finished == "iter_max"
    assert shard(tmp_path, "--iter_max=6").finished is None


@pytest.mark.parametrize(
    ("flags", "spec"),
    [
        (("--seed=9",), SPEC),
        ((), ModelSpec((TensorSpec("upper", (9, 9)),))),
        (("--nb_ps=2",), SPEC),
    ],
    ids=["settings", "model", "shards"],
)
def test_another_run_is_refused(tmp_path, flags, spec):
    save(tmp_path)
    difference = "seed|upper|nb_ps"
    with pytest.raises(OtherRun, match=f"holds a run .*({difference}).*--overwrite"):
        shard(tmp_path, *flags, spec=spec)


def damage_newest(folder):
    entries(folder / "checkpoints" / "ps-0")[-1].write_text("{}")


def test_a_run_whose_checkpoints_are_all_damaged_is_not_begun_anew(tmp_path):
    save(tmp_path)
    save(tmp_path)
    damage_newest(tmp_path)
    assert shard(tmp_path).last.core is not None
    for path in (tmp_path / "checkpoints" / "ps-0" / "parts").iterdir():
        path.unlink()
    with pytest.raises(ConfigurationError, match=r"ps-0 holds 2 checkpoints.*all of them are dam"):
        shard(tmp_path)


def test_every_snapshot_on_disk_keeps_its_journal(tmp_path):
    """Snapshots of an earlier process count too, although the files that they need are unknown."""
    saved, folder = shard(tmp_path), tmp_path / "checkpoints" / "ps-0"
    saved.open()
    core = {
        "theta": np.arange(3, dtype=np.float32),
        "lifecycle": {"stop_reason": None},
        "generation": 0,
    }

    def cut(number):
        path_of(folder, number).touch()
        begun = {"journal": number} if number else {}
        saved.put(number, contents(core, **begun))
        saved.flush()
        return numbers(folder)

    folder.mkdir(parents=True)
    assert [cut(number) for number in range(1, 6)][-2:] == [[2, 3, 4], [3, 4, 5]]
    path_of(folder, 6).touch()  # begun, and killed before its snapshot was whole
    saved = shard(tmp_path)
    saved.open()
    assert [cut(7), cut(8), cut(9)] == [[3, 4, 5, 6, 7], [3, 4, 5, 6, 7, 8], [7, 8, 9]]


def test_what_was_reached_tells_how_many_updates_are_lost(tmp_path, caplog):
    """A mark of this life or a later one counts; an older one has been counted before."""
    run = MiniRun(method("bsp"), iter_max=99).run(60)
    folder, core = tmp_path / "checkpoints" / "ps-0", run.shards[0]
    version, state = core.version, core.state_dict() | {"generation": 3}
    for generation, more, lost in ((2, 9, 0), (3, 9, 9), (4, 7, 7), (3, 0, 0)):
        saved = shard(tmp_path)
        saved.open()
        saved.put(version, contents(state))
        saved.flush()
        mark = HighWaterLog(folder, HighWaterMark(generation, version - 1))
        for reached in range(version, version + more + 1):
            mark.record(reached)
        mark.close()
        saved = shard(tmp_path)
        assert saved.generation == max(generation, 3) + 1
        core.load_state_dict(saved.last.core)
        journaled = JournaledCore(core)
        caplog.clear()
        with caplog.at_level("INFO", logger="absl"):
            keeping = JournalPolicy(saved._run, "off", saved, None, SPEC)
            keeping.replay(None)
            keeping.begin(journaled, run.decoders[0], 10.0)
        assert keeping.recovered == {"replayed": 0, "cuts": []}
        assert core.counters.lost_updates == lost
        told = f"reached {version + lost}: {lost} updates are lost" if lost else "no update is"
        assert told in caplog.text or generation == 2
        journaled.close()


def test_each_update_is_marked_before_anybody_is_told(tmp_path):
    run, seen = MiniRun(method("asgd"), iter_max=20), []
    journaled, decoded = JournaledCore(run.shards[0]), run.decoded
    journaled.high_water = HighWaterLog(tmp_path, HighWaterMark(5, 0))
    journaled.config, journaled.membership = run.shards[0].config, run.shards[0].membership
    run.shards[0] = journaled

    def told(shard, reply):
        seen.append((reply.version, read_mark(tmp_path)))
        return decoded(shard, reply)

    run.decoded = told
    run.join_all()
    for _ in range(3):
        run.turn()
    assert seen == [(0, None), (0, None), *((step, HighWaterMark(5, step)) for step in (1, 2, 3))]


@pytest.mark.parametrize("data", [b"", b"x" * 19, b"x" * 20, b"x" * 21])
def test_a_damaged_mark_is_none(tmp_path, data):
    (tmp_path / "reached.bin").write_bytes(data)
    assert read_mark(tmp_path) is None


def test_a_disk_that_takes_no_marks_is_said_once(tmp_path, caplog):
    mark = HighWaterLog(tmp_path / "missing", HighWaterMark(1, 0))
    with caplog.at_level("INFO", logger="absl"):
        for version in range(9):
            mark.record(version)
    assert len(caplog.records) == 1 and "missing/reached.bin" in caplog.text


def test_a_run_directory_of_the_version_before_is_refused_by_a_sentence_that_helps(tmp_path):
    save(tmp_path)
    saved = shard(tmp_path)
    _, state = Checkpoints.in_folder(saved.folder).load_latest()
    del state["format"]  # as it was written then
    Checkpoints.in_folder(saved.folder).save(8, state)
    with pytest.raises(ConfigurationError) as refusal:
        shard(tmp_path)
    message = str(refusal.value)
    for fact in (f"--run_dir={tmp_path}", "format 1,", "format 4", "--overwrite"):
        assert fact in message


def test_another_machine_goes_on_from_stored_checkpoints(tmp_path, caplog):
    """Each machine has a separate run directory; journals of the same names lie in them."""
    stored = f"--checkpoint_dir={tmp_path / 'stored'}"

    def life(machine, journal):
        saved = shard(tmp_path / machine, stored)
        saved.open()
        core = {"theta": np.ones(3, np.float32), "generation": saved.generation}
        core["lifecycle"] = {"stop_reason": None}
        begun = {"journal": journal, "soft": {}, "recovered": saved.last.recovered}
        saved.put(7, contents(core, **begun))
        saved.flush()
        return saved

    assert life("one", 5).generation == 0
    old = shard(tmp_path / "one", stored)
    fenced = []
    old.open(fenced.append)
    assert life("two", 5).generation == 2
    back = shard(tmp_path / "one", stored)
    assert back.generation == 3 and back.last.run_id == "abc"
    assert back.replay(None, None) is None
    assert "is on another machine" in caplog.text
    old.put(9, contents(back.last.core))
    with pytest.raises(Fenced, match="taken over by PS 0, .* as generation 3"):
        old.flush()
    assert len(fenced) == 1


def test_a_run_elsewhere_is_refused_without_fencing_its_ps(tmp_path):
    stored = f"--checkpoint_dir={tmp_path / 'stored'}"
    save(tmp_path / "one", None, stored)
    with pytest.raises(ConfigurationError, match="--checkpoint_dir=.* holds a run .*method was"):
        shard(tmp_path / "two", stored, "--method=bsp")
    assert shard(tmp_path / "two", stored).generation == 1


def test_the_generation_of_a_damaged_snapshot_is_not_used_again(tmp_path):
    """Workers hold weights of it, and must not take this shard for the one that they knew."""
    for life in range(2):
        saved = shard(tmp_path)
        assert saved.generation == life
        saved.open()
        core = {"generation": life, "lifecycle": {"stop_reason": None}, "theta": np.ones(3)}
        saved.put(7 + life, contents(core))
        saved.flush()
    damage_newest(tmp_path)
    assert shard(tmp_path).generation > 1


def test_a_disk_that_was_full_once_fails_nothing_once_it_has_space():
    class Store:
        is_full, kept = True, 0

        def save(self, version, state):
            if self.is_full:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.kept = version

    saver = Saver(store := Store())
    saver.put(1, {})
    with pytest.raises(OSError, match="No space"):
        saver.flush()
    store.is_full = False
    saver.put(2, {})
    saver.flush()
    assert store.kept == 2


def test_of_snapshots_that_wait_the_newest_is_written_and_no_thread_stays():
    class Store:
        def __init__(self):
            self.versions, self.begun, self.may_end = [], threading.Event(), threading.Event()

        def save(self, version, state):
            self.begun.set()
            assert self.may_end.wait(patience(30))
            self.versions.append((version, threading.current_thread()))

    saver = Saver(store := Store())
    saver.put(1, {})
    assert store.begun.wait(patience(30))
    saver.put(2, {})
    saver.put(3, {})
    store.may_end.set()
    saver.flush()
    saver.put(4, {})
    saver.flush()
    assert [version for version, _ in store.versions] == [1, 3, 4]
    for _, thread in store.versions:
        thread.join(patience(30))
        assert not thread.is_alive()


@pytest.mark.parametrize("choice", ["on", "off"])
def test_whether_a_journal_is_kept_is_as_the_flag_says(tmp_path, choice):
    saved = shard(tmp_path)
    policy = JournalPolicy(saved._run, choice, saved, None, SPEC)
    assert policy.about == {"flag": choice, "on": choice == "on"}


def test_what_journals_restored_adds_up_over_lives_and_phases(tmp_path):
    saved = shard(tmp_path)
    saved.open()
    core = {"generation": 0, "lifecycle": {"stop_reason": None}, "theta": np.ones(3)}
    before = {"recovered": {"replayed": 30, "cuts": ["of the first"]}}
    saved.put(7, contents(core, **before))
    saved.flush()
    saved = shard(tmp_path)
    saved.replay = lambda make, coder: Replayed(core, JournalPosition(1, 0), 12, 0, "of this")
    policy = JournalPolicy(saved._run, "off", saved, None, SPEC)
    policy.replay(lambda config, seconds: None)
    expected = {"replayed": 42, "cuts": ["of the first", "of this"]}
    assert policy.recovered == expected
    run = MiniRun(method("bsp"))
    journaled = JournaledCore(run.shards[0])
    policy.begin(journaled, run.decoders[0], 10.0)
    following = JournalPolicy(saved._run, "off", saved, None, SPEC)
    journaled.continue_with(run.shards[0])
    following.start(journaled, run.decoders[0], 10.0)
    assert journaled.begin()["recovered"] == expected
    assert journaled.summary()["journal"]["cuts"] == expected["cuts"]
    journaled.close()
