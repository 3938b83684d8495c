"""Simulated runs: times equal sums by hand, every method ends, and runs repeat bit for bit."""

import dataclasses
import json

import numpy as np
import pytest

from tests.thinwire.simulator.toy import ToyTrainer, played, simulated
from thinwire.ops.methods.method import METHODS
from thinwire.ops.types import Link
from thinwire.proto.emulation.link import LinkModel
from thinwire.ps.core import events
from thinwire.ps.wire.push_decoder import NonFinite, PushDecoder
from thinwire.runtime.telemetry import round_trace
from thinwire.simulator.flags import ShardSpeed


def core(simulation):
    return simulation.shards[0].core


def rounds_of(simulation, worker):
    """Return the rows that a worker measured, as dicts."""
    documents = [json.loads(text) for text in simulation.workers[worker - 1].rounds()]
    return [
        dict(zip(each["columns"], row, strict=True)) for each in documents for row in each["rows"]
    ]


def staleness(simulation):
    return {number: count for number, count in core(simulation).counters.staleness.items() if count}


def test_without_links_a_step_is_all_that_takes_time():
    simulation = played("asgd", 3, steps="0.5,0.25,1", iter_max=70)
    assert simulation.end == "iter_max"
    assert simulation.clock.now == 10.0  # 2 + 4 + 1 updates a second
    assert core(simulation).seconds() == 10.0
    pushes = {
        worker: account.pushes for worker, account in core(simulation).counters.workers.items()
    }
    assert pushes == {1: 20, 2: 40, 3: 10}


def test_one_worker_takes_the_steps_of_plain_sgd():
    simulation = played("asgd", 1, iter_max=12)
    trainer, twin = ToyTrainer(), simulated("asgd", 1)
    weights, shard = trainer.weights.copy(), twin.workers[0]._own.shard
    for _ in range(12):
        step = trainer.step(weights, trainer.statistics, shard, {})
        weights -= np.float32(0.1) * step.gradient
    np.testing.assert_array_equal(core(simulation).model.theta, weights)
    assert staleness(simulation) == {0: 12}


def test_a_round_on_a_link_is_step_and_both_transfers():
    """The emulated channel's own model gives the time of the counted bytes on the wire."""
    link = Link(mbps=0.01, delay_ms=40)
    simulation = played("asgd", 1, links=(link,), iter_max=9)
    rows = rounds_of(simulation, 1)
    assert len(rows) == 8  # the last reply is not waited for
    for row in rows[1:]:
        model, back = LinkModel(link), LinkModel(link)
        there = model.send(0.5, row["bytes_sent"]).delivered_at
        again = back.send(there, row["bytes_received"]).delivered_at
        assert row["transfer"] == pytest.approx(again - 0.5, abs=2e-6)
        assert row["barrier_wait"] == 0
    each = np.diff([row["total_time"] for row in rows])
    np.testing.assert_allclose(each, 0.5 + rows[1]["transfer"], atol=1e-5)


def test_a_delay_keeps_no_one_from_sending():
    fast = played("asgd", 4, steps="0.1", links=(Link(delay_ms=100),), iter_max=40)
    assert fast.clock.now == pytest.approx(0.2 + 0.2 + 10 * 0.1 + 9 * 0.2 + 0.1)


def test_losses_cost_bytes_and_time():
    clean = played("asgd", 1, links=(Link(1.0, 10),), iter_max=30)
    lossy = played("asgd", 1, links=(Link(1.0, 10, 0.3),), iter_max=30)
    assert lossy.clock.now > clean.clock.now + 0.2  # a lost segment waits 20 ms
    assert lossy.workers[0]._exchange.bytes_up > 1.1 * clean.workers[0]._exchange.bytes_up
    np.testing.assert_array_equal(core(lossy).model.theta, core(clean).model.theta)


def test_a_shard_takes_pushes_one_after_the_other():
    simulation = played("asgd", 4, steps="0.1", servers=(ShardSpeed(0.5, 0.0),), iter_max=20)
    assert simulation.clock.now == pytest.approx(0.1 + 20 * 0.5)
    assert staleness(simulation)[3] >= 16


