"""Local steps with momentum and Adam through the real cores equal numpy, also over a restart."""

import json

import numpy as np
import pytest

from tests.virtual.run import MiniRun
from tests.virtual.toy import Softmax, method
from thinwire.runtime.persistence.checkpoint import Checkpoints

RATE = 0.05
FIXED = {"overrides": {"pacer": "fixed"}}


class Momentum:
    """Ten obvious lines of numpy: one worker's local steps."""

    def __init__(self, steps_per_round, gamma=1.0):
        self.problem, self.steps, self.gamma = Softmax(), steps_per_round, gamma
        self.base = np.random.default_rng(1).normal(size=28).astype(np.float32) * 0.1

    def round(self, batches, velocities, beta):
        """Return the new base; `velocities` of each worker change in place."""
        deltas = []
        for worker, own in enumerate(batches):
            here = self.base.copy()
            for batch in own:
                gradient = self.problem.gradient(here.astype(np.float32), batch)[1]
                velocities[worker] = beta * velocities[worker] - RATE * gradient
                here = here + velocities[worker]
            deltas.append(here - self.base)
        self.base = self.base + self.gamma * np.mean(deltas, axis=0)


def batches_by_round(run, steps_per_round):
    """Return [round][worker] -> batches, from the log of a run in which all take as many steps."""
    own = {number: [b for w, b in run.log if w == number] for number in run.workers}
    rounds = len(own[1]) // steps_per_round
    return [
        [own[number][r * steps_per_round : (r + 1) * steps_per_round] for number in sorted(own)]
        for r in range(rounds)
    ]


@pytest.mark.parametrize(
    ("name", "fate", "gamma", "nb_ps"),
    [
        ("fixed", "keep", 1.0, 1),
        ("fixed", "keep", 0.5, 2),
        ("fixed", "reset", 1.0, 1),
        ("fixed", "average", 1.0, 2),
        ("esync", "keep", 1.0, 1),
        ("esync", "average", 0.5, 1),
    ],
)
def test_rounds_are_plain_numpy(name, fate, gamma, nb_ps):
    if name == "fixed":
        chosen = method(
            "bsp",
            nb_workers=2,
            local_steps=3,
            **FIXED,
            global_lr=gamma,
            local_optimizer="momentum",
            local_opt_state=fate,
        )
    else:
        chosen = method(
            "esync",
            nb_workers=2,
            max_local_steps=3,
            global_lr=gamma,
            local_optimizer="momentum",
            local_opt_state=fate,
        )
    run = MiniRun(chosen, iter_max=8, nb_ps=nb_ps, rate=RATE)
    if name == "esync":  # the answer is always "train on": both take as many steps as are allowed
        for worker in run.workers.values():
            worker.ready = lambda: False
    run.run()
    textbook, velocities = Momentum(3, gamma), [np.zeros(28), np.zeros(28)]
    rounds = batches_by_round(run, 3)
    assert len(rounds) == 8
    for batches in rounds:
        textbook.round(batches, velocities, 0.9)
        if fate == "reset":
            velocities = [np.zeros(28), np.zeros(28)]
        elif fate == "average":
            velocities = [np.mean(velocities, axis=0)] * 2
    np.testing.assert_allclose(run.theta, textbook.base, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["fixed", "esync"])
def test_a_local_rate_of_its_own_scales_the_schedule_s(name):
    """Twice the local rate at half the scheduled one is the same run."""
    runs = []
    for rate, local in ((RATE, None), (RATE / 2, RATE)):
        chosen = method(
            "esync" if name == "esync" else "bsp",
            nb_workers=2,
            local_steps=3 if name == "fixed" else None,
            overrides={"pacer": name},
            max_local_steps=3 if name == "esync" else 0,
            local_lr=local,
            learning_rate=rate,
        )
        runs.append(MiniRun(chosen, iter_max=10, rate=rate).run())
    np.testing.assert_array_equal(runs[0].theta, runs[1].theta)


def test_momentum_in_one_local_step_is_not_the_server_s():
    """The worker's velocity sees its own batches alone; without momentum both are SSGD."""
    plain = MiniRun(method("esync", nb_workers=2, max_local_steps=1), 20, rate=RATE).run()
    ssgd = MiniRun(method("ssgd", nb_workers=2), 20, rate=RATE).run()
    np.testing.assert_allclose(plain.theta, ssgd.theta, rtol=0, atol=1e-6)
    moved = MiniRun(
        method("esync", nb_workers=2, max_local_steps=1, local_optimizer="momentum"), 20, rate=RATE
    ).run()
    assert np.abs(moved.theta - ssgd.theta).max() > 1e-3


@pytest.mark.parametrize(
    ("optimizer", "within_a_round", "fate"),
    [
        *(("momentum", True, fate) for fate in ("keep", "reset", "average")),
        ("adam", True, "keep"),
        ("adam", True, "average"),
        ("adam", False, "keep"),
    ],
)
def test_resume_is_exact(optimizer, fate, within_a_round, tmp_path):
    chosen = method(
        "asgd",
        nb_workers=1,
        local_steps=3,
        **FIXED,
        local_optimizer=optimizer,
        local_opt_state=fate,
    )

    def started(generation=0):
        return MiniRun(chosen, iter_max=1000, rate=RATE, generation=generation)

    def advance(run, versions):
        while run.shards[0].version < versions:
            assert run.turn()

    whole = started()
    whole.join_all()
    advance(whole, 8)

    first = started()
    first.join_all()
    advance(first, 4)
    if within_a_round:
        assert first.turn()
    worker = first.workers[1]
    assert worker.core.round.num_steps == int(within_a_round)
    saved = {
        "ps": first.shards[0].state_dict(),
        "worker": worker.core.save(),
        "batches": json.dumps(worker.batches.bit_generator.state),
    }
    Checkpoints.in_folder(tmp_path).save(4, saved)
    state = Checkpoints.in_folder(tmp_path).load_latest()[1]

    second = started(generation=1)
    second.shards[0].load_state_dict(state["ps"])
    resumed = second.workers[1]
    resumed.batches.bit_generator.state = json.loads(state["batches"])
    assert resumed.core.restore(state["worker"], second.shards[0]._members[1].last_step)
    second.join_all()
    resumed.core.resume_round()
    advance(second, 8)
    np.testing.assert_array_equal(second.theta, whole.theta)


def test_a_worker_that_comes_late_starts_at_the_mean_slots():
    chosen = method(
        "asgd",
        nb_workers=2,
        local_steps=2,
        **FIXED,
        local_optimizer="adam",
        local_opt_state="average",
    )
    run = MiniRun(chosen, iter_max=1000, rate=RATE)
    run.workers[1].join()
    for _ in range(6):
        run.turn()
    run.workers[2].join()
    late = chosen.local.pack(run.workers[2].core.round.slots)
    np.testing.assert_array_equal(late, run.shards[0].averages.mean)
    assert late[0] == 6 and late[1:].any()
