"""A restarted shard has the state of its journal, bit for bit."""

import copy
import dataclasses
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.checkpoint_files import entries
from tests.ps.journaled_run import JournaledRun, assert_same, everything, watched
from tests.ps.persistence.test_shard_store import contents, shard
from tests.pushes import push_event, with_numbers
from tests.virtual.toy import SPEC, method
from thinwire.ops.methods.builder import adopt
from thinwire.ops.offer import Described, LossScale, Offer, OptimizerOffer
from thinwire.ops.sync.groups import AutoGroups
from thinwire.ops.types import Update
from thinwire.ps.core import events
from thinwire.ps.core.core import PsCore
from thinwire.ps.core.serialization import to_plain
from thinwire.ps.persistence import journal, journal_format
from thinwire.ps.persistence.journal import numbers, path_of
from thinwire.ps.persistence.replay import ReplaySettings
from thinwire.runtime.persistence.checkpoint import Checkpoints
from thinwire.runtime.run.settings import FINISHED

NOTHING = Update(np.empty(0, np.int64), np.empty(0, np.float32))
METHODS = {
    "adacomp": lambda: method("adacomp", 3, compression_rate=0.2),
    "dgs": lambda: method("dgs", 3, compression_rate=0.2),
    "sparse": lambda: method(
        "dgs", 3, compression_rate=0.1, overrides={"down_codec": "sparse"}, down_ratio=0.2
    ),
    "dgc": lambda: method("dgc", 3, compression_rate=0.2),
    "bsp": lambda: method("bsp", 3),
    "gsp": lambda: method("gsp", 3, groups=((1, 2), (3,))),
    "auto": lambda: method("gsp", 3, auto_groups=AutoGroups(10, 0.5)),
    "dcasgd": lambda: method("dcasgd", 3),
    "adam": lambda: method("asgd", 3, overrides={"server_optimizer": "adam"}),
    "powersgd": lambda: method("asgd", 3, overrides={"codec": "powersgd"}),
    "esync": lambda: method("esync", 3),
    "dgt": lambda: method("dgt", 3),
    "diloco": lambda: method("diloco", 3, local_steps=2, local_optimizer="sgd"),
    "fedopt": lambda: method("fedopt", 3, local_steps=2, bias_correction=True),
    "relay": lambda: method(
        "bsp",
        3,
        overrides={"codec": "chunked_topk", "down_codec": "relay"},
        **{"chunk": 8, "chunk_k": 2, "value_dtype": "int2", "error_feedback": True},
    ),
    "private": lambda: method(
        "bsp", 3, overrides={"pacer": "fixed"}, local_steps=2, dp_clip=0.5, dp_noise=1.0
    ),
}


class Lossy(JournaledRun):
    """Pushes arrive as an assembler makes them: some of their blocks are missing."""

    def feed(self, shard, event):
        if isinstance(event, events.Push) and self.rng.random() < 0.8:
            size = self.layouts[shard].size
            kept = np.flatnonzero(np.random.default_rng(event.head.step).random(size) < 0.6)
            update = Update(kept, event.update.values[kept])
            event = dataclasses.replace(event, update=update)
        return super().feed(shard, event)


class Scripted(JournaledRun):
    """Some pushes set a rate, and some overflow."""

    def feed(self, shard, event):
        if isinstance(event, events.Push):
            chance = np.random.default_rng([event.worker, event.head.step]).random()
            scale = 8.0 if chance < 0.5 else 4.0
            event = with_numbers(event, loss_scale=scale)
            if chance < 0.1:
                event = with_numbers(event, overflow=True)
                event = dataclasses.replace(event, update=NOTHING)
            elif chance < 0.2:
                event = with_numbers(event, learning_rate=chance)
        return super().feed(shard, event)


class Setting(JournaledRun):
    """Some scripts set weights themselves: a few of them, or all."""

    def feed(self, shard, event):
        if isinstance(event, events.Push):
            rng = np.random.default_rng([event.worker, event.head.step])
            size = self.layouts[shard].size
            values = rng.normal(0, 0.1, size).astype(np.float32)
            few = np.flatnonzero(rng.random(size) < 0.2)
            changes = (None, Update(few, values[few]), Update(None, values))
            change = changes[rng.integers(3)] if len(few) else None
            event = dataclasses.replace(event, change=change)
        return super().feed(shard, event)


