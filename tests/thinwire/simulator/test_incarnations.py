"""Simulated broken streams and dead shards: repeated pushes, and reconnections."""

import functools

import numpy as np
import pytest

from tests.thinwire.simulator.toy import ToyTrainer, dataset, simulated
from tests.virtual.toy import KERNELS
from thinwire.ops.types import Link
from thinwire.ps.core import events
from thinwire.simulator.simulation import Simulation
from thinwire.simulator.storage import SimulatedDisk, StorageSetup

LINK = Link(0.5, 20.0)


def sent_by(worker):
    """Return a worker's future pushes to shard 0: (step, update) of each push."""
    connection = worker.exchange.connections[0]
    found, send = [], connection.send

    def noted(event, sizes, counted):
        if isinstance(event, events.Push):
            found.append((event.head.step, event.update.values.copy()))
        send(event, sizes, counted)

    connection.send = noted
    return found


def play(simulation, until=200.0):
    return simulation.play(lambda now: None, lambda: simulation.clock.now > until)


def kept(folder, journal="on", **settings):
    """Return a simulation with one shard, which keeps its state."""
    plain = simulated(
        "adacomp",
        2,
        steps="0.5,0.7",
        links=(LINK,),
        iter_max=40,
        choices={"compression_rate": 0.3},
        run_dir=folder,
        lease_seconds=4.0,
        checkpoint_interval_seconds=2.0,
        **settings,
    )
    keeps = StorageSetup(journal, (SimulatedDisk(),))
    return Simulation(plain._run, plain.own, ToyTrainer(), dataset(), KERNELS, keeps)


def test_a_push_that_is_sent_again_is_that_workers_own():
    """All workers share one buffer of gradients; others continue while one repeats its Hello."""
    simulation = simulated("asgd", 3, steps="0.5,0.11,0.13", links=(LINK,), iter_max=80)
    worker = simulation.workers[0]
    found = sent_by(worker)
    connection = worker.exchange.connections[0]

    def cut():
        connection.cut_until = simulation.clock.now + 0.6
        connection.snap()

    for when in (0.59, 2.1, 3.9):
        simulation.clock.at(when, cut)
    assert play(simulation) == "iter_max"
    steps = [step for step, _ in found]
    again = [n for n in range(1, len(steps)) if steps[n] == steps[n - 1]]
    assert again
    for number in again:
        np.testing.assert_array_equal(found[number][1], found[number - 1][1])


def test_a_shard_that_was_killed_goes_on_from_its_journal(tmp_path):
    simulation = kept(tmp_path)
    shard, versions = simulation.shards[0], []

    def kill():
        versions.append(shard.core.version)
        shard.kill()
        assert not shard.listens
        simulation.clock.at(simulation.clock.now + 3.0, start)

    def start():
        shard.start()
        versions.append(shard.core.version)

    simulation.clock.at(7.3, kill)
    assert play(simulation) == "iter_max"
    assert versions[0] == versions[1] > 10
    assert (shard.core.config.generation, shard.core.counters.lost_updates) == (1, 0)
    assert shard.core.version == 40


def test_without_a_journal_it_goes_on_from_its_snapshot(tmp_path):
    simulation = kept(tmp_path, journal="off")
    shard = simulation.shards[0]
    simulation.clock.at(7.3, shard.kill)
    simulation.clock.at(8.0, shard.start)
    assert play(simulation) == "iter_max"
    assert shard.core.config.generation == 1 and shard.core.counters.lost_updates > 0


def test_who_finds_no_shard_gives_up_after_its_patience(tmp_path):
    simulation = kept(tmp_path, reconnect_timeout_seconds=30.0)
    shard = simulation.shards[0]
    simulation.clock.at(7.3, shard.kill)
    assert play(simulation, until=60.0) == "interrupted"
    assert not any(worker.alive for worker in simulation.workers)
    with pytest.raises(ValueError, match="shard 0"):
        simulated("asgd", 1).shards[0].start()


@pytest.mark.parametrize("what", ["freeze", "silence"])
def test_a_stream_without_progress_is_opened_anew(what):
    simulation = simulated("asgd", 2, links=(LINK,), iter_max=200, lease_seconds=2.0)
    shard, worker = simulation.shards[0], simulation.workers[0]
    connection = worker.exchange.connections[0]
    strike = functools.partial(shard.freeze, 25.0) if what == "freeze" else connection.fall_silent
    simulation.clock.at(5.2, strike)
    assert play(simulation) == "iter_max"
    assert connection.number == 2  # the second stream
    assert shard.core.counters.worker(1).pushes > 50


@pytest.mark.parametrize("skew", [98_765.4321, -54_321.0123, 1e9 / 3])
def test_a_clock_that_is_ahead_rings_no_alarm_too_early(tmp_path, skew):
    """Rounded down, the alarm rang before its time, and again at once, for ever."""
    simulation = kept(tmp_path)
    shard = simulation.shards[0]
    shard.skew = skew
    assert play(simulation) == "iter_max"
    assert shard.journaled.journal.num_records < 2000
