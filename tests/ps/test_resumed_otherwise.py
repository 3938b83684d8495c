"""A restarted shard with another worker program, or with --resume and another offer."""

import dataclasses

import numpy as np
import pytest

from tests.threads.offered import OFFER, SGD, SPEC, offered_run, weights_of
from tests.worker_steps import exchange
from thinwire.ops.offer import Described, Offer
from thinwire.ops.types import ModelSpec, TensorSpec
from thinwire.ps.persistence.shard_store import SavedShard
from thinwire.runtime.run.program import Program
from thinwire.runtime.run.resuming import OtherRun

ONE = ("--nb_workers=1", "--journal=off")
PROGRAM = Program("train.py", {"train.py": "1"}, (), {"optimizer": "SGD(learning_rate=0.5)"})
EDITED = dataclasses.replace(PROGRAM, files={"train.py": "2"})
MOMENTUM = {"learning_rate": 0.5, "momentum": 0.5}


def stepping_with(name, **config) -> Offer:
    described = dataclasses.replace(
        SGD, optimizer=Described(name, {"learning_rate": 0.5, **config})
    )
    return dataclasses.replace(OFFER, optimizers=(described,))


def train(worker, steps):
    """Join, push gradients of ones, leave; return weights before and after them."""
    worker.join()
    first = worker.begin().copy()
    for _ in range(steps):
        gradient = np.ones(SPEC.num_parameters, np.float32)
        exchange(worker, gradient)
    last = worker.core.weights.copy()
    worker.leave("done")
    return first, last


def worker_of(run, program=PROGRAM, offer=OFFER, flags=(), weights=None):
    worker = run.worker(1, offer, weights=weights, flags=flags)
    for shard in worker.exchange.shards:
        for name, value in program.rows():
            shard.hello.fingerprint.add(name=name, value=value)
    return worker


def interrupted(folder, offer=OFFER, nb_ps=1):
    """Train three steps, and interrupt the shards; return the weights."""
    with offered_run(folder, *ONE, nb_ps=nb_ps) as run:
        for shard in range(nb_ps):
            run.listen(shard)
        _, last = train(worker_of(run, offer=offer), 3)
        run.interrupt()
    return last


def test_the_same_program_joins_and_another_is_refused_in_one_line(tmp_path):
    before = interrupted(tmp_path)
    with offered_run(tmp_path, *ONE) as run:
        run.listen()
        with pytest.raises(
            OtherRun, match=r"^--run_dir=\S+ holds .*train.py has changed.*update 3"
        ):
            worker_of(run, EDITED).join()
        first, _ = train(worker_of(run, weights=weights_of(9)), 1)
    np.testing.assert_array_equal(first, before)


@pytest.mark.parametrize(
    ("was", "now", "change"),
    [
        # Another rate: the old velocity continues, and moves the weights by the new rate.
        (stepping_with("SGD", momentum=0.5), {"learning_rate": 0.1, "momentum": 0.5}, 0.5375),
        # No momentum: the optimizer begins again.
        (stepping_with("SGD", momentum=0.5), {"learning_rate": 0.1, "momentum": 0.0}, 0.1),
        (OFFER, {"learning_rate": 0.1, "momentum": 0.5}, 0.1),
    ],
    ids=["another rate", "no momentum", "momentum"],
)
@pytest.mark.parametrize("nb_ps", [1, 2])
def test_resume_continues_the_weights_with_another_optimizer(tmp_path, was, now, change, nb_ps):
    before = interrupted(tmp_path, was, nb_ps)
    with offered_run(tmp_path, *ONE, "--resume", nb_ps=nb_ps) as run:
        for shard in range(nb_ps):
            run.listen(shard)
        offer = stepping_with("SGD", **now)
        first, last = train(worker_of(run, EDITED, offer, weights=weights_of(9)), 1)
        np.testing.assert_array_equal(first, before)
        np.testing.assert_allclose(first - last, change, atol=1e-5)
        assert run.shards[0].core.version == 4
        run.interrupt()
    with offered_run(tmp_path, *ONE, nb_ps=nb_ps) as run:  # the run uses the new values
        for shard in range(nb_ps):
            run.listen(shard)
        assert train(worker_of(run, EDITED, offer), 1)[0].tolist() == last.tolist()


def test_resume_refuses_another_model_in_words(tmp_path):
    interrupted(tmp_path)
    larger = ModelSpec((*SPEC.tensors, TensorSpec("added/kernel", (2,))))
    offer = dataclasses.replace(OFFER, spec=larger)
    with offered_run(tmp_path, *ONE, "--resume") as run:
        run.listen()
        with pytest.raises(OtherRun, match="added/kernel.*--resume cannot change.*--overwrite"):
            worker_of(run, EDITED, offer).join()
        first, _ = train(worker_of(run, EDITED, weights=weights_of(9)), 1)
        assert first.shape == (SPEC.num_parameters,)


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--seed=2", "seed was '1' and is now '2'"),
        ("--method=bsp", "method was 'asgd' and is now 'bsp'"),
        ("--clip_norm=2", "clip_norm was '0.0' and is now '2.0'"),
        ("--nb_workers=3", None),
        ("--lease_seconds=3", None),
        ("--iter_max=5", None),
        ("--max_seconds=5", None),
    ],
)
def test_flags_that_change_the_result_are_compared_and_no_others(tmp_path, flag, words):
    interrupted(tmp_path)
    with offered_run(tmp_path, *ONE) as run:
        settings, own, _ = run.settings(flag, "--id_ps=0", "--type_node=PS")
        saved = SavedShard(settings, own.node)
        if words is None:
            saved.check(SPEC)
            return
        with pytest.raises(OtherRun, match=words):
            saved.check(SPEC)
        resumed, _, _ = run.settings(flag, "--resume", "--id_ps=0", "--type_node=PS")
        SavedShard(resumed, own.node).check(SPEC)
