"""A shard with a model accepts the model of the script's next phase and keeps counting."""

import concurrent.futures
import dataclasses
import gc
import shutil
import threading
import types
import weakref

import numpy as np
import pytest

from tests.threads.offered import OFFER, SPEC, offered_run, restored_shard, weights_of
from tests.worker_steps import exchange
from thinwire.ops.downlink.types import Operation
from thinwire.ops.offer import Described, OptimizerOffer
from thinwire.ops.types import ModelSpec, ShardLayout, Slice, TensorSpec, Update
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.grpc.session import RequestRejected
from thinwire.ps.core import events
from thinwire.ps.scripts import ended_models
from thinwire.ps.scripts.initial_model import offered_layouts
from thinwire.supervisor.evaluation_requests import CentralModel
from thinwire.worker.client.control import Control
from thinwire.worker.core.messages import ScriptFigures

LAST = ModelSpec((TensorSpec("out/kernel", (3, 50)), TensorSpec("new/bias", (50,))))
OTHER = dataclasses.replace(
    OFFER, spec=LAST, optimizers=(OptimizerOffer(Described("SGD", {"learning_rate": 0.25})),)
)
BEGIN = ("fit-2-begin", "fit-2-begin-offered", "fit-2-begin-joined")


class Script:
    """One worker of a script, with its control stream.

    Args:
        run: Name of the run.
        number: The worker's id.
    """

    def __init__(self, run, number):
        self.run, self.number = run, number
        self.worker = run.worker(number)
        self.worker.join()
        settings, _, own = run.settings(f"--id_worker={number}")
        self.control = Control(settings, own.id_worker, self.worker.run_id)
        self.weights = self.worker.begin()

    def step(self, gradient=1.0, samples=10):
        """Push the same gradient everywhere, and take over the answer."""
        part, values = self.worker, np.full_like(self.weights, gradient)
        exchange(part, values, samples, 0.5, ScriptFigures())
        return part.core.weights

    def change(self, offer=OTHER, phase=4, weights=None):
        """Go to the next phase, as the chief or behind it; return whether it was the chief."""
        opening = self.control.barrier(BEGIN[0], changes=True)
        assert opening.changes
        self.worker.leave("done")
        old, self.worker = self.worker, self.run.worker(self.number, offer, weights)
        for shard in self.worker.exchange.shards:
            shard.hello.phase, shard.hello.run_id = phase, old.run_id
        if not opening.offers:
            self.control.barrier(BEGIN[1])
        self.worker.join()
        if opening.offers:
            self.control.barrier(BEGIN[1])
        self.weights = self.worker.begin()
        self.control.barrier(BEGIN[2])
        return opening.offers

    def close(self):
        self.worker.leave("done")
        self.control.finish()


def together(scripts, verb):
    """Run a function for all scripts, each in its own thread; return the results."""
    with concurrent.futures.ThreadPoolExecutor() as threads:
        return list(threads.map(verb, scripts))


@pytest.mark.parametrize("nb_ps", [1, 2])
def test_all_go_on_with_the_chief_s_model_and_version_and_examples_go_on(nb_ps, tmp_path):
    with offered_run(tmp_path, nb_ps=nb_ps) as run:
        for number in range(nb_ps):
            run.listen(number)
        scripts = together([1, 2], lambda number: Script(run, number))
        for script in scripts:
            script.step()
        generation = run.shards[0].core.config.generation
        former = [weakref.ref(shard.core) for shard in run.shards.values()]
        assert together(scripts, Script.change) == [True, False]
        for script in scripts:
            np.testing.assert_array_equal(script.weights, weights_of(1, LAST))
            assert script.worker.core.versions == [2] * nb_ps
            assert script.worker.core.samples_of_run == 20
            assert script.worker.core.learning_rate == 0.25
            assert script.worker.core.schedule_counts == (0,)
        weights = scripts[1].step(2.0)
        np.testing.assert_allclose(weights, weights_of(1, LAST) - 0.5, rtol=1e-6)
        for shard in run.shards.values():
            assert (shard.core.version, shard.served.phase) == (3, 4)
            assert shard.core.config.generation == generation + 1
            assert shard.served.spec == LAST
        gc.collect()
        assert [core() for core in former] == [None] * nb_ps, "its weights take memory"
        for script in scripts:
            script.close()


def central(run, script, spec, phase):
    """Return the weights that an evaluator receives in a phase."""
    settings, _, _ = run.settings()
    offer = OFFER if spec is SPEC else OTHER
    layouts = offered_layouts(settings, offer)
    model = CentralModel(settings, script.worker.run_id, spec, layouts, 0, phase)
    try:
        return model.fetch().weights
    finally:
        model.close()


