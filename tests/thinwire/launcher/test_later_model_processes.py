"""A worker of `thinwire run` is killed while a later model of its script is trained."""

import os
import signal

import pytest

from tests.thinwire.launcher.commands import Command, commands, toy_script

pytestmark = [pytest.mark.processes, pytest.mark.product, pytest.mark.timeout(240)]

SCRIPT = """

class Slow(keras.callbacks.Callback):
    def __init__(self, fold):
        super().__init__()
        self.fold = fold
    def on_epoch_end(self, epoch, logs=None):
        print("fold", self.fold, "epoch", epoch)
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.05 if self.fold else 0)

scores = []
for fold in range(3):
    rows = np.arange(96) % 3 != fold
    model = dense(3)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    model = thinwire.distribute(model)
    epochs = 12 if fold == 1 else 2
    model.fit(x[rows], y[rows], batch_size=16, epochs=epochs, verbose=0, callbacks=[Slow(fold)])
    scores.append(model.evaluate(x[~rows], y[~rows], verbose=0))
print("scores", *scores)
"""


class Folds(Command):
    """One `thinwire run` of this file's script."""

    script = toy_script(SCRIPT, rows=96)


def scores_of(run):
    lines = [line for line in run.output().splitlines() if "] scores " in line]
    return [line.partition("] scores ")[2] for line in lines]


@pytest.mark.parametrize("restarts", [1, 0])
def test_it_comes_back_with_what_the_earlier_folds_have_made(tmp_path, restarts):
    with commands(Folds, tmp_path) as command:
        flags = ["--nb_workers=2", f"--restart_workers={restarts}", "--lease_seconds=3"]
        run = command(*flags, "toy.py")
        run.wait_for("fold 1 epoch 2")
        os.kill(run.find("--id_worker=2"), signal.SIGKILL)
        assert run.end() == 0, run.output()
        found = scores_of(run)
        assert len(found) == 1 + restarts, run.output()
        assert len({each.split()[0] for each in found}) == 1, "which was over when it was killed"
        assert len({each.split()[2] for each in found}) == 1, "which both have trained"
        lost = "continued without them: worker-2 (exit code -9)"
        assert run.output().count(lost) == 1 - restarts
        assert run.output().count("skipping this call of fit") == restarts