def test_a_shards_link_is_shared():
    thin = (ShardSpeed(0.0, mbps=0.02),)
    alone = played("asgd", 1, "0.001", servers=thin, iter_max=20)
    crowd = played("asgd", 4, "0.001", servers=thin, iter_max=80)
    # Alone half of the link is idle: up and down take turns. Four fill it.
    assert crowd.clock.now == pytest.approx(2 * alone.clock.now, rel=0.05)


def test_a_barrier_waits_for_the_slowest():
    simulation = played("bsp", 3, steps="0.1,0.2,0.7", iter_max=10)
    assert simulation.clock.now == pytest.approx(7.0)
    row = rounds_of(simulation, 1)[0]
    assert row["barrier_wait"] == pytest.approx(0.6)


def test_a_bound_lets_nobody_run_further_ahead():
    leads = []
    simulation = simulated("ssp", 3, steps="0.1,0.1,1", choices={"staleness_bound": 2}, iter_max=60)
    shard = simulation.shards[0]

    def keep(now):
        clocks = shard.core.rounds.clocks().values()
        leads.append(max(clocks, default=0) - min(clocks, default=0))

    simulation.play(keep, lambda: False)
    assert max(leads) == 3  # two ahead may begin the next step
    assert simulation.clock.now == pytest.approx(
        18.1
    )  # 18 updates of the slow one, 21 each of the others


@pytest.mark.parametrize("name", sorted(METHODS))
@pytest.mark.parametrize("nb_ps", [1, 2])
def test_every_method_reaches_its_end_and_learns(name, nb_ps):
    short = {"local_steps": 4, "local_optimizer": "sgd"} if "local_steps" in METHODS[name] else {}
    links = (Link(1, 1),)
    simulation = simulated(name, 3, "0.1,0.2,0.4", short, links=links, nb_ps=nb_ps, iter_max=40)
    before = ToyTrainer()
    assert simulation.play(lambda now: None, lambda: False) == "iter_max"
    theta = np.empty(28, np.float32)
    for shard, layout in zip(simulation.shards, simulation._layouts, strict=True):
        assert shard.core.version == 40
        for slot, piece in enumerate(layout.slices):
            start = simulation.spec.offsets[piece.tensor] + piece.start
            own = shard.layout.offsets
            theta[start : start + piece.size] = shard.core.model.theta[own[slot] : own[slot + 1]]
    problem = before.problem
    assert problem.accuracy(theta) > problem.accuracy(before.weights)


@pytest.mark.parametrize("name", ["adacomp", "gsp", "esync"])
def test_twice_the_same_bits(name):
    settings = {
        "steps": "lognormal:0.3,0.5",
        "links": (Link(0.05, 20, 0.05),),
        "failures": "2@3-9",
        "lease_seconds": 2.0,
        "iter_max": 60,
        "choices": {"groups": ((1, 2), (3,))} if name == "gsp" else {},
    }
    one, two = (played(name, 3, **settings) for _ in range(2))
    assert one.clock.now == two.clock.now
    assert core(one).model.theta.tobytes() == core(two).model.theta.tobytes()
    for left, right in zip(one.workers, two.workers, strict=True):
        assert left.report() == right.report()
        assert left.rounds() == right.rounds()
    other = played(name, 3, **(settings | {"steps": "lognormal:0.3,0.4"}))
    assert other.clock.now != one.clock.now


def test_a_dead_worker_is_out_after_its_lease_and_comes_back():
    simulation = simulated("bsp", 2, failures="2@10.2-30", lease_seconds=5.0, iter_max=100)
    times = []

    def keep(now):
        if len(times) < core(simulation).version:
            times.append(now)

    assert simulation.play(keep, lambda: False) == "iter_max"
    gaps = np.diff(times)
    # Worker 2's lease expires, then worker 1 continues alone; one round waits for the returned one.
    assert sorted(gaps[~np.isclose(gaps, 0.5)]) == [1.0, 5.0]
    membership = core(simulation).membership
    assert (membership.num_left, membership.num_returned) == (1, 1)
    assert core(simulation).counters.worker(2).pushes > 20


