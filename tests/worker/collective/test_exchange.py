"""Whole collective runs equal runs through the PS, with joining, leaving and dying workers."""

import itertools
import threading

import numpy as np
import pytest

from tests.virtual.run import MiniRun
from tests.virtual.toy import method
from tests.waiting import wait_until
from tests.worker.collective_run import Shard, WorkerThread
from thinwire.ops.collectives import REGISTRY
from thinwire.ps.core import events

pytestmark = pytest.mark.timeout(90)


def among(name="bsp", nb_workers=3, collective="ring", **choices):
    return method(name, nb_workers, collective=collective, **choices)


@pytest.fixture
def shards():
    opened = []

    def start(*arguments, **options):
        opened.append(Shard(*arguments, **options))
        return opened[-1]

    yield start
    for shard in opened:
        shard.close()


def ended(workers):
    return [worker.end() for worker in list(workers)]  # all are started first


def assert_same_bits(workers, shard=None):
    for worker in workers:
        assert worker.error is None, worker.error
        np.testing.assert_array_equal(worker.core.base, workers[0].core.base)
    if shard is not None:
        wait_until(lambda: shard.core.stop_reason is not None)
        order = np.concatenate(
            [
                np.arange(start, start + piece.size)
                for piece in shard.layouts[0].slices
                for start in [workers[0].core.spec.offsets[piece.tensor] + piece.start]
            ]
        )
        np.testing.assert_array_equal(shard.core.model.theta, workers[0].core.base[order])


@pytest.mark.parametrize(
    ("collective", "nb_workers", "choices"),
    [
        *((name, 3, {}) for name in REGISTRY),
        ("ring", 1, {}),
        ("ring", 2, {"overrides": {"server_optimizer": "momentum"}}),
        ("ring", 2, {"overrides": {"server_optimizer": "adam"}}),
        ("blocks", 2, {"overrides": {"pacer": "fixed"}, "local_steps": 3}),
    ],
)
def test_a_run_ends_where_the_ps_would_have_led_it(shards, collective, nb_workers, choices):
    shard = shards(among(nb_workers=nb_workers, collective=collective, **choices), iter_max=12)
    workers = ended(WorkerThread(number, shard) for number in range(1, nb_workers + 1))
    assert_same_bits(workers, shard)
    assert shard.core.version == 12
    assert shard.core.stop_reason == "iter_max"
    assert [worker.rounds for worker in workers] == [12] * nb_workers
    reference = MiniRun(method("bsp", nb_workers, **choices), iter_max=12).run()
    np.testing.assert_allclose(workers[0].core.base, reference.theta, rtol=0, atol=1e-6)
    assert shard.core.samples == reference.shards[0].samples


def test_the_ps_gets_every_nth_model_and_the_last_one(shards):
    shard = shards(among(), iter_max=100_000)
    seen, models = [], {}

    def note(worker):
        if worker.number == 1:
            models[worker.rounds] = worker.core.base.copy()
            if worker.rounds < 9:
                seen.append(shard.core.model.theta.copy())

    workers = [WorkerThread(n, shard, sync_every=4, on_round=note) for n in (1, 2, 3)]
    wait_until(lambda: workers[0].rounds >= 10)
    changes = [bool((a != b).any()) for a, b in itertools.pairwise(seen)]
    assert changes == [False, False, False, True, False, False, False, True]
    shard.server.queue.put(events.Stop("target_accuracy"))
    ended(workers)
    wait_until(lambda: shard.core.stop_reason == "target_accuracy")
    assert not shard.core.model.lags
    models[workers[0].exchange._replica.at.number] = workers[0].core.base
    np.testing.assert_array_equal(shard.core.model.theta, models[shard.core.version])


def test_esync_sums_among_workers(shards):
    shard = shards(among("esync"), iter_max=12)
    workers = ended(WorkerThread(number, shard) for number in (1, 2, 3))
    assert_same_bits(workers, shard)
    accounts = shard.core.counters
    assert [accounts.worker(number).pushes for number in (1, 2, 3)] == [12] * 3
    steps = [accounts.worker(number).local_steps for number in (1, 2, 3)]
    assert min(steps) >= 12
    assert shard.core.samples == 8 * sum(steps)


@pytest.mark.parametrize("name", ["bsp", pytest.param("esync", marks=pytest.mark.product)])
def test_the_others_go_on_without_a_dead_member(shards, name):
    """The member dies inside a round: shard 0 counts on it, and its part never arrives."""
    shard = shards(among(name), iter_max=40)

    def die_at_ten(worker):
        worker.dead = worker.number == 1 and worker.rounds == 10

    workers = [WorkerThread(number, shard, on_round=die_at_ten) for number in (1, 2, 3)]
    ended(workers)
    assert workers[0].dead
    assert_same_bits(workers[1:], shard)
    assert shard.core.version == 40
    assert shard.core.membership.num_left == 1
    assert shard.core.counters.worker(1).pushes == 10


def test_a_late_worker_takes_over_model_and_momentum(shards):
    chosen = among(overrides={"server_optimizer": "momentum"})
    shard = shards(chosen, iter_max=60, start_timeout_seconds=0.1)
    gate = threading.Event()

    def wait_at_twenty(worker):
        if worker.rounds == 20:
            gate.wait(20)

    workers = [WorkerThread(n, shard, 7, on_round=wait_at_twenty) for n in (2, 3)]
    wait_until(lambda: shard.core.version >= 20)
    workers.append(WorkerThread(1, shard, 7))
    wait_until(lambda: 1 in shard.core.rounds.joining())
    gate.set()
    assert_same_bits(ended(workers), shard)
    assert 30 <= workers[2].rounds <= 40
    assert shard.core.counters.worker(1).pushes == workers[2].rounds


def test_a_worker_that_comes_back_is_another_life(shards):
    shard = shards(among(nb_workers=2), iter_max=30)
    gate = threading.Event()

    def die_at_five_or_wait_at_ten(worker):
        worker.dead = worker.number == 2 and worker.rounds == 5
        if worker.rounds == 10:
            gate.wait(20)

    first, second = (WorkerThread(n, shard, 1, die_at_five_or_wait_at_ten) for n in (1, 2))
    second.end()
    wait_until(lambda: shard.core.version == 10)
    again = WorkerThread(2, shard)
    wait_until(lambda: shard.core.rounds.joining())
    gate.set()
    assert_same_bits(ended([first, again]), shard)
    assert again.rounds == 19
    assert shard.core.membership.num_returned == 1


def test_workers_outlive_a_restart_of_the_ps(shards):
    """Workers resume from its snapshot, as they do when the PS steps itself."""
    chosen = among(overrides={"server_optimizer": "momentum"})
    shard = shards(chosen, iter_max=10**6)
    workers = [WorkerThread(number, shard) for number in (1, 2, 3)]
    wait_until(lambda: shard.core.version >= 5)
    shard.close()
    state, port = shard.core.state_dict(), shard.port
    goal = shard.core.version + 10
    second = shards(chosen, goal, generation=1, port=port, state=state)
    assert_same_bits(ended(workers), second)
    assert second.core.version == goal


def test_what_is_no_longer_finite_ends_the_run(shards):
    shard = shards(among(nb_workers=2), iter_max=10**6)

    def spoil(worker):
        if worker.rounds == 3:
            worker.core.learning_rate = np.inf

    workers = ended(WorkerThread(number, shard, on_round=spoil) for number in (1, 2))
    assert ["are NaN or infinite" in str(worker.error) for worker in workers] == [True, True]
    wait_until(lambda: shard.core.stop_reason == "diverged")
