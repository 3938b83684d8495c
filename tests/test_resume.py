"""k steps, save, load into new objects, k steps == 2k steps, bit for bit, for every policy."""

import json

import numpy as np
import pytest

from tests.virtual.run import MiniRun
from tests.virtual.toy import method
from thinwire.ops.codecs.registry import CODECS
from thinwire.ops.downlink.registry import DOWN_CODECS
from thinwire.ops.pacing.registry import PACERS
from thinwire.ops.sync.rule import SYNC_RULES
from thinwire.ops.weighting.registry import WEIGHTINGS
from thinwire.runtime.persistence.checkpoint import Checkpoints

#: (interface, value) of every policy; each is tried in a one-worker AdaComp run.
POLICIES = [
    *(("pacer", name) for name in PACERS),
    *(("codec", name) for name in CODECS),
    *(("down_codec", name) for name in DOWN_CODECS),
    *(("sync", name) for name in SYNC_RULES),
    *(("weighting", name) for name in WEIGHTINGS),
    # Other policies store their state in the same ways: tests/ops/test_conformance.py has them all.
    *(("server_optimizer", name) for name in ("sgd", "momentum", "adam", "nadam", "lamb")),
]


def start(chosen, iter_max, generation=0):
    return MiniRun(chosen, iter_max=iter_max, nb_ps=1, generation=generation)


def advance(run: MiniRun, versions: int) -> None:
    while run.shards[0].version < versions:
        assert run.turn()


@pytest.mark.parametrize(("interface", "value"), POLICIES)
def test_resume_is_exact(interface, value, tmp_path):
    local_steps = 3 if (interface, value) == ("pacer", "fixed") else 1
    chosen = method(
        "adacomp",
        nb_workers=1,
        compression_rate=0.3,
        local_steps=local_steps,
        overrides={interface: value},
    )
    assert_resumes(chosen, tmp_path)


def test_resume_draws_the_noise_that_was_due(tmp_path):
    overrides = {"pacer": "fixed"}
    choices = {"local_steps": 3, "dp_clip": 0.5, "dp_noise": 1.0}
    assert_resumes(method("bsp", nb_workers=1, overrides=overrides, **choices), tmp_path)


def assert_resumes(chosen, tmp_path):
    whole = start(chosen, 1000)
    whole.shards[0].model.draw_noise_with(b"secret")
    whole.join_all()
    advance(whole, 12)

    first = start(chosen, 1000)
    first.shards[0].model.draw_noise_with(b"secret")
    first.join_all()
    advance(first, 6)
    worker = first.workers[1]
    saved = {
        "ps": first.shards[0].state_dict(),
        "worker": worker.core.save(),
        "batches": json.dumps(worker.batches.bit_generator.state),
    }
    Checkpoints.in_folder(tmp_path).save(6, saved)
    state = Checkpoints.in_folder(tmp_path).load_latest()[1]

    second = start(chosen, 1000, generation=1)
    second.shards[0].load_state_dict(state["ps"])
    resumed = second.workers[1]
    resumed.batches.bit_generator.state = json.loads(state["batches"])
    last_step = second.shards[0]._members[1].last_step
    assert resumed.core.restore(state["worker"], last_step)
    second.join_all()
    advance(second, 12)
    np.testing.assert_array_equal(second.theta, whole.theta)
    assert second.shards[0].samples == whole.shards[0].samples
    assert second.shards[0].counters.staleness == whole.shards[0].counters.staleness
    assert second.shards[0].rounds.clocks() == whole.shards[0].rounds.clocks()


def test_a_checkpoint_of_another_step_does_not_bring_its_residual():
    chosen = method("adacomp", nb_workers=1)
    run = start(chosen, 100)
    run.join_all()
    advance(run, 3)
    saved = run.workers[1].core.save()
    other = start(chosen, 100).workers[1].core
    assert not other.restore(saved, 5)
    assert other.step == 5


def test_state_survives_a_restart_of_the_ps_alone():
    """The worker lives on, its push of the old generation is rejected, nothing is applied twice."""
    chosen = method("adacomp", nb_workers=2, compression_rate=0.2)
    run = MiniRun(chosen, iter_max=80)
    run.join_all()
    advance(run, 20)
    snapshot = run.shards[0].state_dict()
    advance(run, 30)
    again = MiniRun(chosen, iter_max=80, generation=1)
    again.shards[0].load_state_dict(snapshot)
    again.workers = run.workers
    for worker in again.workers.values():
        worker.run = again
        worker.join(reconnects=True)
    while again.turn():
        pass
    assert again.shards[0].version == 80
    assert sum(again.shards[0].counters.staleness.values()) == 80
