"""The initial state of a shard's core: its own weights, and only its part of the run."""

import types

import numpy as np
import pytest

from tests.command_line import given, run_of
from tests.virtual.toy import SPEC
from thinwire.flags.run import read_run
from thinwire.models import flat_model, flat_variables
from thinwire.ops.sharding.split import shard_positions
from thinwire.ops.sync.base import Draw
from thinwire.ops.sync.drawn import parse_draws
from thinwire.ops.types import ConfigurationError
from thinwire.ps import role
from thinwire.ps.core import events
from thinwire.ps.core.membership import Coordinator, FollowerMembership
from thinwire.ps.persistence.shard_checkpoint import ShardCheckpoint
from thinwire.ps.scripts.initial_model import model_of_flags
from thinwire.ps.shard.preparation import ShardInitials, build_core
from thinwire.ps.shard.process import ShardProcess
from thinwire.ps.shard.run_records import RunRecords

TWO = ("--nb_workers=3", "--nb_ps=2", "--ps_hosts=localhost:1,localhost:2", "--kernels=numpy")


class Numbers:
    """Stand-in for variables and their values."""

    def __init__(self, numbers):
        self.read = lambda: np.array(numbers, np.float32)


@pytest.fixture(autouse=True)
def _without_tensorflow(monkeypatch):
    monkeypatch.setattr(flat_model, "has_gpu", lambda run: False)
    monkeypatch.setattr(flat_variables, "FlatVariables", Numbers)


def model():
    flat = np.arange(SPEC.num_parameters, dtype=np.float32)

    def part(layout):
        return np.concatenate([flat[at] for at in shard_positions(SPEC, layout)])

    return types.SimpleNamespace(spec=SPEC, part=part, statistics=[1, 2, 3], user_module=None)


def initials_of(number, *flags, examples=None):
    run = run_of(*TWO, *flags)
    return ShardInitials(run, number, model_of_flags(run, number, model(), examples))


def saved(core=None, phase=0):
    last = ShardCheckpoint(core=core, phase=phase)
    return types.SimpleNamespace(last=last, generation=4, generations_undone=2)


def test_cores_hold_what_the_layout_says_and_share_no_weights():
    cores = []
    for number in (0, 1):
        initials = initials_of(number)
        cores += [build_core(initials, initials.config(saved(), 60.0), 10.0) for _ in range(2)]
    held = np.concatenate([cores[0].model.theta, cores[2].model.theta])
    np.testing.assert_array_equal(np.sort(held), np.arange(SPEC.num_parameters))
    cores[0].model.theta[:] = -1
    assert (cores[1].model.theta >= 0).all()


def test_leave_to_go_on_and_the_time_limit_are_shard_0_s_alone():
    first, other = (initials_of(number, "--method=ssp", "--max_seconds=9") for number in (0, 1))
    leads = build_core(first, first.config(saved(), 60.0), 7.0)
    follows = build_core(other, other.config(saved(), 60.0), 7.0)
    assert isinstance(leads.membership, Coordinator) and isinstance(
        follows.membership, FollowerMembership
    )
    assert leads.membership.lease_seconds == follows.membership.lease_seconds == 7.0
    assert not leads.rounds.follows and follows.rounds.follows
    assert (leads.config.max_seconds, follows.config.max_seconds) == (9, None)


def test_weights_of_the_host_are_changed_there_whatever_the_machine_has(monkeypatch):
    monkeypatch.setattr(flat_model, "has_gpu", lambda run: True)
    assert initials_of(0, "--kernels=auto").kernels.name == "numpy"


def test_only_shard_0_averages_beside_the_weights():
    np.testing.assert_array_equal(initials_of(0).averages().mean, [1, 2, 3])
    assert initials_of(1).averages().mean is None
    assert initials_of(0, "--nobn_sync").averages().mean is None


