"""A worker of `thinwire run` is killed in a fit that follows a state change by the script."""

import os
import signal

import pytest

from tests.thinwire.launcher.commands import Command, commands, toy_script

pytestmark = [pytest.mark.processes, pytest.mark.product, pytest.mark.timeout(240)]

SCRIPT = """

class Waits(keras.callbacks.Callback):
    # Lets nobody end the fit before the process that was started again has joined it.
    def __init__(self, back, is_back):
        super().__init__()
        self.back, self.is_back = back, is_back
    def on_train_begin(self, logs=None):
        if self.is_back:
            self.back.touch()
    def on_epoch_end(self, epoch, logs=None):
        print("second fit epoch", epoch)
        while epoch == 3 and not self.back.exists():
            time.sleep(0.05)

model = dense(3)
model.compile(keras.optimizers.Adam(0.01), "mse")
model = thinwire.distribute(model)
model.fit(x, y, batch_size=16, epochs=1, verbose=0)
for variable in model.optimizer.variables[2:]:
    variable.assign(keras.ops.zeros_like(variable))
marks = pathlib.Path(sys.argv[1])
mark = marks / f"worker-{thinwire.worker_id()}"
callback = Waits(marks / "back", is_back=mark.exists())
mark.touch()
model.fit(x, y, batch_size=16, epochs=6, verbose=0, callbacks=[callback])
print("weights %.6f" % sum(float(np.abs(each).sum()) for each in model.get_weights()))
"""


class Restarts(Command):
    """One `thinwire run` of this file's script."""

    script = toy_script(SCRIPT, rows=96)


@pytest.mark.parametrize("worker", [1, 2])
def test_it_comes_back_into_that_fit_whichever_worker_it_is(tmp_path, worker):
    """The phase has begun, so the worker offers nothing, and needs no optimizer state."""
    with commands(Restarts, tmp_path) as command:
        flags = ["--nb_workers=2", "--restart_workers=1", "--lease_seconds=3"]
        run = command(*flags, "toy.py", str(tmp_path))
        run.wait_for("second fit epoch 2")
        os.kill(run.find(f"--id_worker={worker}"), signal.SIGKILL)
        assert run.end() == 0, run.output()
        found = [each for each in run.output().splitlines() if "] weights " in each]
        assert len({each.partition("] weights ")[2] for each in found}) == 1
        assert len(found) == 2, run.output()
        assert f": {{{worker}: 1}}" in run.output()
