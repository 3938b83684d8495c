"""--overlap: the worker computes the next gradient during an exchange and reports it."""

import numpy as np
import pytest

from tests.virtual.run import MiniRun, MiniWorker
from tests.virtual.toy import Softmax, method
from thinwire.ops.codecs.base import NonFiniteUpdate
from thinwire.ops.types import ConfigurationError
from thinwire.ps.core.counters import Counters

RATE = 0.1


class AheadWorker(MiniWorker):
    """Receives the reply to a push only when the next gradient is ready."""

    computed = None

    def step(self):
        core = self.core
        if self.computed is None:
            batch = self.batches.integers(0, len(self.run.problem.y), self.run.batch)
            self.run.log.append((self.number, batch))
            loss, gradient = self.run.problem.gradient(core.weights, batch)
            self.computed = loss, gradient, list(core.versions)
        if self.outgoing is not None:
            if len(self.replies) < self.run.nb_ps:
                return  # its round is not complete
            self.finish()
            if core.stopped:
                return
        (loss, gradient, versions), self.computed = self.computed, None
        self.outgoing = core.begin(gradient, self.run.batch, loss, computed_at=versions)
        self.push()

    def finish(self):
        self.core.finish([self.replies[each] for each in range(self.run.nb_ps)])
        self.replies, self.outgoing, self.computing = {}, None, not self.core.stopped

    def take(self, shard, reply):
        self.replies[shard] = reply
        if self.outgoing is None and len(self.replies) == self.run.nb_ps:
            self.finish()  # of the first pull


class AheadRun(MiniRun):
    def __init__(self, chosen, **settings):
        super().__init__(chosen, rate=RATE, **settings)
        self.workers = {number: AheadWorker(number, self) for number in self.workers}

    def run(self):
        super().run()
        for worker in self.workers.values():
            if worker.outgoing is not None and len(worker.replies) == self.nb_ps:
                worker.finish()
        return self


def chosen(name, nb_workers, **choices):
    return method(name, nb_workers=nb_workers, overlap=True, **choices)


def delayed_sgd(run, rounds):
    """Ten obvious lines: each step uses the gradient at the weights of one step before."""
    theta = np.random.default_rng(run.seed).normal(size=28).astype(np.float32) * 0.1
    before = theta
    for batches in rounds:
        gradient = Softmax().gradient(before, np.concatenate(batches))[1]
        before, theta = theta, theta - RATE * gradient
    return theta


@pytest.mark.parametrize("nb_ps", [1, 2])
@pytest.mark.parametrize(("name", "nb_workers"), [("asgd", 1), ("bsp", 1), ("bsp", 3)])
def test_it_is_sgd_with_one_step_of_delay(name, nb_workers, nb_ps):
    run = AheadRun(chosen(name, nb_workers), iter_max=40, nb_ps=nb_ps).run()
    each = [[batch for who, batch in run.log if who == number] for number in run.workers]
    rounds = [[batches[number] for batches in each] for number in range(40)]
    np.testing.assert_allclose(run.theta, delayed_sgd(run, rounds), atol=1e-6)


@pytest.mark.parametrize("nb_ps", [1, 2])
@pytest.mark.parametrize("name", ["asgd", "adacomp", "dgs", "gd", "dgc", "ssp", "gsp"])
def test_a_worker_has_what_the_shards_have(name, nb_ps):
    """Exact replies stay exact, though a push is based on more than it was computed at."""
    more = {} if name in ("asgd", "ssp", "gsp") else {"compression_rate": 0.2}
    run = AheadRun(chosen(name, 1, **more), iter_max=60, nb_ps=nb_ps).run()
    np.testing.assert_array_equal(run.workers[1].core.base, run.theta)


def test_the_step_of_staleness_is_declared():
    alone = AheadRun(chosen("asgd", 1), iter_max=20).run()
    assert dict(alone.shards[0].counters.staleness) == {0: 1, 1: 19}
    lockstep = AheadRun(chosen("bsp", 3), iter_max=20).run()
    assert dict(lockstep.shards[0].counters.staleness) == {0: 3, 1: 57}
    assert Counters().staleness == {}


def test_weightings_see_when_an_update_was_computed():
    overrides = {"weighting": "inverse"}
    run = AheadRun(chosen("asgd", 1, overrides=overrides), iter_max=2).run()
    theta = np.random.default_rng(run.seed).normal(size=28).astype(np.float32) * 0.1
    first, second = (Softmax().gradient(theta, batch)[1] for _, batch in run.log[:2])
    np.testing.assert_allclose(run.theta, theta - RATE * (first + second / 2), atol=1e-6)


def test_the_window_of_per_entry_reaches_back_to_it():
    """A shard forgets only versions that no push under way was computed from."""
    run = AheadRun(chosen("adacomp", 3, compression_rate=0.2), iter_max=80)
    beyond = []
    for core in run.shards:
        weigh = core.model.method.weighting.weigh

        def seen(arrivals, context, state, weigh=weigh):
            beyond.extend(a for a in arrivals if a.computed_at < state["first"])
            return weigh(arrivals, context, state)

        object.__setattr__(core.model.method.weighting, "weigh", seen)
    run.run()
    assert run.shards[0].version == 80
    assert beyond == []


def test_after_a_crash_nothing_lies_in_the_future():
    run = AheadRun(chosen("asgd", 1), iter_max=20).run()
    core = run.workers[1].core
    core.versions = [3]
    outgoing = core.begin(np.zeros(28, np.float32), 8, 0.0, computed_at=[7])
    assert outgoing.origins[0].lag == 0


def test_a_bad_gradient_leaves_the_next_push_as_it_was():
    run = AheadRun(chosen("gd", 1, compression_rate=0.2), iter_max=20).run()
    core = run.workers[1].core
    with pytest.raises(NonFiniteUpdate):
        core.begin(np.full(28, np.nan, np.float32), 8, 0.0, computed_at=[1])
    (origin,) = core.begin(np.ones(28, np.float32), 8, 0.0).origins
    assert origin.lag == 0


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("esync", {}, "--pacer=esync"),
        ("bsp", {"overrides": {"pacer": "fixed"}, "local_steps": 2}, "--pacer=fixed"),
        ("dcasgd", {}, "--weighting=dc_asgd"),
        ("bsp", {"collective": "ring"}, "--collective=ring"),
    ],
)
def test_what_must_start_from_the_answer_is_refused(name, more, words):
    with pytest.raises(ConfigurationError, match=words):
        chosen(name, 2, **more)


def test_it_is_part_of_what_all_must_have_alike():
    with_it, without = chosen("bsp", 2).fingerprint(), method("bsp", nb_workers=2).fingerprint()
    assert set(with_it) - set(without) == {("overlap", "True")}
