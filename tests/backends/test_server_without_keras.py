"""A PS where neither Keras nor a backend can be imported: only SGD and Adam work."""

import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.forked import MAIN
from tests.test_offered_processes import gradient_of, offer_with, train
from tests.threads.offered import FLAGS, OFFER, OfferedRun, weights_of
from thinwire.ops.offer import Described, OptimizerOffer
from thinwire.ops.optimizers.adam import FlatAdam
from thinwire.ops.optimizers.keras_schedules import build_schedule
from thinwire.ops.optimizers.momentum_sgd import MomentumSGD
from thinwire.ops.types import Update
from thinwire.proto.grpc.session import RequestRejected

#: A PS that refuses to import Keras and its backends.
BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("keras", "tensorflow", "jax", "torch"):
            raise ModuleNotFoundError(f"blocked: {name}", name=name)
sys.meta_path.insert(0, Blocker())
"""
#: A PS that at its end lists the heavy packages that it has imported, and where their arrays are.
PROGRAM = """
import json, os, sys
from absl import flags
from thinwire.cli import node
node.define_flags()
code = node.main(flags.FLAGS(sys.argv))
heavy = {name.partition(".")[0] for name in sys.modules} & {"keras", "tensorflow", "jax", "torch"}
places = {name: os.environ.get(name) for name in ("JAX_PLATFORMS", "KERAS_TORCH_DEVICE")}
print("HEAVY", json.dumps([sorted(heavy), places]), flush=True)
sys.exit(code)
"""
DECAY = {"initial_learning_rate": 0.3, "decay_steps": 4, "alpha": 0.1}
ONE = ("--nb_workers=1", "--journal=on")


@pytest.fixture
def shard_of(tmp_path):
    """Start a PS process that waits for a model; return its log and exit code by `end`."""
    run, started = OfferedRun(tmp_path), []

    def start(*flags, program=BLOCKED + PROGRAM, backend=None):
        environment = {name: os.environ[name] for name in os.environ if name != "KERAS_BACKEND"}
        environment |= {"KERAS_BACKEND": backend} if backend else {}
        words = ["--type_node=PS", f"--run_dir={tmp_path}", f"--port={run.ports[0]}"]
        log = tmp_path / "ps.out"
        with open(log, "ab") as file:
            command = [sys.executable, "-c", program, *words, *FLAGS, *ONE, *flags]
            process = subprocess.Popen(
                command, stdout=file, stderr=file, cwd=MAIN.parent, env=environment
            )
        started.append(process)
        return run, lambda: (process.wait(60), log.read_text())

    yield start
    for process in started:
        process.kill()
        process.wait(10)


def heavy_of(text):
    (line,) = [each for each in text.splitlines() if each.startswith("HEAVY ")]
    return json.loads(line.removeprefix("HEAVY "))


@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("momentum", "nesterov", "rate"),
    [
        (0.0, False, 0.25),
        (0.9, False, {"name": "CosineDecay", "config": DECAY}),
        (0.9, True, {"name": "CosineDecay", "config": DECAY}),
    ],
    ids=["plain", "momentum", "nesterov"],
)
def test_a_script_with_sgd_trains_without_keras(shard_of, momentum, nesterov, rate):
    run, end = shard_of("--iter_max=4")
    config = {"momentum": momentum, "nesterov": nesterov, "learning_rate": rate}
    optimizer = OptimizerOffer(Described("SGD", config), clock="steps")
    offer = dataclasses.replace(OFFER, optimizers=(optimizer,))
    worker = run.worker(1, offer, flags=(*ONE, "--iter_max=4"))
    first, last = train(worker, 4)
    theta = weights_of(1)
    np.testing.assert_array_equal(first, theta)
    schedule = (lambda step: rate) if isinstance(rate, float) else None
    schedule = schedule or build_schedule(Described("CosineDecay", DECAY))
    optimizer = MomentumSGD(momentum, theta, nesterov)
    for step in range(4):
        gradient = Update(None, gradient_of(step + 1))
        optimizer.step(theta, gradient, float(schedule(step)), negate=False)
    np.testing.assert_array_equal(last, theta)
    code, text = end()
    assert code == 0, text
    assert heavy_of(text)[0] == []


@pytest.mark.processes
@pytest.mark.timeout(120)
def test_adam_steps_without_keras(shard_of):
    run, end = shard_of("--iter_max=4")
    worker = run.worker(1, offer_with("Adam", beta_2=0.9), flags=(*ONE, "--iter_max=4"))
    first, last = train(worker, 4)
    theta, described = first.copy(), Described("Adam", {"learning_rate": 0.1, "beta_2": 0.9})
    optimizer = FlatAdam(described, theta, ())
    for step in range(4):
        optimizer.step(theta, Update(None, gradient_of(step + 1)), 0.1, negate=False)
    np.testing.assert_array_equal(last, theta)
    code, text = end()
    assert code == 0, text
    assert heavy_of(text)[0] == []


@pytest.mark.processes
@pytest.mark.timeout(120)
@pytest.mark.parametrize("preload", [(), ("--preload_keras",)], ids=["", "preloaded"])
def test_another_optimizer_is_refused_with_what_to_install(shard_of, preload):
    run, end = shard_of("--iter_max=2", "--start_timeout_seconds=1", *preload)
    worker = run.worker(1, offer_with("Adagrad"), flags=(*ONE, "--iter_max=2"))
    with pytest.raises(RequestRejected, match=r"no backend.*thinwire\[cpu\].*\[jax\].*\[torch\]"):
        worker.join()
    worker.leave("failed")
    assert end()[0] == 4


@pytest.mark.processes
@pytest.mark.timeout(300)
def test_another_optimizer_runs_on_the_processor_by_any_backend(shard_of):
    keras = pytest.importorskip("keras")
    backend = keras.backend.backend()
    run, end = shard_of("--iter_max=2", program=PROGRAM, backend=backend)
    patience = "--reconnect_timeout_seconds=200"  # the PS sends nothing while it imports Keras
    worker = run.worker(1, offer_with("Adagrad"), flags=(*ONE, "--iter_max=2", patience))
    first, last = train(worker, 2)
    assert (first != last).all() and np.abs(first - last).max() < 0.21
    code, text = end()
    assert code == 0, text
    heavy, places = heavy_of(text)
    assert set(heavy) >= {"keras", backend}
    places = {name for name, place in places.items() if place == "cpu"}
    assert places == {"jax": {"JAX_PLATFORMS"}, "torch": {"KERAS_TORCH_DEVICE"}}.get(backend, set())