def scripted(name, **config):
    """A PS that steps as a script's compiled optimizer does."""
    chosen = method("asgd", 3, overrides={"server_optimizer": "script"})
    schedule = {"initial_learning_rate": 0.1, "decay_steps": 30, "decay_rate": 0.5}
    rate = {"name": "ExponentialDecay", "config": schedule}
    compiled = Described(name, {"learning_rate": rate} | config)
    return adopt(chosen, Offer(SPEC, optimizers=(OptimizerOffer(compiled),)))


SCRIPTED = {
    "sgd": lambda: scripted("SGD"),
    "momentum": lambda: scripted("SGD", momentum=0.9),
    "nadam": lambda: scripted("Nadam", use_ema=True, ema_overwrite_frequency=7),
    "muon": lambda: scripted("Muon", gradient_accumulation_steps=2),
}


def live(run, turns, rng):
    """Run steps, silences, losses, returns and snapshots."""
    for _ in range(turns):
        chance = rng.random()
        worker = run.workers[rng.randint(1, len(run.workers))]
        if chance < 0.03:
            run.now += 4.0
            run.feed(0, events.Tick())
        elif chance < 0.06:
            for shard in range(run.nb_ps):
                run.feed(shard, events.WorkerDisconnected(worker.number, worker.incarnation))
            worker.join(reconnects=True)
        elif chance < 0.07:
            run.save()
        elif chance < 0.09:
            run.feed(0, events.EvaluationPull(1))
        else:
            run.feed(0, events.WorkerAlive(worker.number))
            run.turn()


def assert_back(run, shard=0, folder=None):
    come, core = run.come_back(shard, folder)
    assert come.damage is None
    assert core is not run.shards[shard]
    for was, now in zip(everything(run.shards[shard]), everything(core), strict=True):
        assert_same(was, now)
    return come


@pytest.mark.parametrize(("name", "nb_ps"), [*((name, 1) for name in METHODS), ("gsp", 2)])
def test_replay_gives_the_very_same_shard(tmp_path, name, nb_ps):
    rng = random.Random(name)
    kind = Lossy if name == "dgt" else JournaledRun
    run = kind(tmp_path, METHODS[name](), iter_max=150, nb_ps=nb_ps)
    run.join_all()
    live(run, rng.randint(40, 130), rng)
    for number in range(nb_ps):
        assert_back(run, number)
        assert run.shards[number].version > 5


@pytest.mark.parametrize("name", ["sparse", "gsp", "adam"])
def test_replay_adds_what_scripts_have_set(tmp_path, name):
    run = Setting(tmp_path, METHODS[name](), iter_max=150, nb_ps=2)
    run.join_all()
    live(run, 70, random.Random(name))
    for number in range(2):
        assert_back(run, number)
        assert run.shards[number].version > 5


