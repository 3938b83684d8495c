"""Counters of each group: exact staleness Y, waits by the shard's clock, 1/Y on and off."""

import dataclasses

import numpy as np
import pytest

from tests.pushes import push_event, with_numbers
from tests.virtual.run import MiniRun
from tests.virtual.shard import core_of, join, of, push
from tests.virtual.toy import method
from thinwire.ops.sync import groups as sync_groups
from thinwire.ops.types import Update
from thinwire.ps.core import events
from thinwire.ps.core.counters import Counters, GroupCounters, WorkerTotals
from thinwire.ps.wire import reports

VECTOR = [(3,), (3,), (1, 2), (3,), (1, 2), (1, 2), (3,)]


def play(core, rounds):
    """Play finished rounds, each push with its worker's last model; return each round's cost."""
    steps, bases, moves = {}, {}, []
    for group in rounds:
        before = core.model.theta.copy()
        for worker in group:
            steps[worker] = steps.get(worker, 0) + 1
            actions = push(core, worker, steps[worker], bases.get(worker, 0))
        for reply in of(events.Reply, actions):
            bases[reply.worker] = reply.version
        moves.append(float(before[0] - core.model.theta[0]))
    return np.array(moves)


def joined(chosen, workers=(1, 2, 3)):
    core = core_of(chosen)
    for worker in workers:
        join(core, worker)
    return core


def test_histograms_of_the_grouping_vector():
    """g0 = {1, 2} has Y = 3 2 1, g1 = {3} has Y = 1 1 2 3; every member's push counts."""
    core = joined(method("gsp", nb_workers=3, groups=((1, 2), (3,))))
    play(core, VECTOR)
    rows = core.counters.groups.summary()
    assert rows["1,2"]["histogram"] == {"1": 2, "2": 2, "3": 2}
    assert rows["3"]["histogram"] == {"1": 2, "2": 1, "3": 1}
    assert (rows["1,2"]["updates"], rows["1,2"]["pushes"]) == (3, 6)
    assert (rows["3"]["updates"], rows["3"]["pushes"]) == (4, 4)
    assert rows["3"]["staleness"] == {"mean": 1.75, "p95": 3, "max": 3}


@pytest.mark.parametrize(
    ("name", "choices"),
    [("asgd", {}), ("ssp", {"staleness_bound": 9}), ("gsp", {"groups": ((1,), (2,), (3,))})],
)
@pytest.mark.parametrize("weighting", ["none", "inverse"])
def test_the_weight_is_a_switch_and_the_same_in_asp_ssp_and_groups_of_one(name, choices, weighting):
    chosen = method(name, nb_workers=3, overrides={"weighting": weighting}, **choices)
    rounds = [(3,), (3,), (1,), (2,), (3,), (1,)]
    core = joined(chosen)
    moves = play(core, rounds)
    factors = np.array([1, 1, 3, 4, 3, 3] if weighting == "inverse" else [1] * 6)
    np.testing.assert_allclose(moves, 0.1 / factors, rtol=1e-4)
    rows = core.counters.groups.summary()  # Y is counted, whether it weighs or not
    assert [rows[each]["histogram"] for each in "123"] == [{"3": 2}, {"4": 1}, {"1": 2, "3": 1}]


@pytest.mark.parametrize("weighting", ["none", "inverse"])
def test_the_weight_is_a_switch_in_groups(weighting):
    chosen = method("gsp", nb_workers=3, groups=((1, 2), (3,)), overrides={"weighting": weighting})
    factors = [1, 1, 3, 2, 2, 1, 3] if weighting == "inverse" else [1] * 7
    np.testing.assert_allclose(play(joined(chosen), VECTOR), 0.1 / np.array(factors), rtol=1e-4)


def test_a_group_s_wait_is_the_time_its_answers_were_held():
    core = joined(method("gsp", nb_workers=3, groups=((1, 2), (3,))))
    push(core, 1, 1, 0, now=1.0)
    push(core, 3, 1, 0, now=2.0)
    push(core, 2, 1, 0, now=4.0)
    rows = core.counters.groups.summary()
    assert rows["1,2"]["wait_seconds"] == pytest.approx(3.0)
    assert rows["3"]["wait_seconds"] == 0.0


def test_waiting_for_the_start_is_no_group_s_wait():
    core = core_of(method("bsp", nb_workers=2))
    join(core, 1, now=0.0)
    join(core, 2, now=50.0)
    assert all(row["wait_seconds"] == 0.0 for row in core.counters.groups.summary().values())


def test_a_push_that_left_is_in_no_histogram():
    core = core_of(method("gsp", nb_workers=3, groups=((1, 2), (3,))), lease=5.0)
    for worker in (1, 2, 3):
        join(core, worker)
    push(core, 1, 1, 0, now=1.0)
    core.handle(events.Leave(1, 1, "done"), 2.0)
    push(core, 2, 1, 0, now=3.0)
    assert core.counters.groups.summary()["1,2"]["histogram"] == {"1": 1}