def test_an_evaluator_that_comes_late_gets_what_a_phase_has_ended_with(tmp_path, monkeypatch):
    with offered_run(tmp_path, "--nb_workers=1", nb_ps=2) as run:
        run.listen(0)
        run.listen(1)
        script = Script(run, 1)
        first = script.step().copy()
        script.change()
        second = script.step().copy()
        for spec, phase, weights in ((SPEC, 0, first), (LAST, 4, second)):
            np.testing.assert_array_equal(central(run, script, spec, phase), weights)
        monkeypatch.setattr(ended_models, "_MOST_BYTES", 0)
        for shard in run.shards.values():
            kept = shard.server.ended_models
            other = dataclasses.replace(kept.find(0), first=3, last=3)
            kept.add(other)
            kept.add(other)
        with pytest.raises(RequestRejected, match="phase 0"):
            central(run, script, SPEC, 0)
        script.close()


@pytest.mark.product
def test_synchronous_workers_wait_for_each_other_in_the_next_phase(tmp_path):
    with offered_run(tmp_path, "--method=bsp") as run:
        run.listen()
        scripts = together([1, 2], lambda number: Script(run, number))
        together(scripts, Script.step)
        together(scripts, Script.change)
        one, two = together(scripts, lambda script: script.step(script.number).copy())
        np.testing.assert_array_equal(one, two)
        np.testing.assert_allclose(one, weights_of(1, LAST) - 0.25 * 1.5, rtol=1e-6)
        assert run.shards[0].core.version == 2
        for script in scripts:
            script.close()


def test_a_worker_of_an_earlier_phase_is_refused_with_the_number(tmp_path):
    with offered_run(tmp_path, "--nb_workers=1") as run:
        run.listen()
        script = Script(run, 1)
        script.change()
        with pytest.raises(RequestRejected, match="have gone to phase 4") as refusal:
            run.worker(1).join()
        assert refusal.value.reason == pb.REASON_PHASE and refusal.value.phase == 4
        script.close()


def test_a_model_that_cannot_be_built_is_refused_and_the_run_stays_as_it_is(tmp_path):
    with offered_run(tmp_path, "--nb_workers=1") as run:
        run.listen()
        script = Script(run, 1)
        broken = np.full(LAST.num_parameters, np.nan, np.float32)
        with pytest.raises(RequestRejected, match="NaN or infinity"):
            script.change(weights=broken)
        again = run.worker(1)
        again.join()
        assert run.shards[0].core.model.theta.size == SPEC.num_parameters
        again.leave("done")
        script.control.finish()


@pytest.mark.product
def test_nobody_begins_a_phase_that_the_scripts_have_not_agreed_on(tmp_path):
    with offered_run(tmp_path, "--nb_workers=1") as run:
        run.listen()
        script = Script(run, 1)
        eager = run.worker(1, OTHER)
        eager.exchange.shards[0].hello.phase = 4
        waits = threading.Thread(target=eager.join, daemon=True)
        waits.start()
        waits.join(0.5)
        assert waits.is_alive() and run.shards[0].served.phase == 0
        script.control.barrier(BEGIN[0], changes=True)
        script.worker.leave("done")
        waits.join(20)
        assert not waits.is_alive() and run.shards[0].served.phase == 4
        eager.leave("done")
        script.control.finish()


@pytest.mark.parametrize("journal", ["on", pytest.param("off", marks=pytest.mark.product)])
def test_a_shard_that_is_started_again_is_in_the_phase_that_it_was_in(journal, tmp_path):
    flags = ("--nb_workers=1", f"--journal={journal}", "--checkpoint_interval_seconds=1000")
    with offered_run(tmp_path / "run", *flags) as run:
        run.listen()
        script = Script(run, 1)
        script.step()
        script.change()
        weights = script.step(4.0).copy()
        shutil.copytree(tmp_path / "run", tmp_path / "copy")  # as after kill -9
        shard = restored_shard(
            *run.settings("--type_node=PS", f"--run_dir={tmp_path / 'copy'}")[:2]
        )
        assert (shard.served.phase, shard.served.spec) == (4, LAST)
        assert shard.run_id == script.worker.run_id
        core = shard.served.core
        assert core.model.schedule_counts == (0,)
        if journal == "on":
            assert core.version == 2
            np.testing.assert_array_equal(core.model.theta, weights)
        else:  # only the snapshot that the phase began with
            assert core.version == 1
            np.testing.assert_array_equal(core.model.theta, weights_of(1, LAST))
        script.close()


def test_models_of_phases_that_were_undone_are_not_known():
    """A shard that restarts from an earlier snapshot has the models of later phases on disk."""
    layout = ShardLayout((Slice(0, 0, 3),))
    update = Update(None, np.ones(3, np.float32))
    reply = events.Reply(0, 0, Operation.FULL, update, 5, 1, 0.1, samples=0, stop_reason=None)
    spans = ((0, 1), (2, 3), (4, 5), (6, 6))
    kept = [ended_models.EndedModel(*span, layout, 0, reply).to_plain() for span in spans]
    models = ended_models.EndedModels(types.SimpleNamespace(load_all=lambda: kept), 4)
    assert [models.find(phase) is not None for phase in range(7)] == [True] * 4 + [False] * 3
    np.testing.assert_array_equal(models.find(3).reply.update.values, np.ones(3, np.float32))
