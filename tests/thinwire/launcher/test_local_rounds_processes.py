"""A worker of `thinwire run` is killed in a round of many local steps, and returns."""

import os
import re
import signal

import pytest

from tests.thinwire.launcher.commands import Command, commands, toy_script

pytestmark = [pytest.mark.processes, pytest.mark.product, pytest.mark.timeout(240)]

SCRIPT = """
model = dense()
rate = keras.optimizers.schedules.CosineDecay(0.05, 1200)
model.compile(keras.optimizers.AdamW(rate), "mse")
model = thinwire.distribute(model)

class Slow(keras.callbacks.Callback):
    def on_epoch_end(self, epoch, logs=None):
        print("epoch", epoch, "count", int(self.model.optimizer.iterations))
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.03)

model.fit(x, y, batch_size=8, epochs=100, verbose=0, callbacks=[Slow()])
print("loss", float(model.evaluate(x, y, verbose=0)))
"""


class Rounds(Command):
    """One `thinwire run` of this file's script."""

    script = toy_script(SCRIPT, rows=96)


def test_its_optimizer_goes_on_from_where_it_was(tmp_path):
    with commands(Rounds, tmp_path) as command:
        flags = ["--nb_workers=2", "--restart_workers=1", "--lease_seconds=3", "--method=bsp"]
        flags += ["--pacer=fixed", "--local_steps=4", "--checkpoint_interval_seconds=0.1"]
        run = command(*flags, "toy.py")
        run.wait_for("[worker 2] epoch 8")
        os.kill(run.find("--id_worker=2"), signal.SIGKILL)
        assert run.end() == 0, run.output()
        lines = re.findall(r"\[worker 2\] epoch (\d+) count (\d+)", run.output())
        counts = [(int(epoch), int(count)) for epoch, count in lines]
        starts = [n for n, (epoch, _) in enumerate(counts) if not epoch]
        assert len(starts) == 2, run.output()
        again = starts[1]
        per_epoch, before = counts[0][1], counts[again - 1][1]
        assert abs(counts[again][1] - per_epoch - before) <= 2 * per_epoch, run.output()
        assert "resetting" not in run.output()
        assert run.output().count("] loss ") == 2, run.output()