def test_who_returns_before_the_lease_ends_goes_on_at_once():
    simulation = played("asgd", 2, failures="2@10.2-11", lease_seconds=5.0, iter_max=100)
    membership = core(simulation).membership
    assert (membership.num_left, membership.num_returned) == (0, 1)
    assert simulation.clock.now == pytest.approx(25.5, abs=0.51)


def test_a_push_that_is_on_its_way_dies_with_its_worker():
    slow = (Link(0.001, 0),)
    alive = played("asgd", 1, links=slow, iter_max=3)
    killed_at = alive.clock.now - 0.1  # within the third push
    dead = played("asgd", 1, links=slow, failures=f"1@{killed_at}", iter_max=3)
    assert dead.end == "interrupted"
    assert core(dead).version == 2


def test_when_all_are_dead_the_run_cannot_go_on():
    simulation = played("asgd", 2, failures="1@3,2@4", iter_max=100)
    assert simulation.end == "interrupted"
    assert core(simulation).version == 12 or core(simulation).version == 13


def test_virtual_seconds_end_a_run():
    simulation = played("asgd", 2, max_seconds=7.0, iter_max=10_000)
    assert simulation.end == "max_seconds"
    assert simulation.clock.now == pytest.approx(7.0)


def test_examples_end_a_run():
    simulation = played("asgd", 2, epochs=0.5, iter_max=10_000)
    assert simulation.end == "epochs"
    assert core(simulation).samples == 200


def test_a_wish_to_stop_ends_a_run():
    simulation = simulated("asgd", 2, iter_max=10_000)

    def keep(now):
        if now >= 5.0 and simulation.end is None:
            simulation.stop("target_accuracy")

    assert simulation.play(keep, lambda: False) == "target_accuracy"
    assert simulation.clock.now == 5.0


def test_gradients_that_stay_non_finite_end_a_run():
    simulation = played("asgd", 2, trainer=ToyTrainer(poisoned=True), iter_max=10_000)
    assert simulation.end == "diverged"
    assert core(simulation).version == 0


def test_esync_gives_fast_workers_more_steps():
    simulation = played("esync", 3, steps="0.1,0.2,0.8", iter_max=12)
    local = {number: core(simulation).counters.worker(number).local_steps for number in (1, 2, 3)}
    assert local[3] == 12
    assert local[1] > 1.5 * local[2] > 1.5 * local[3]
    assert simulation.clock.now < 12 * 1.05


def test_seconds_in_which_the_pacing_is_decided_are_measured():
    simulation = played("esync", 2, steps="0.1,0.4", links=(Link(0, 20),), iter_max=6)
    for row in rounds_of(simulation, 1):
        assert row["time"][round_trace.CHECK_READY] >= 0.04 - 1e-9


def test_an_update_that_only_the_shard_finds_non_finite_is_refused_and_counted(monkeypatch):
    def refuse(self, worker, push, payload):
        raise NonFinite("not finite")

    monkeypatch.setattr(PushDecoder, "decode", refuse)
    simulation = played("asgd", 1, iter_max=5)
    assert simulation.end == "diverged"
    assert core(simulation).counters.rejected["non_finite"] == 101


def test_a_thousand_workers_of_asp_cost_no_more_bookkeeping():
    """Every event of the crowd is handled by looking at a few workers, not at all workers."""
    simulation = simulated("adacomp", 50, steps="lognormal:0.2,0.3", iter_max=300)
    shard, seen = simulation.shards[0], []
    handle = shard.core.handle

    def counting(event, now):
        seen.append(type(event))
        return handle(event, now)

    shard.core.handle = counting
    simulation.play(lambda now: None, lambda: False)
    assert seen.count(events.Push) == 300
    assert len(seen) < 300 + 4 * 50 + 20


def test_settings_reach_the_cores():
    simulation = simulated("asgd", 2, nb_ps=2, max_seconds=9.0)
    first, second = (shard.core.config for shard in simulation.shards)
    assert (first.max_seconds, second.max_seconds) == (9.0, None)
    assert dataclasses.replace(first, max_seconds=None, spec=second.spec) == second
