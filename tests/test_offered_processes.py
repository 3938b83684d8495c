"""A PS process without a model or TensorFlow accepts a worker's model, trains, and resumes."""

import dataclasses
import json
import signal
import subprocess
import sys

import numpy as np
import pytest

from tests.forked import MAIN, forker
from tests.threads.offered import FLAGS, OFFER, SPEC, OfferedRun, weights_of
from tests.worker_steps import exchange
from thinwire.ops.offer import Described, OptimizerOffer
from thinwire.ops.optimizers import rates
from thinwire.ops.types import ModelSpec, TensorSpec
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.grpc.session import RequestRejected
from thinwire.runtime.run.credentials import NO_CREDENTIALS
from thinwire.tools import observer

#: A PS that at its end lists which of the heavy packages it has imported.
PROGRAM = """
import json, sys
from absl import flags
from thinwire.cli import node
node.define_flags()
code = node.main(flags.FLAGS(sys.argv))
heavy = {name.partition(".")[0] for name in sys.modules} & {"tensorflow", "keras"}
print("HEAVY", json.dumps(sorted(heavy)), flush=True)
sys.exit(code)
"""


class Shard:
    """A PS process."""

    def __init__(self, run, folder, *flags, fresh=True):
        self.log = folder / "ps.out"
        words = ["--type_node=PS", f"--run_dir={folder}", f"--port={run.ports[0]}", *FLAGS, *flags]
        python = [sys.executable, "-c", PROGRAM] if fresh else [forker().python, str(MAIN)]
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen([*python, *words], stdout=log, stderr=log)

    def wait(self):
        return self.process.wait(60)

    @property
    def heavy(self):
        (line,) = [each for each in self.log.read_text().splitlines() if each.startswith("HEAVY")]
        return json.loads(line.removeprefix("HEAVY "))


@pytest.fixture
def shard_of(tmp_path):
    """Start shards, and end them with the test."""
    started = []
    run = OfferedRun(tmp_path)

    def start(*flags, **how):
        started.append(Shard(run, tmp_path, *flags, **how))
        return started[-1]

    start.run = run
    yield start
    for each in started:
        each.process.kill()
        each.process.wait(10)


ONE = ("--nb_workers=1", "--journal=on")


def gradient_of(step):
    rng = np.random.default_rng([7, step])
    return rng.standard_normal(OFFER.spec.num_parameters, np.float32)


def train(worker, steps):
    """Join, push the gradients of some steps, leave; return weights before and after them."""
    worker.join()
    first = worker.begin().copy()
    for _ in range(steps):
        gradient = gradient_of(worker.core.step + 1)
        exchange(worker, gradient)
    last = worker.core.weights.copy()
    worker.leave("done")
    return first, last


def offer_with(name, **config):
    optimizer = OptimizerOffer(Described(name, {"learning_rate": 0.1, **config}))
    return dataclasses.replace(OFFER, optimizers=(optimizer,))


@pytest.mark.processes
def test_plain_sgd_needs_neither_tensorflow_nor_keras(shard_of):
    flags = (*ONE, "--iter_max=3")
    shard = shard_of(*flags)
    first, last = train(shard_of.run.worker(1, flags=flags), 3)
    np.testing.assert_array_equal(first, weights_of(1))
    expected = first.copy()
    for step in (1, 2, 3):
        expected -= np.float32(0.5) * gradient_of(step)
    np.testing.assert_array_equal(last, expected)
    assert shard.wait() == 0
    assert shard.heavy == []


