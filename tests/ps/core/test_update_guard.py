"""A shard's guard rejects, counts and reports outliers, and no worker waits for them."""

import dataclasses

import numpy as np
import pytest

from tests.pushes import push_event
from tests.virtual.shard import HUGE, guarded, joined, of, pull, push, reasons
from tests.virtual.toy import method
from thinwire.ops.aggregation.outliers import LEAST_NORMS
from thinwire.ops.types import Update
from thinwire.ps.core import events


def test_an_outlier_is_refused_counted_and_told():
    core = joined(guarded(method("asgd"), max_update_norm=3.0))
    actions = push(core, 1, 1, 0, values=HUGE)
    [refusal] = of(events.Reject, actions)
    assert (refusal.reason, refusal.step, refusal.worker) == ("OUTLIER", 1, 1)
    assert "2e+06" in refusal.message and "--max_update_norm=3" in refusal.message
    assert core.version == 0 and not core.model.theta.any()
    assert core.counters.rejected == {"outlier": 1}
    assert core.guard_summary()["refused"] == {"outlier": {"1": 1}}


def test_an_update_of_just_the_largest_norm_is_taken():
    core = joined(guarded(method("asgd"), max_update_norm=4.0))
    push(core, 1, 1, 0, values=[2] * 4)
    assert core.version == 1
    assert reasons(push(core, 1, 2, 1, values=[2.001] * 4)) == ["OUTLIER"]


def test_the_refused_worker_gets_the_model_and_goes_on():
    core = joined(guarded(method("asgd"), max_update_norm=3.0))
    push(core, 2, 1, 0)
    push(core, 1, 1, 0, values=HUGE)
    [reply] = of(events.Reply, pull(core, 1))
    assert (reply.step, reply.version) == (0, 1)
    np.testing.assert_array_equal(reply.update.values, core.model.theta)
    push(core, 1, 2, 1)
    assert core.version == 2


def test_a_refused_push_that_is_sent_again_is_refused_again_but_one_offence():
    core = joined(guarded(method("asgd"), max_update_norm=3.0))
    push(core, 1, 1, 0, values=HUGE)
    assert reasons(push(core, 1, 1, 0, values=HUGE)) == ["OUTLIER"]
    assert core.counters.rejected == {"outlier": 1}


def test_a_group_does_not_wait_for_a_refused_push():
    core = joined(guarded(method("bsp", nb_workers=3), max_update_norm=3.0))
    push(core, 1, 1, 0, values=[0.5] * 4)
    assert reasons(push(core, 3, 1, 0, values=HUGE)) == ["OUTLIER"]
    assert of(events.Reply, pull(core, 3)) == []  # its round is still open
    replies = of(events.Reply, push(core, 2, 1, 0, values=[1.5] * 4))
    assert {reply.worker: reply.step for reply in replies} == {1: 1, 2: 1, 3: 0}
    np.testing.assert_allclose(core.model.theta, -0.1)  # the mean of the two that count
    assert core.rounds.clocks() == {1: 1, 2: 1, 3: 1}
    assert core.samples == 2


def test_a_round_of_outliers_alone_is_over_without_an_update():
    core = joined(guarded(method("bsp"), max_update_norm=3.0))
    push(core, 1, 1, 0, values=HUGE)
    push(core, 2, 1, 0, values=HUGE)
    assert core.version == 0
    for worker in (1, 2):
        assert of(events.Reply, pull(core, worker))
        push(core, worker, 2, 0)
    assert core.version == 1


def test_a_bound_does_not_wait_for_one_who_only_sends_outliers():
    core = joined(guarded(method("ssp", staleness_bound=1), max_update_norm=3.0))
    for step in range(1, 6):
        push(core, 1, step, core.version, values=HUGE)
        pull(core, 1)
        assert of(events.Reply, push(core, 2, step, core.version))
    assert core.version == 5


