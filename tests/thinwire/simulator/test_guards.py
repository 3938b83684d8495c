"""With guards on, a run with one faulty worker is as good as a run without that worker."""

import json

import numpy as np
import pytest

from tests.thinwire.simulator.toy import ToyTrainer, simulated
from tests.virtual.toy import Softmax
from thinwire.ops.aggregation.outliers import Guards
from thinwire.ops.types import ConfigurationError
from thinwire.proto import thinwire_pb2 as pb
from thinwire.ps.telemetry.status import StatusReporter
from thinwire.simulator import faulty_gradients
from thinwire.simulator.messages import Step

NOISE = {4: 1e6}
LIMIT = Guards(max_update_norm=10.0)
BOTH = Guards(max_update_norm=10.0, update_norm_factor=8.0)


def play(*arguments, **settings):
    simulation = simulated(*arguments, steps="lognormal:0.2,0.3", **settings)
    simulation.play(lambda now: None, lambda: False)
    return simulation


def accuracy(simulation):
    return Softmax().accuracy(simulation.shards[0].core.model.theta)


def guard_of(shard):
    return shard.core.guard_summary()


def guard(simulation):
    return guard_of(simulation.shards[0])


@pytest.mark.parametrize(
    ("name", "choices", "without", "guards"),
    [
        ("asgd", {}, {}, LIMIT),
        ("asgd", {}, {}, BOTH),
        ("bsp", {}, {}, BOTH),
        ("gsp", {"groups": ((1, 2), (3, 4))}, {"groups": ((1, 2), (3,))}, LIMIT),
        ("ssp", {}, {}, BOTH),
        ("adacomp", {"compression_rate": 0.2}, {"compression_rate": 0.2}, BOTH),
        ("dgs", {"compression_rate": 0.2}, {"compression_rate": 0.2}, LIMIT),
        ("esync", {}, {}, LIMIT),
    ],
)
def test_a_worker_of_garbage_makes_no_difference(name, choices, without, guards):
    guarded = play(name, 4, choices=choices, iter_max=150, garbage=NOISE, guards=guards)
    alone = play(name, 3, choices=without, iter_max=150)
    assert guarded.end == alone.end == "iter_max"
    assert accuracy(guarded) > accuracy(alone) - 0.05 > 0.6
    assert set(guard(guarded)["refused"]["outlier"]) == {"4"}
    assert guarded.shards[0].core.counters.worker(4).pushes == 0


def test_without_guards_it_makes_all_the_difference():
    ruined = play("asgd", 4, iter_max=150, garbage=NOISE)
    assert np.abs(ruined.shards[0].core.model.theta).max() > 1e4
    assert guard(ruined) == {}


@pytest.mark.parametrize("rule", ["median", "trimmed_mean"])
def test_a_robust_rule_outvotes_it_without_any_limit(rule):
    robust = play("bsp", 4, choices={"aggregate": rule}, iter_max=150, garbage=NOISE)
    alone = play("bsp", 3, iter_max=150)
    assert accuracy(robust) > accuracy(alone) - 0.08


def test_noise_of_the_usual_size_is_outvoted_too():
    """A fault that no limit of norms can detect."""
    mean = play("bsp", 4, iter_max=100, garbage={4: 3.0})
    robust = play("bsp", 4, choices={"aggregate": "median"}, iter_max=100, garbage={4: 3.0})
    assert accuracy(robust) > accuracy(mean)


def test_several_shards_each_judge_their_part():
    guarded = play("bsp", 4, nb_ps=2, iter_max=60, garbage=NOISE, guards=LIMIT)
    assert [shard.core.version for shard in guarded.shards] == [60, 60]
    for shard in guarded.shards:
        assert set(shard.core.guard_summary()["refused"]["outlier"]) == {"4"}


def test_a_worker_that_is_refused_for_ever_gives_up_and_the_others_go_on():
    guarded = play("bsp", 4, iter_max=130, garbage=NOISE, guards=LIMIT)
    assert guarded.end == "iter_max"
    assert guard(guarded)["refused"]["outlier"]["4"] == 101
    assert not guarded.workers[3].alive