def test_accounts_survive_a_restart():
    core = joined(method("gsp", nb_workers=3, groups=((1, 2), (3,))))
    play(core, VECTOR)
    again = core_of(method("gsp", nb_workers=3, groups=((1, 2), (3,))), generation=1)
    again.load_state_dict(core.state_dict())
    assert again.counters.groups.summary() == core.counters.groups.summary()


def test_pushes_of_several_shards_are_counted_on_each():
    chosen = method("gsp", nb_workers=4, groups=((1, 2), (3,), (4,)))
    run = MiniRun(chosen, iter_max=60, nb_ps=2).run()
    for core in run.shards:
        rows = core.counters.groups.summary()
        assert sum(row["updates"] for row in rows.values()) == 60
        assert sum(row["pushes"] for row in rows.values()) == sum(core.counters.staleness.values())


def test_updates_worth_less_than_a_tenth_and_many_groups():
    accounts = GroupCounters()
    accounts.of("1").staleness.update({10: 4, 11: 2, 30: 1})
    assert accounts.summary()["1"]["pushes_worth_below_tenth"] == 3
    for worker in range(2, 100):
        accounts.of(str(worker)).updates += 1
    assert "histogram" not in accounts.summary()["1"]
    assert accounts.histograms() == {}


@pytest.mark.parametrize("text", ["{", "[]", '{"group_staleness": 3}', '{"group_staleness": [1]}'])
def test_a_shard_s_ill_formed_report_counts_as_nothing(text):
    assert reports.tables(text, "group_staleness") == {}


def test_a_shard_s_report_is_read():
    text = '{"group_staleness": {"1,2": {"1": 4, "2": -1, "3": "x"}}}'
    assert reports.tables(text, "group_staleness") == {"1,2": {"1": 4}}


def test_uneven_groups_are_warned_of():
    assert sync_groups.uneven(((1, 2, 3), (4,))) is None
    warning = sync_groups.uneven(((1, 2, 3, 4), (5,)))
    assert "group 1,2,3,4 has 4 workers, group 5 has 1" in warning
    uneven = method("gsp", nb_workers=5, groups=((1, 2, 3, 4), (5,)))
    assert warning in uneven.warnings
    assert method("gsp", nb_workers=4, groups=((1, 2), (3, 4))).warnings == ()


def test_what_holds_no_examples_leaves_a_worker_s_loss_as_it_was():
    core = joined(method("asgd", nb_workers=1), workers=(1,))
    push(core, 1, 1, 0)
    core.counters.worker(1).loss = 2.0  # other than what `push` gives
    push(core, 1, 2, 1, samples=0)
    assert (core.counters.worker(1).pushes, core.counters.worker(1).loss) == (2, 2.0)


def test_lost_updates_of_several_restarts_add_up():
    counters = Counters()
    counters.resumed(5)
    counters.note_lost_updates(8)
    counters.note_lost_updates(7)  # another worker has seen less
    assert counters.lost_updates == 3
    again = Counters()
    again.load_state_dict(counters.state_dict(soft=False), soft=False)
    again.resumed(6)
    again.note_lost_updates(10)
    assert again.lost_updates == 3 + 4


@pytest.mark.parametrize(("generation", "lost"), [(4, 3), (3, 3), (2, 0), (5, 0)])
def test_only_generations_whose_updates_may_be_undone_count_as_lost(generation, lost):
    """A worker of an earlier one has seen what a later snapshot has counted."""
    core = core_of(method("asgd"), generation=5, generations_undone=2)
    core.handle(events.Join(1, 1, True, "peer"), 0.0)
    core.handle(events.Pull(1, 1, 3, generation), 0.0)
    assert core.counters.lost_updates == lost


def test_a_worker_s_totals_are_sums_and_its_loss_is_the_last_that_means_something():
    counters = Counters()
    update = Update(None, np.zeros(3, np.float32))
    applied = push_event(1, 11, 1, 0, 0, 1, update, samples=8, local_steps=3, loss=0.5)
    losses = []
    for about in ({}, {"loss": 7.0, "overflow": True}, {"loss": 9.0, "samples": 0}, {"loss": 0.25}):
        counters.applied(with_numbers(applied, **about), 0, "1")
        losses.append(counters.worker(1).loss)
    assert losses == [0.5, 0.5, 0.5, 0.25]
    assert counters.worker(1) == WorkerTotals(pushes=4, samples=24, local_steps=12, loss=0.25)
    assert dataclasses.astuple(counters.worker(2)) == (0, 0, 0, None, 0)