@pytest.mark.parametrize("name", SCRIPTED)
def test_replay_gives_the_very_same_optimizer_of_a_script(tmp_path, name):
    rng, scale = random.Random(name), LossScale(8.0, 9)
    run = Scripted(tmp_path, SCRIPTED[name](), iter_max=150, nb_ps=2, loss_scale=scale)
    run.join_all()
    live(run, 70, rng)
    for number in range(2):
        assert_back(run, number)
        assert run.shards[number].version > 5
        assert run.shards[number].model.loss_scale != 8.0


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A run, the state after each of its events, and the bytes of its journal."""
    run = JournaledRun(tmp_path_factory.mktemp("recorded"), METHODS["sparse"](), iter_max=99)
    states = watched(run.shards[0])
    run.join_all()
    for _ in range(30):
        run.turn()
    return run, states, path_of(run.folder / "0", 1).read_bytes()


def ends_of(data):
    """Return where the records of a file end; the first is the head."""
    return [end + 8 for end, _ in journal_format.bodies(memoryview(data)[8:])]


def come_back_from(tmp_path, run, data):
    path_of(tmp_path, 1).write_bytes(data)
    return run.come_back(folder=tmp_path)


def test_every_prefix_gives_the_whole_records_in_it(recorded):
    _, states, data = recorded
    ends = ends_of(data)
    assert len(ends) == len(states)
    for size in range(8, len(data)):
        found = []
        try:
            for end, _ in journal_format.bodies(memoryview(data)[8:size]):
                found.append(end + 8)
        except journal_format.DamagedRecord as error:
            assert "cut short" in str(error) and size not in ends
        else:
            assert size == 8 or size in ends
        assert found == [end for end in ends if end <= size]


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_a_torn_tail_is_cut_at_the_last_whole_record(recorded, tmp_path_factory, data):
    run, states, written = recorded
    ends = ends_of(written)
    size = data.draw(st.integers(ends[0], len(written)))
    come, core = come_back_from(tmp_path_factory.mktemp("torn"), run, written[:size])
    count = sum(end <= size for end in ends) - 1
    assert come.num_records == count and come.place.offset == ends[count] - 8
    assert (come.damage is None) == (size in ends)
    assert_same(list(everything(core)), list(states[count]))


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_a_changed_byte_is_found(recorded, tmp_path_factory, data):
    run, states, written = recorded
    ends = ends_of(written)
    place = data.draw(st.integers(ends[0], len(written) - 1))
    changed = bytearray(written)
    changed[place] ^= data.draw(st.integers(1, 255))
    come, core = come_back_from(tmp_path_factory.mktemp("changed"), run, bytes(changed))
    count = sum(end <= place for end in ends) - 1
    assert come.num_records == count
    assert "journal-000001.bin" in come.damage and f"{count} events kept" in come.damage
    assert_same(list(everything(core)), list(states[count]))


@pytest.mark.parametrize("data", [b"", b"TWJR", b"garbage of some length", None])
def test_without_a_journal_the_snapshot_is_what_is_left(recorded, tmp_path, data):
    run, states, _ = recorded
    if data is not None:
        path_of(tmp_path, 1).write_bytes(data)
    come, core = run.come_back(folder=tmp_path)
    assert core is None and come.num_records == 0 and come.damage
    assert_same(come.core, states[0][0])


def test_zeros_at_the_end_are_no_records(recorded, tmp_path):
    run, states, written = recorded
    come, core = come_back_from(tmp_path, run, written + bytes(4096))
    assert come.num_records == len(states) - 1 and "checksum" in come.damage
    assert_same(list(everything(core)), list(states[-1]))


def test_an_event_that_breaks_the_core_is_left_out(recorded, tmp_path, monkeypatch):
    run, states, written = recorded
    make, counts = type(run).fresh, []

    class Fragile(PsCore):
        def handle(self, event, now):
            counts[-1] += 1
            if counts[-1] == 21:
                self.model.version += 1
                raise RuntimeError("a bug")
            return super().handle(event, now)

    def fragile(self, *arguments):
        core = make(self, *arguments)
        core.__class__ = Fragile
        counts.append(0)
        return core

    monkeypatch.setattr(type(run), "fresh", fragile)
    come, core = come_back_from(tmp_path, run, written)
    assert counts == [21, 20] and come.num_records == 20
    assert "RuntimeError: a bug" in come.damage
    assert_same(list(everything(core)), list(states[20]))


def test_old_files_go_and_a_snapshot_is_due(tmp_path, monkeypatch):
    run = JournaledRun(tmp_path, METHODS["adacomp"](), iter_max=999)
    monkeypatch.setattr(run.journals[0], "_most_bytes", 2000)
    run.join_all()
    while not run.journals[0].is_due:
        run.turn()
    run.save()
    assert not run.journals[0].is_due
    assert numbers(tmp_path / "0") == [1, 2]
    journal.remove_before(tmp_path / "0", 2)
    assert numbers(tmp_path / "0") == [2]
    assert_back(run)
    assert len(entries(tmp_path / "0")) == 2
    assert Checkpoints.in_folder(tmp_path / "0").load_latest()[1]["journal"] == 2


def test_an_end_that_only_the_journal_knows_is_left_to_do(tmp_path):
    """A shard is killed before its last snapshot, and perhaps before a worker has learned of it."""
    folder = tmp_path / "run" / "checkpoints" / "ps-0"
    run = JournaledRun(tmp_path / "own", METHODS["gsp"](), iter_max=20)
    core, coder = run.shards[0], run.coders[0]
    run.journals[0] = journal.Journal(folder, coder, 112)
    number = run.journals[0].begin(ReplaySettings(core.config, 10.0).to_plain())
    saved = shard(tmp_path / "run")
    saved.open()
    begun = {"journal": number, "soft": core.state_dict(soft=True)}
    saved.put(0, contents(core.state_dict(), **begun))
    saved.flush()
    run.run()
    assert core.stop_reason == "iter_max"
    saved = shard(tmp_path / "run", "--iter_max=20")
    assert saved.finished is None
    saved.replay(lambda config, seconds: run.fresh(0, config, seconds), coder)
    assert saved.last.core["model"]["version"] == 20 and saved.finished is None


@pytest.mark.parametrize("name", ["gsp", "esync", "adacomp"])
def test_saved_state_stays_as_it_was_while_the_core_handles_events(tmp_path, name):
    """A thread writes a snapshot and its soft state, while the shard trains on."""
    run = JournaledRun(tmp_path, METHODS[name](), iter_max=20)
    core = run.shards[0]
    saved = core.state_dict(soft=True)
    before, changed = copy.deepcopy(saved), repr(core.state_dict(soft=True))
    run.run()
    assert_same(saved, before, name)
    assert repr(core.state_dict(soft=True)) != changed


@pytest.mark.parametrize("overflow", [False, True])
def test_a_push_without_a_message_of_its_own_is_journaled_with_all_its_claims(tmp_path, overflow):
    """For example a push that came by datagrams."""
    run = JournaledRun(tmp_path, METHODS["bsp"](), iter_max=99)
    values = np.arange(run.layouts[0].size, dtype=np.float32)
    update = NOTHING if overflow else Update(None, values)
    claims = {"learning_rate": 0.25, "loss_scale": 8.0, "repeats_batch": True, "batch_parts": 3}
    claims |= {"num_bytes": 99, "lag": 1, "overflow": overflow}
    push = push_event(2, 7, 5, 3, 1, 4, update, 6, 2, 1.5, **claims)
    record = b"".join(map(bytes, run.coders[0].code(push, 2.5)))
    [(_, body)] = journal_format.bodies(memoryview(record))
    back, now = run.coders[0].decode(body)
    assert now == 2.5
    assert to_plain(dataclasses.replace(back, update=update, blocks=None)) == to_plain(push)
    np.testing.assert_array_equal(back.update.values, update.values)


@pytest.mark.parametrize("name", ["sparse", "adacomp"])
def test_another_attempt_of_a_replay_begins_with_the_snapshot_as_it_was(
    tmp_path, monkeypatch, name
):
    """The first one has handled events on it, up to the one that breaks the core."""
    run = JournaledRun(tmp_path, METHODS[name](), iter_max=99)
    run.join_all()
    for _ in range(12):
        run.turn()
    run.save()
    states, make, attempts = watched(run.shards[0]), type(run).fresh, []
    for _ in range(12):
        run.turn()

    class Fragile(PsCore):
        def handle(self, event, now):
            self.left -= 1
            if not self.left:
                raise RuntimeError("a bug")
            return super().handle(event, now)

    def fragile(self, *arguments):
        core = make(self, *arguments)
        core.__class__, core.left = Fragile, len(states) - 1
        attempts.append(core)
        return core

    monkeypatch.setattr(type(run), "fresh", fragile)
    come, core = run.come_back()
    assert len(attempts) == 2 and come.num_records == len(states) - 2
    assert_same(list(everything(core)), list(states[-2]))


def test_an_end_by_the_scripts_that_only_the_journal_knows_is_left_to_do(tmp_path):
    """No limit shows that there is something left: only the events behind the snapshot do."""
    folder = tmp_path / "run" / "checkpoints" / "ps-0"
    run = JournaledRun(tmp_path / "own", METHODS["bsp"](), iter_max=99)
    core, coder, saved = run.shards[0], run.coders[0], shard(tmp_path / "run")
    run.journals[0] = journal.Journal(folder, coder, 112)
    number = run.journals[0].begin(ReplaySettings(core.config, 10.0).to_plain())
    begun = {"journal": number, "soft": core.state_dict(soft=True)}
    saved.open()
    saved.put(0, contents(core.state_dict(), **begun))
    saved.flush()
    run.join_all()
    run.feed(0, events.Stop(FINISHED))
    again = shard(tmp_path / "run")
    again.replay(lambda config, seconds: run.fresh(0, config, seconds), coder)
    assert again.last.core["lifecycle"]["stop_reason"] == FINISHED and again.finished is None
    saved.put(0, contents(core.state_dict()))  # all shards know the epoch
    saved.flush()
    assert shard(tmp_path / "run").finished == FINISHED
