"""A shard's restart with a damaged journal or damaged snapshots."""

import dataclasses
import random
import shutil

import pytest

from tests.checkpoint_files import arrays_of, entries
from tests.ps.journaled_run import JournaledRun, assert_same, everything, watched
from tests.ps.persistence.test_journal import METHODS, assert_back, live
from thinwire.ps.core import events
from thinwire.ps.persistence.journal import Journal, JournalPosition, numbers, path_of
from thinwire.ps.persistence.replay import ReplaySettings


def lasting(state):
    """The state that a restart does not change."""
    return {name: state[name] for name in ("model", "scheduler", "members", "averages")}


def flip(path, at=-1):
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


SNAPSHOTS = {
    "arrays damaged": lambda at: flip(arrays_of(at)),
    "arrays cut": lambda at: arrays_of(at).write_bytes(b"TW"),
    "arrays missing": lambda at: arrays_of(at).unlink(),
    "manifest damaged": lambda at: flip(at, 99),
    "manifest cut": lambda at: at.write_bytes(b'{"crc32":1'),
    "manifest missing": lambda at: at.unlink(),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A run with three snapshots, and events after each."""
    run = JournaledRun(tmp_path_factory.mktemp("saved"), METHODS["gsp"](), iter_max=250)
    run.join_all()
    for seed in range(3):
        live(run, 30, random.Random(seed))
        run.save()
    live(run, 20, random.Random(9))
    return run


@pytest.mark.parametrize("damage", SNAPSHOTS)
def test_a_damaged_snapshot_falls_back_to_those_before(saved, tmp_path, damage):
    """An earlier snapshot plus its journals holds all later events, down to the first one."""
    kept, saved.folder = saved.folder, tmp_path / "copy"
    shutil.copytree(kept, saved.folder)
    for _ in range(3):
        doomed = entries(saved.folder / "0")[-1]
        SNAPSHOTS[damage](doomed)
        assert_back(saved)
        doomed.unlink(missing_ok=True)  # so that the next snapshot differs
    saved.folder = kept


def test_lives_follow_each_other_in_one_journal(tmp_path):
    run = JournaledRun(tmp_path, METHODS["gsp"](), iter_max=300)
    run.join_all()
    rng = random.Random(4)
    for generation in range(1, 4):
        live(run, 40, rng)
        last = path_of(tmp_path / "0", numbers(tmp_path / "0")[-1])
        with open(last, "ab") as file:  # a record that the crash cut short
            file.write(b"\x40\x00\x00\x00torn")
        run.restart()
        assert run.shards[0].config.generation == generation
    live(run, 40, rng)
    for _ in range(3):  # even without the first snapshots of the later lives
        assert_back(run)
        entries(tmp_path / "0")[-1].unlink()
    assert_back(run)


@pytest.fixture(scope="module")
def chain(tmp_path_factory):
    """A run of one snapshot and three files; the state after each event; events of each file."""
    run = JournaledRun(tmp_path_factory.mktemp("chain"), METHODS["sparse"](), iter_max=99)
    states, counts = watched(run.shards[0]), []
    run.join_all()
    for _ in range(3):
        for _ in range(10):
            run.turn()
        counts.append(len(states) - 1 - sum(counts))
        run.journals[0].begin(ReplaySettings(run.shards[0].config, 10.0).to_plain())
    run.journals[0].close()
    path_of(run.folder / "0", 4).unlink()
    return run, states, counts


def cut_in_two(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


FILES = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: path.write_bytes(b""),
    "magic cut": lambda path: path.write_bytes(path.read_bytes()[:5]),
    "magic damaged": lambda path: flip(path, 3),
    "head damaged": lambda path: flip(path, 40),
    "head too long": lambda path: flip(path, 11),
    "head cut": lambda path: path.write_bytes(path.read_bytes()[:60]),
    "another's": lambda path: path.write_bytes(b"\x00" * 4096),
    "a byte damaged": lambda path: flip(path, path.stat().st_size // 2),
    "cut in two": cut_in_two,
}
WHOLE_FILES = ("a byte damaged", "cut in two")  # there is something before the damage
HARMLESS = ("missing", "empty", "magic cut", "head cut")  # of the last file: as if never begun


@pytest.mark.parametrize("number", [1, 2, 3])
@pytest.mark.parametrize("damage", FILES)
def test_a_chain_is_followed_up_to_the_damage(chain, tmp_path, damage, number):
    """Never beyond it, and never without a word."""
    run, states, counts = chain
    for each in (1, 2, 3):
        shutil.copy(path_of(run.folder / "0", each), path_of(tmp_path, each))
    FILES[damage](path_of(tmp_path, number))
    come, core = run.come_back(folder=tmp_path)
    before = sum(counts[: number - 1])
    most = before + counts[number - 1] - 1
    low, high = (before + 1, most) if damage in WHOLE_FILES else (before, before)
    assert low <= come.num_records <= high
    if number == 3 and damage in HARMLESS:
        assert come.damage is None
    else:
        named = f"journal-{number:06d}.bin" in come.damage or f"file {number}" in come.damage
        assert named and f"{come.num_records} events kept" in come.damage
    assert_same(come.core, states[come.num_records][0])
    if core is not None:
        assert_same(list(everything(core)), list(states[come.num_records]))


@pytest.mark.parametrize("damage", ["missing", "head damaged", "a byte damaged", "cut in two"])
def test_a_life_after_damage_goes_on_from_there(chain, tmp_path, damage):
    """Records behind the damage are ignored, in this restart and in all later restarts."""
    run, states, _ = chain
    for each in (1, 2, 3):
        shutil.copy(path_of(run.folder / "0", each), path_of(tmp_path, each))
    FILES[damage](path_of(tmp_path, 2))
    come, core = run.come_back(folder=tmp_path)
    assert come.damage
    config = core.config
    for generation in (1, 2):
        config = dataclasses.replace(config, generation=generation)
        life = Journal(tmp_path, run.coders[0], 112, come.place)
        life.begin(ReplaySettings(config, 10.0).to_plain())
        life.close()
        again, _ = run.come_back(folder=tmp_path)
        assert again.generation == generation and again.num_records == come.num_records
        assert_same(lasting(again.core), lasting(states[come.num_records][0]))
        assert again.damage is None or damage != "missing"
        come = dataclasses.replace(come, place=again.place)


def test_a_kill_between_the_journals_cut_and_its_snapshot_loses_nothing(tmp_path):
    run = JournaledRun(tmp_path, METHODS["gsp"](), iter_max=150)
    run.join_all()
    rng = random.Random(7)
    for _ in range(3):
        live(run, 15, rng)
        run.journals[0].begin(ReplaySettings(run.shards[0].config, 10.0).to_plain())
    assert_back(run)  # no event since
    live(run, 5, rng)
    assert_back(run)


def test_a_kill_during_recovery_changes_nothing(tmp_path):
    """At any point of the recovery the old snapshot and all files still give the same state."""
    run = JournaledRun(tmp_path, METHODS["gsp"](), iter_max=150)
    run.join_all()
    live(run, 60, random.Random(3))
    state = lasting(run.shards[0].state_dict())
    for generation in range(1, 4):
        come, core = run.come_back()
        assert come.damage is None and come.generation == generation - 1
        life = Journal(tmp_path / "0", run.coders[0], 112, come.place)
        config = dataclasses.replace(core.config, generation=generation)
        life.begin(ReplaySettings(config, 10.0).to_plain())
        life.close()  # here it is killed, before its first snapshot
        again, _ = run.come_back()
        assert_same(lasting(again.core), state)


def test_what_is_told_after_a_cut_comes_back_in_all_later_lives(chain, tmp_path):
    """Files that continued behind the damage are older than the file that continues before it."""
    run, _, _ = chain
    for each in (1, 2, 3):
        shutil.copy(path_of(run.folder / "0", each), path_of(tmp_path, each))
    flip(path_of(tmp_path, 1), path_of(tmp_path, 1).stat().st_size // 2)
    come, core = run.come_back(folder=tmp_path)
    kept = come.num_records
    for generation in (1, 2):
        config = dataclasses.replace(core.config, generation=generation)
        life = Journal(tmp_path, run.coders[0], 112, come.place)
        life.begin(ReplaySettings(config, 10.0).to_plain())
        life.append(events.Join(1, 99 + generation, False, "peer"), run.now)
        life.close()
        come, core = run.come_back(folder=tmp_path)
        kept += 1
        assert (come.num_records, come.generation) == (kept, generation)
    assert core.membership.incarnation_of(1) == 101


def test_no_generation_is_used_again_though_its_file_cannot_be_reached(chain, tmp_path):
    run, _, _ = chain
    shutil.copy(path_of(run.folder / "0", 1), path_of(tmp_path, 1))
    config = dataclasses.replace(run.shards[0].config, generation=7)
    lost = Journal(tmp_path, run.coders[0], 112, JournalPosition(2, 500))  # file 2 is missing
    lost.begin(ReplaySettings(config, 10.0).to_plain())
    lost.close()
    come, _ = run.come_back(folder=tmp_path)
    assert come.damage and come.generation == 7