class Spiking:
    """A device that fails for a few of its steps."""

    def __init__(self, inner, spikes):
        self.inner, self.spikes, self.steps = inner, spikes, 0

    def local_of(self, number):
        return {}

    def step(self, *arguments) -> Step:
        done = self.inner.step(*arguments)
        self.steps += 1
        if self.steps in self.spikes:
            done.gradient[:] *= np.float32(1e6)
        return done


def spiking(name, spikes, guards, **settings):
    trainer = ToyTrainer()
    simulation = simulated(name, 4, steps="0.2", trainer=trainer, guards=guards, **settings)
    simulation.workers[3]._trainer = Spiking(trainer, spikes)
    simulation.play(lambda now: None, lambda: False)
    return simulation


@pytest.mark.parametrize("name", ["dgs", "gd", "dgc"])
def test_what_is_kept_back_does_not_send_a_spike_again_and_again(name):
    """A tenth is sent at a time: what stays of the spike would come for a hundred steps."""
    choices = {"compression_rate": 0.1} | ({"warmup_epochs": 0} if name == "dgc" else {})
    run = spiking(name, {5, 6}, LIMIT, choices=choices, iter_max=120)
    assert guard(run)["refused"] == {"outlier": {"4": 2}}
    assert run.shards[0].core.counters.worker(4).pushes > 20
    calm = spiking(name, set(), Guards(), choices=choices, iter_max=120)
    assert accuracy(run) > accuracy(calm) - 0.06


@pytest.mark.parametrize("name", ["asgd", "bsp"])
def test_who_was_put_out_comes_back_and_trains(name):
    guards = Guards(max_update_norm=10.0, quarantine_after=2, quarantine_seconds=5.0)
    run = spiking(name, {5, 6}, guards, iter_max=120)
    assert guard(run)["quarantines"] == {"4": 1}
    core = run.shards[0].core
    assert core.membership.num_returned == 1
    assert core.counters.worker(4).pushes > 5
    assert run.end == "iter_max"


def test_who_goes_on_offending_is_put_out_for_longer_and_longer():
    guards = Guards(max_update_norm=10.0, quarantine_after=3, quarantine_seconds=1.0)
    run = play("bsp", 4, iter_max=100, garbage=NOISE, guards=guards)
    found = guard(run)
    assert 3 <= found["quarantines"]["4"] <= 6
    assert found["refused"]["outlier"]["4"] <= 3 * (found["quarantines"]["4"] + 1)
    assert run.end == "iter_max"


def test_the_summary_adds_up_all_shards():
    run = play("asgd", 4, nb_ps=2, iter_max=60, garbage=NOISE, guards=BOTH)
    first, other = run.shards
    sources = first.status_sources(run.spec.num_parameters)
    board = StatusReporter(run._run, sources)
    first.reports[(pb.ROLE_SHARD, 1)] = json.dumps({"guards": guard_of(other)["refused"]})
    block = board.guards()["guards"]
    each = [guard_of(shard)["refused"]["outlier"]["4"] for shard in (first, other)]
    assert block["refused"] == {"outlier": {"4": sum(each)}}
    assert block["quarantines"] == {}
    assert 0 < block["median_norm"] < 10


def test_the_same_run_comes_out_the_same():
    guards = Guards(update_norm_factor=6.0, quarantine_after=2, quarantine_seconds=3.0)
    runs = [play("asgd", 4, iter_max=80, garbage={4: 200.0}, guards=guards) for _ in range(2)]
    np.testing.assert_array_equal(*(run.shards[0].core.model.theta for run in runs))
    assert runs[0].shards[0].core.guard_summary() == runs[1].shards[0].core.guard_summary()


def test_garbage_on_the_command_line():
    assert faulty_gradients.parse("4:1e6,2:50", 4) == {4: 1e6, 2: 50.0}
    assert faulty_gradients.parse("", 4) == {}
    for text in ("5:1", "0:1", "2", "2:0", "2:nan", "a:1"):
        with pytest.raises(ConfigurationError, match="sim_garbage"):
            faulty_gradients.parse(text, 4)
