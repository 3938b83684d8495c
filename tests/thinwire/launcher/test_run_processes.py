"""`thinwire run` with real processes: a toy script on two workers, and all kinds of ends."""

import os
import signal
import subprocess
import sys
import textwrap

import pytest

from tests.forked import MAIN
from tests.thinwire.launcher.commands import Command, commands, toy_script

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


class Toy(Command):
    """One `thinwire run` of a script that does what its first argument names."""

    script = toy_script("""
worker = os.environ["THINWIRE_SETTINGS"][-6] if "THINWIRE_SETTINGS" in os.environ else "0"
what, epochs = sys.argv[1], int(sys.argv[2])
x = np.concatenate([x, x[:, :1]], 1) if what == "wide" else x
model = dense()
model.compile(keras.optimizers.SGD(0.05), "mse")
model = thinwire.distribute(model)

class Acts(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if what == "slow":
            time.sleep(0.05)
        if what == "raise" and worker == "2":
            raise ValueError("oh no")
        if what == "exit" and worker == "2":
            os._exit(0)
    def on_epoch_end(self, epoch, logs=None):
        print("epoch", epoch, "is over")

model.fit(x, y, batch_size=16, epochs=epochs, verbose=0, callbacks=[Acts()])
print("loss", float(model.evaluate(x, y, verbose=0)))
""")


@pytest.fixture
def command(tmp_path):
    with commands(Toy, tmp_path) as start:
        yield start


def test_a_script_trains_to_its_end_once(command, tmp_path):
    run = command("toy.py", "fit", "2")
    assert run.end() == 0, run.output()
    losses = [line for line in run.output().splitlines() if "] loss " in line]
    assert len(losses) == 2 and len({line.partition("loss")[2] for line in losses}) == 1
    assert str(tmp_path / "run" / "report" / "index.html") in run.output()
    summary = run.summary()
    assert (summary["stop_reason"], summary["updates"]) == ("finished", 8)
    assert summary["script"]["arguments"] == ["fit", "2"] and "--seed=1" in summary["flags"]
    assert {"keras", "numpy", "python"} <= summary["versions"].keys()
    assert not (tmp_path / "run" / "settings").exists()
    again = command("toy.py", "fit", "2")
    assert again.end() == 0 and "this run is finished" in again.output()
    assert again.summary()["updates"] == 8


def test_a_script_that_raises_in_one_worker_ends_the_run(command, tmp_path):
    run = command("--method=asgd", "toy.py", "raise", "500")
    assert run.end() == 1
    assert run.output().count("Traceback") == 1
    lines = run.output().splitlines()
    assert "[worker 2]" in next(line for line in lines if "ValueError: oh no" in line)
    assert "worker 2: toy.py:" in lines[-1] and "ValueError: oh no. Correct" in lines[-1]
    assert run.summary()["stop_reason"] == "script_failed"
    assert "ValueError: oh no" in (tmp_path / "run" / "logs" / "worker-2.out").read_text()


@pytest.mark.product
def test_data_that_does_not_fit_the_model_is_refused_in_one_line(command):
    run = command("toy.py", "wide", "2")
    assert run.end() == 2, run.output()
    assert run.output().count("which takes (None, 4)") == 1 and "Traceback" not in run.output()


@pytest.mark.product
def test_a_script_that_leaves_in_the_middle_without_a_word_ends_the_run(command):
    run = command("--method=asgd", "toy.py", "exit", "500")
    assert run.end() == 1
    assert run.output().count("left with exit code 0 before its end") == 1, run.output()


@pytest.mark.parametrize("dies", [False, pytest.param(True, marks=pytest.mark.product)])
def test_interrupted_or_without_its_ps_the_same_command_resumes(dies, command):
    flags = ("--checkpoint_interval_seconds=0.2", "toy.py", "slow", "40")
    run = command(*flags)
    run.wait_for("epoch 1 is over")
    if dies:
        os.kill(run.find("--type_node=PS"), signal.SIGKILL)
    else:
        run.process.send_signal(signal.SIGINT)
    assert run.end() == (3 if dies else 130)
    run = command("--resume", *flags[:-1], "2")
    assert run.end() == 0, run.output()
    assert run.summary()["stop_reason"] == "finished"
    assert run.summary()["updates"] > 8  # the worker's own two epochs: it resumed from a checkpoint


@pytest.mark.product
def test_a_run_outlives_a_killed_worker_and_its_supervisor(command):
    run = command("--method=asgd", "--lease_seconds=1.5", "toy.py", "slow", "12")
    run.wait_for("[worker 2] epoch 1 is over")
    os.kill(run.find("--id_worker=2"), signal.SIGKILL)
    os.kill(run.find("--type_node=Supervisor"), signal.SIGKILL)
    assert run.end() == 0, run.output()
    assert "[worker 1] loss" in run.output() and "[worker 2] loss" not in run.output()
    assert run.summary()["stop_reason"] == "finished"


FUNCTION = """
import sys, textwrap
import thinwire

def train(rows, units):
    import keras, numpy as np
    x = np.ones((rows, 2), "float32")
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(units)])
    model.compile("adam", "mse")
    thinwire.distribute(model).fit(x, x[:, :1], verbose=0)
    return {"parameters": model.count_params()}

if __name__ == "__main__":
    found = thinwire.run(train, (32, 1), nb_workers=2, method="dgs", run_dir=sys.argv[1])
    print("FOUND", found.value, found.summary["updates"], found.run_dir.name)
"""


@pytest.mark.product
def test_a_function_trains_as_a_script_does(tmp_path):
    (tmp_path / "main_program.py").write_text(textwrap.dedent(FUNCTION))
    done = subprocess.run(
        [sys.executable, "main_program.py", str(tmp_path / "run")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": str(MAIN.parent)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = next(line for line in done.stdout.splitlines() if line.startswith("FOUND"))
    assert found.startswith("FOUND {'parameters': 3} ") and found.endswith(" run"), found
