"""A worker of `thinwire run` stands still while the run goes to a later fit of its script."""

import os
import signal
import sys

import pytest

from tests.thinwire.launcher.commands import Command, commands, toy_script

pytestmark = [pytest.mark.processes, pytest.mark.product, pytest.mark.timeout(240)]

SCRIPT = """

class Slow(keras.callbacks.Callback):
    def __init__(self, number):
        super().__init__()
        self.number = number
    def on_epoch_end(self, epoch, logs=None):
        print("fit", self.number, "epoch", epoch)
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.05)

model = dense(3)
for number, epochs in enumerate((8, 4, 40)):
    model.compile(keras.optimizers.Adam(0.01) if number % 2 else keras.optimizers.SGD(0.1), "mse")
    model = thinwire.distribute(model)
    model.fit(x, y, batch_size=16, epochs=epochs, verbose=0, callbacks=[Slow(number)])
print("score", model.evaluate(x, y, verbose=0))
"""


class Fits(Command):
    """One `thinwire run` of this file's script."""

    python = sys.executable
    script = toy_script(SCRIPT, rows=96)


@pytest.mark.parametrize("restarts", [1, 0])
def test_the_run_goes_to_its_end_with_it_or_without_it(tmp_path, restarts):
    with commands(Fits, tmp_path) as command:
        flags = ["--nb_workers=2", f"--restart_workers={restarts}", "--lease_seconds=3"]
        run = command(*flags, "--method=bsp", "toy.py")
        run.wait_for("[worker 2] fit 0 epoch 2")
        worker = run.find("--id_worker=2")
        os.kill(worker, signal.SIGSTOP)
        run.wait_for("[worker 1] fit 2 epoch 0")
        os.kill(worker, signal.SIGCONT)
        assert run.end() == 0, run.output()
        assert run.output().count("] score ") == 1 + restarts, run.output()
        assert "[worker 2] toy.py:27: phase: this worker is in phase 0" in run.output()
        lost = "continued without them: worker-2 (exit code 3)"
        assert run.output().count(lost) == 1 - restarts
