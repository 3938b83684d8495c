"""Workers without examples in a round of local steps are not merged and not waited for."""

import numpy as np
import pytest

from tests.virtual.run import MiniRun, MiniWorker
from tests.virtual.toy import method


class Idle(MiniWorker):
    """Has no examples in rounds that `idles` names."""

    idles = staticmethod(lambda step: False)

    def step(self):
        if not self.idles(self.core.step + 1):
            super().step()
            return
        if self.ready():
            outgoing = self.core.end_round()
        else:
            outgoing = self.core.begin(np.full(28, np.nan, np.float32), 0, float("nan"))
        if outgoing is not None:
            self.outgoing, self.computing = outgoing, False
            self.push()


def run_of(name, nb_workers=3, idle=(), idles=lambda step: True, nb_ps=1, **choices):
    choices = {"local_optimizer": "sgd", **choices}
    if name != "esync":
        choices |= {"local_steps": 3}
    run = MiniRun(method(name, nb_workers, **choices), iter_max=8, nb_ps=nb_ps, rate=0.05)
    for number in idle:
        run.workers[number] = Idle(number, run)
        run.workers[number].idles = idles
    return run


@pytest.mark.parametrize("nb_ps", [1, 2])
@pytest.mark.parametrize("name", ["fedavg", "fedopt", "diloco", "esync"])
def test_a_worker_without_examples_is_as_if_it_were_not_there(name, nb_ps):
    """The divisor counts workers with examples, for any weighting; rounds continue."""
    others = run_of(name, nb_ps=nb_ps, idle=(3,)).run()
    alone = run_of(name, nb_workers=2, nb_ps=nb_ps).run()
    assert not others.deadlocked()
    assert [core.version for core in others.shards] == [8] * nb_ps
    if name != "esync":  # how many steps it lets the others take is another matter
        for run in (others, alone):
            assert run.shards[0].samples == 8 * 2 * 3 * run.batch
        ours = {w: [b for n, b in others.log if n == w] for w in (1, 2)}
        theirs = {w: [b for n, b in alone.log if n == w] for w in (1, 2)}
        for worker in (1, 2):
            np.testing.assert_array_equal(ours[worker], theirs[worker])
        np.testing.assert_array_equal(others.theta, alone.theta)
    assert others.shards[0].counters.worker(3).pushes == 0


def test_one_that_has_examples_again_counts_again():
    run = run_of("fedavg", idle=(3,), idles=lambda step: step % 2 == 0).run()
    assert run.shards[0].counters.worker(3).pushes == 4
    assert run.shards[0].counters.worker(1).pushes == 8
    assert np.isfinite(run.theta).all()


def test_a_round_of_nobody_s_examples_is_no_update():
    """Every waiting worker gets the same model, and the next round counts."""
    run = run_of("diloco", nb_workers=2, idle=(1, 2), idles=lambda step: step == 3)
    run.run()
    assert not run.deadlocked()
    assert run.shards[0].version == 8
    assert [each.core.step for each in run.workers.values()] == [9, 9]


def test_its_push_has_nothing():
    run = run_of("fedavg", nb_workers=1, idle=(1,))
    run.join_all()
    for _ in range(3):
        run.turn()
    request = run.workers[1].outgoing
    assert (request.head.samples, request.head.local_steps, request.head.loss) == (0, 0, None)
    assert request.shards == [()]
    event = run.push_event(run.workers[1], 0)
    assert not event.is_copy


def test_some_examples_are_a_round():
    """A mini-batch without any is a step that changes nothing."""
    run = run_of("fedavg", nb_workers=1)
    run.join_all()
    core = run.workers[1].core
    assert core.begin(np.ones(28, np.float32), 8, 0.5) is None
    weights = core.weights.copy()
    assert core.begin(np.full(28, np.nan, np.float32), 0, float("nan")) is None
    np.testing.assert_array_equal(core.weights, weights)
    request = core.begin(np.ones(28, np.float32), 8, 1.5)
    assert (request.head.samples, request.head.local_steps, request.head.loss) == (16, 3, 1.0)