def test_a_run_that_goes_on_waits_no_longer_than_workers_take_to_come_back():
    initials = initials_of(0, "--lease_seconds=5")
    assert initials.config(saved(), 600.0).start_timeout_seconds == 600.0
    again = initials.config(saved(core={"theta": 1}), 600.0)
    assert again.start_timeout_seconds == 20.0
    assert (again.generation, again.generations_undone) == (4, 2)
    assert initials.config(saved(core={"theta": 1}), 3.0).start_timeout_seconds == 3.0
    later = initials.config(saved(core={"theta": 1}, phase=4), 600.0)
    assert later.start_timeout_seconds == 0.0, "the others wait for the one that joins"


def test_epochs_are_counted_in_examples():
    assert initials_of(0).config(saved(), 1.0).budget.examples is None
    assert initials_of(0, "--epochs=2.5", examples=100).config(saved(), 1.0).budget.examples == 250


def test_a_shard_that_comes_back_imports_keras_quietly_where_it_may_need_it(monkeypatch):
    happened, run = (
        [],
        types.SimpleNamespace(addresses=(), overwrite=False, resume=False, model_is_offered=True),
    )
    flags = {"preload_keras": True, "max_model_bytes": 1, "resume_only": True, "stay": False}
    own = types.SimpleNamespace(node="ps-0", id_ps=0, **flags)
    kept = types.SimpleNamespace(last=ShardCheckpoint(offer="{}", core={"theta": 1}))
    monkeypatch.setattr(role.ps_flags, "read", lambda addresses: own)
    monkeypatch.setattr(role, "SavedShard", lambda run, node: kept)
    monkeypatch.setattr(role, "read_offer", lambda document, limit: document)
    monkeypatch.setattr(role, "import_quietly", lambda name: happened.append(name))
    monkeypatch.setattr(role, "model_of_offer", lambda *given: happened.append("model"))
    monkeypatch.setattr(role.PreparedShard, "of", lambda *given: None)
    monkeypatch.setattr(role.ShardProcess, "open", lambda prepared: None)  # a finished run
    assert role.main(run) == 0
    assert happened == ["keras", "model"]


@pytest.mark.parametrize("by", ["flags", "worker"])
def test_what_takes_a_lost_ps_s_place_does_not_begin_anew(tmp_path, by):
    flags = ("--type_node=PS", "--resume_only", f"--run_dir={tmp_path}", f"--model_from={by}")
    with (
        given(*flags),
        pytest.raises(ConfigurationError, match="no checkpoint of .*--checkpoint_dir"),
    ):
        role.main(read_run())


def records_in(folder):
    return RunRecords(types.SimpleNamespace(nb_workers=2, run_dir=folder))


@pytest.mark.parametrize(("speeds", "is_proposed"), [({1: 4.0}, False), ({1: 4.0, 2: 1.0}, True)])
def test_groups_are_proposed_once_all_workers_are_measured(tmp_path, speeds, is_proposed):
    found = events.GroupsChanged(((1,), (2,)), speeds)
    records_in(tmp_path).propose_groups(found)
    assert (tmp_path / "groups.txt").is_file() == is_proposed


def test_draws_are_recorded_for_a_run_that_is_resumed(tmp_path):
    records = records_in(tmp_path)
    records.record_draws([Draw(1, 0, (2, 3)), Draw(2, 1, (1, 3))])
    text = records._draws.path.read_text()
    assert list(parse_draws(text, "d", 3)) == [(2, 3), (1, 3)]


def test_the_last_snapshot_is_on_disk_before_the_summary_and_a_full_disk_hinders_none():
    """A saver writes in a thread that ends with the process."""
    calls = []

    def note(call, error=None):
        def noted(*given):
            calls.append(call)
            if error is not None:
                raise error

        return noted

    server = types.SimpleNamespace(journaled=types.SimpleNamespace(close=note("close")))
    for error in (None, OSError("No space left on device")):
        process = types.SimpleNamespace(
            server=server, _save_now=note("save", error), _sum_up=note("sum up")
        )
        assert ShardProcess._leaves_all_behind(process) == (error is None)
    assert calls == ["close", "save", "sum up"] * 2