SCHEDULE = {
    "name": "CosineDecay",
    "config": {"initial_learning_rate": 0.1, "decay_steps": 20, "alpha": 0.0},
}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("offer", "heavy"),
    [
        pytest.param(offer_with("SGD", momentum=0.9), [], id="momentum"),
        pytest.param(
            offer_with("AdamW", learning_rate=SCHEDULE, use_ema=True),
            ["keras", "tensorflow"],
            id="adamw",
            marks=pytest.mark.product,
        ),
    ],
)
def test_a_killed_ps_goes_on_bit_for_bit_without_an_offer(shard_of, offer, heavy):
    killed = shard_of(*ONE)
    _, middle = train(shard_of.run.worker(1, offer, flags=ONE), 3)
    killed.process.kill()
    killed.process.wait(10)
    flags = (*ONE, "--iter_max=6")
    resumed = shard_of(*flags)
    again = shard_of.run.worker(1, offer, weights=weights_of(7), flags=flags)
    found, last = train(again, 3)
    assert resumed.wait() == 0
    assert resumed.heavy == heavy
    np.testing.assert_array_equal(found, middle)
    whole = shard_of(*flags, "--overwrite")
    first, at_once = train(shard_of.run.worker(1, offer, flags=flags), 6)
    assert whole.wait() == 0
    np.testing.assert_array_equal(first, weights_of(1))
    np.testing.assert_array_equal(last, at_once)


@pytest.mark.product
@pytest.mark.processes
def test_another_script_in_the_same_folder_is_refused_by_name(shard_of):
    before = shard_of(*ONE, fresh=False)
    train(shard_of.run.worker(1, flags=ONE), 1)
    before.process.send_signal(signal.SIGTERM)
    assert before.wait() == 130
    after = shard_of(*ONE, fresh=False)
    larger = ModelSpec((*SPEC.tensors, TensorSpec("added/kernel", (2,))))
    other = shard_of.run.worker(1, dataclasses.replace(OFFER, spec=larger), flags=ONE)
    with pytest.raises(RequestRejected, match="added/kernel.*--overwrite") as refusal:
        other.join()
    assert refusal.value.reason == pb.REASON_MODEL
    slower = shard_of.run.worker(1, offer_with("SGD"), flags=ONE)
    with pytest.raises(RequestRejected, match="config.momentum: expected 0.0"):
        slower.join()
    after.process.send_signal(signal.SIGTERM)
    assert after.wait() == 130


RESTARTS = {
    "name": "CosineDecayRestarts",
    "config": {
        "initial_learning_rate": 0.1,
        **{"first_decay_steps": 1e-9, "t_mul": -1, "m_mul": 1e18, "alpha": -1e18},
    },
}


def status_of(shard_of):
    """Look at the run, as `thinwire status` does."""
    contact = observer.Contact(f"127.0.0.1:{shard_of.run.ports[0]}", NO_CREDENTIALS, 20.0)
    return observer.read_status(contact)


@pytest.mark.processes
def test_a_ps_refuses_a_schedule_without_a_rate_and_serves_those_who_come_afterwards(shard_of):
    shard = shard_of(*ONE, fresh=False)
    hostile = shard_of.run.worker(1, offer_with("SGD", learning_rate=RESTARTS), flags=ONE)
    with pytest.raises(RequestRejected, match="CosineDecayRestarts.*nan at step") as refusal:
        hostile.join()
    assert refusal.value.reason == pb.REASON_OFFER
    train(shard_of.run.worker(1, flags=ONE), 2)
    assert status_of(shard_of).version == 2
    shard.process.send_signal(signal.SIGTERM)
    assert shard.wait() == 130
    assert "Traceback" not in shard.log.read_text()


@pytest.mark.processes
def test_a_checkpoint_with_an_offer_that_is_refused_ends_a_ps_with_code_2_and_one_line(
    shard_of, monkeypatch, tmp_path
):
    with monkeypatch.context() as earlier:  # a version that did not evaluate schedules
        earlier.setattr(rates, "sample_steps", lambda described, first, last: [])
        run = OfferedRun(tmp_path, *ONE)
        run.listen()
        worker = run.worker(1, offer_with("SGD", learning_rate=RESTARTS))
        worker.join()
        worker.begin()
        run.interrupt()
        worker.leave("done")
        run.close()
    shard = shard_of(*ONE, fresh=False)
    assert shard.wait() == 2
    log = shard.log.read_text()
    assert "Traceback" not in log
    (line,) = [each for each in log.splitlines() if "CosineDecayRestarts" in each]
    assert str(tmp_path) in line and "--overwrite" in line
