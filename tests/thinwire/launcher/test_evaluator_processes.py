"""The evaluator process of `thinwire run`: Supervisor killed and restarted, or absent."""

import json
import os
import signal
import subprocess
import sys

import pytest

from tests.thinwire.launcher.commands import (
    Command,
    commands,
    processes,
    toy_script,
    wait_for_nodes,
)

pytestmark = [pytest.mark.processes, pytest.mark.product, pytest.mark.timeout(240)]

SCRIPT = """
what, epochs = sys.argv[1], int(sys.argv[2])
if what == "fail" and thinwire.worker_id() == 0:
    raise ValueError("no data here")
model = keras.Sequential([keras.layers.Dense(2), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.01), "mse", metrics=["mae"])
model = thinwire.distribute(model)

class Batches(keras.utils.PyDataset):  # with a callback of its own the chief would evaluate
    def __len__(self):
        return 4
    def __getitem__(self, index):
        time.sleep(0.05 if what == "slow" else 0)
        rows = slice(16 * index, 16 * index + 16)
        return x[rows], y[rows]

found = model.fit(
    Batches(), epochs=epochs, verbose=2, validation_data=(x[:32], y[:32])
).history
print("history", json.dumps(found))
"""


class Validating(Command):
    """One `thinwire run` of this file's script."""

    script = toy_script(SCRIPT)

    def histories(self):
        """Return what each worker has printed."""
        lines = [line for line in self.output().splitlines() if "] history " in line]
        return [json.loads(line.partition("] history ")[2]) for line in lines]

    def evaluators(self):
        """Return the processes of the evaluator, with its watchdog."""
        mine = [(pid, words) for pid, words in processes() if "--evaluates" in words]
        return [pid for pid, words in mine if str(self.folder) in str(words)]

    def evaluations(self):
        lines = (self.folder / "run" / "metrics.jsonl").read_text().splitlines()
        return [each for each in map(json.loads, lines) if each["kind"] == "eval"]


@pytest.fixture
def command(tmp_path):
    with commands(Validating, tmp_path) as start:
        yield start


def test_all_workers_have_the_values_of_the_central_weights(command):
    run = command("--nb_workers=2", "toy.py", "fast", "3")
    assert run.end() == 0, run.output()
    one, two = run.histories()
    assert set(one) == {"loss", "mae", "val_loss", "val_mae"}
    assert one["val_loss"] == two["val_loss"]
    found = run.evaluations()
    losses = [each["metrics"]["loss"] for each in found]
    assert losses[-4:] == pytest.approx([*one["val_loss"], one["val_loss"][-1]])
    assert found[-1]["final"]
    summary = run.summary()
    assert summary["test_loss"] == pytest.approx(one["val_loss"][-1])
    assert not (run.folder / "run" / "settings").exists()


def test_an_evaluator_that_fails_ends_nothing(command):
    run = command("--nb_workers=2", "toy.py", "fail", "2")
    assert run.end() == 0, run.output()
    assert [set(each) for each in run.histories()] == [{"loss", "mae"}] * 2
    line = "the evaluator has ended with exit code 1: ValueError: no data here"
    assert run.output().count(line) == 2, "by the Supervisor, and once for all workers"
    assert "Traceback" not in run.output()
    assert "Traceback" in (run.folder / "run" / "logs" / "evaluator.out").read_text()


@pytest.mark.parametrize("comes_back", [False, True])
def test_a_supervisor_that_is_killed(command, comes_back):
    run = command("--nb_workers=2", "toy.py", "slow", "12")
    run.wait_for("Epoch 3/12")
    pid = run.find("--type_node=Supervisor")
    assert len(run.evaluators()) == 2
    words = next(words for each, words in processes() if each == pid)[:-1]
    os.kill(pid, signal.SIGKILL)
    wait_for_nodes(lambda: not run.evaluators(), 12)
    again = None
    if comes_back:
        again = subprocess.Popen(words, cwd=run.folder, stderr=subprocess.DEVNULL)
    try:
        assert run.end() == 0, run.output()
        assert again is None or again.wait(30) == 0
    finally:
        if again is not None:
            again.kill()
            again.wait()
    one, two = run.histories()
    assert len(one["loss"]) == 12
    assert one["val_loss"] == two["val_loss"]
    assert (len(one["val_loss"]) == 12) is comes_back
    if comes_back:
        assert run.evaluations()[-1]["final"]
    else:
        assert run.output().count("was not evaluated (there is no Supervisor)") == 1
    assert sys.executable in words[0]


def test_an_evaluator_that_is_killed_is_started_again(command):
    run = command("--nb_workers=2", "toy.py", "slow", "12")
    run.wait_for("Epoch 3/12")
    watchdog, evaluator = sorted(run.evaluators())
    os.kill(evaluator, signal.SIGKILL)
    wait_for_nodes(lambda: not run.evaluators(), 12)
    assert run.end() == 0, run.output()
    one, two = run.histories()
    assert one["val_loss"] == two["val_loss"] and len(one["val_loss"]) == 12
    assert run.output().count("again in 1 s") == 1
    lines = [line for line in run.output().splitlines() if "] Epoch " in line]
    assert len(lines) == len(set(lines)) == 2 * 12, "no epoch is repeated"
    found = run.evaluations()
    assert found[-1]["final"] and len(found) == len({str(each["versions"]) for each in found}) + 1
    assert watchdog != evaluator