def test_the_median_is_of_what_all_workers_had_applied():
    core = joined(guarded(method("asgd"), update_norm_factor=5.0))
    for step in range(1, LEAST_NORMS + 1):
        push(core, 1 + step % 2, step, core.version)  # norm 2
    assert core.guard_summary()["median_norm"] == 2.0
    assert reasons(push(core, 1, 50, core.version, values=[5.1] * 4)) == ["OUTLIER"]
    assert reasons(push(core, 2, 50, core.version, values=[4.9] * 4)) == []
    assert core.version == LEAST_NORMS + 1


def test_sparse_updates_are_judged_by_what_they_send():
    core = joined(guarded(method("adacomp"), max_update_norm=3.0))
    assert reasons(push(core, 1, 1, 0, [2], [3.1])) == ["OUTLIER"]
    assert reasons(push(core, 2, 1, 0, [1, 2], [2.0, 2.0])) == []
    assert core.version == 1


def test_a_worker_that_leaves_with_a_refused_push_is_not_counted_twice():
    core = joined(guarded(method("bsp"), max_update_norm=3.0))
    push(core, 1, 1, 0, values=HUGE)
    core.handle(events.Leave(1, 1, "done"), 1.0)
    assert core.counters.rejected == {"outlier": 1}


def test_without_guards_nothing_is_measured():
    core = joined(guarded(method("asgd")))
    push(core, 1, 1, 0, values=HUGE)
    assert core.version == 1
    assert core.guard_summary() == {}


def test_the_norm_is_that_of_the_update():
    core = joined(guarded(method("asgd"), max_update_norm=1e9))
    core._guard.check(of_values(1, [3, 4]))
    core._guard.applied(1)
    assert core.guard_summary()["median_norm"] == 5.0


def of_values(worker, values):
    update = Update(None, np.array(values, np.float32))
    return push_event(worker, worker, 1, 0, 0, 1, update)


RUINOUS = [3e38, 0, 0, 0]  # finite


@pytest.mark.parametrize("name", ["asgd", "bsp", "ssp", "adacomp", "dgs", "dcasgd", "esync"])
@pytest.mark.parametrize("num_before", [0, LEAST_NORMS])
def test_what_would_ruin_the_model_is_refused_without_any_flag(name, num_before):
    chosen = method(name)
    core = joined(guarded(chosen))
    for step in range(1, num_before + 1):
        for worker in (1, 2):
            push(core, worker, step, core.version)
    before = core.model.theta.copy()
    assert reasons(push(core, 1, num_before + 1, core.version, values=RUINOUS)) == ["OUTLIER"]
    np.testing.assert_array_equal(core.model.theta, before)
    assert core.guard_summary()["refused"] == {"outlier": {"1": 1}}


def test_what_a_script_itself_sets_is_looked_at_too():
    core = joined(guarded(method("asgd")))
    none = Update(np.empty(0, np.int64), np.empty(0, np.float32))
    change = Update(None, np.asarray(RUINOUS, np.float32))
    event = push_event(1, 1, 1, 0, 0, core.membership.epoch, none)
    assert reasons(core.handle(dataclasses.replace(event, change=change), 0.0)) == ["OUTLIER"]


def test_growth_and_single_spikes_of_honest_runs_are_taken():
    """Gradients that double at each step, then fall to nothing, then a spike of the old size."""
    core = joined(guarded(method("asgd")))
    sizes = [2.0**power for power in range(-10, 40)] + [0.0] * 100 + [2.0**39]
    for step, size in enumerate(sizes, 1):
        push(core, 1, step, core.version, values=[size] * 4)
    assert core.counters.rejected == {}


def test_the_default_guard_can_be_turned_off():
    core = joined(guarded(method("asgd"), update_peak_factor=0.0))
    assert reasons(push(core, 1, 1, 0, values=RUINOUS)) == []


def test_peaks_outlive_a_restart():
    core = joined(guarded(method("asgd")))
    for step in range(1, LEAST_NORMS + 1):
        push(core, 1, step, core.version)
    again = guarded(method("asgd"))
    again.load_state_dict(core.state_dict())
    assert reasons(push(joined(again), 1, LEAST_NORMS + 1, 16, values=[1e7] * 4)) == ["OUTLIER"]
