"""The same command after an edit, with real processes: start, resume, or an error."""

import hashlib
import json
import os
import re
import signal

import pytest

from tests.forked import forker
from tests.thinwire.launcher.commands import Command, commands, toy_script, wait_for_nodes
from thinwire.runtime.run.directory import update_of_failure

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]

SCRIPT = """
import parts

class Acts(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        while os.path.exists("slow"):
            time.sleep(0.05)
            if os.path.exists("step"):
                break
    def on_epoch_end(self, epoch, logs=None):
        if epoch == 2 and os.path.exists("broken"):
            raise KeyError("a column that is not there")
        if epoch == 2 and os.path.exists("leaves"):
            os._exit(3)

keras.utils.set_random_seed(1)
model = dense()
model.compile(getattr(keras.optimizers, os.environ.get("OPTIMIZER", "SGD"))(RATE), parts.LOSS)
model = thinwire.distribute(model)
model.fit(x, y, batch_size=16, epochs=4, verbose=0, shuffle=False, callbacks=[Acts()])
optimizer = model.optimizer
print("RESULT", type(optimizer).__name__, round(float(optimizer.learning_rate.numpy()), 4),
      int(optimizer.iterations.numpy()), model.get_weights()[0].ravel().tolist())
"""


def script_of(rate):
    return toy_script(SCRIPT.replace("RATE", rate), rows=160)


class Rerun(Command):
    """One `thinwire run` of this file's script; tests may edit its rate and its module."""

    def __init__(
        self, folder, *flags, rate="0.02", loss="mse", workers=1, arguments=(), **variables
    ):
        (folder / "parts.py").write_text(f"LOSS = {loss!r}\n")
        before = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        try:
            super().__init__(
                folder,
                *(f"--nb_workers={workers}", "--method=bsp", *flags, "toy.py", *arguments),
                script=script_of(rate),
            )
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                os.environ.update({} if value is None else {name: value})

    def first_line(self):
        lines = [line for line in self.output().splitlines() if " I run " in line]
        assert lines and lines[0] == self.output().splitlines()[0], self.output()[-3000:]
        return lines[0].partition("run: ")[2]

    def results(self):
        found = re.findall(r"RESULT (\w+) ([\d.]+) (\d+) (\[.*\])", self.output())
        assert len(found) == 1, self.output()[-3000:]
        return {(name, float(rate), int(steps)) for name, rate, steps, _ in found}, found[0][3]


@pytest.fixture
def start(tmp_path):
    def begin(*flags, **settings):
        return Rerun(tmp_path, *flags, **settings)

    started = []

    def tracked(*flags, **settings):
        started.append(begin(*flags, **settings))
        return started[-1]

    with commands(Command, tmp_path):
        yield tracked
        for each in started:
            each.process.kill()
            each.process.wait()


def tree(folder):
    """Return the digest of all that a run resumes from."""
    paths = [*(folder / "checkpoints").rglob("*"), folder / "summary.json", folder / "launch.json"]
    paths = sorted(path for path in paths if path.is_file())
    return [(str(path), hashlib.sha256(path.read_bytes()).hexdigest()) for path in paths]


def refused(run, words):
    """Check that a run is refused in one line, the last one."""
    assert run.end() == 2, run.output()[-3000:]
    last = run.output().splitlines()[-1]
    assert re.search(words, last) and "--resume" in last and "--overwrite" in last, run.output()
    assert "{" not in last


def alone(tmp_path, rate="0.02"):
    """Return the weights that the script alone ends with."""
    (tmp_path / "alone.py").write_text(script_of(rate))
    (tmp_path / "parts.py").write_text("LOSS = 'mse'\n")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "-1"}
    with open(tmp_path / "alone.log", "w+") as output:
        assert forker().start(["alone.py"], output, environment, cwd=tmp_path).wait(60) == 0
        output.seek(0)
        return json.loads(re.search(r"RESULT .*?(\[.*\])", output.read())[1])


def test_a_script_that_failed_begins_again(start, tmp_path):
    (tmp_path / "broken").touch()
    run = start()
    assert run.end() == 1 and run.first_line() == "begins"
    (tmp_path / "broken").unlink()
    run = start(rate="0.03")
    assert run.end() == 0, run.output()[-3000:]
    assert run.first_line() == "begins, because the script of the run before failed"
    kinds, weights = run.results()
    assert kinds == {("SGD", 0.03, 40)} and run.summary()["updates"] == 40
    assert json.loads(weights) == pytest.approx(alone(tmp_path, "0.03"), abs=1e-5)


def test_a_failed_run_is_continued_where_that_is_wanted(start, tmp_path):
    """The failed script reported nothing, and the launcher recorded that."""
    (tmp_path / "leaves").touch()
    assert start().end() == 3
    (tmp_path / "leaves").unlink()
    assert update_of_failure(tmp_path / "run") == 0
    run = start("--resume", rate="0.05")
    assert run.end() == 0, run.output()[-3000:]
    kinds, _ = run.results()
    (updates,) = {steps for _, _, steps in kinds}
    assert kinds == {("SGD", 0.05, updates)} and run.summary()["updates"] == updates
    assert run.first_line() == f"resumes from update {updates - 40}, although toy.py has changed"


def interrupt(run, tmp_path):
    """Interrupt a run after its first updates; return its last update."""
    updates = tmp_path / "run" / "metrics.jsonl"
    wait_for_nodes(lambda: updates.exists() and '"version":' in updates.read_text())
    wait_for_nodes(lambda: re.search(r'"version":[1-9]', updates.read_text()))
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 130, run.output()[-3000:]
    (tmp_path / "slow").unlink()
    return run.summary()["updates"]


def test_an_edit_is_refused_before_anything_starts_and_its_undoing_resumes(start, tmp_path):
    (tmp_path / "slow").touch()
    updates = interrupt(start(workers=2), tmp_path)
    before = tree(tmp_path / "run")
    for words, flags, settings in (
        ("toy.py has changed", (), {"rate": "0.03"}),
        ("parts.py has changed", (), {"loss": "mae"}),
        ("arguments were none and are --more=1", (), {"arguments": ["--more=1"]}),
        ("seed was '1' and is now '2'", ("--seed=2",), {}),
        ("method was 'bsp' and is now 'dgs'", ("--method=dgs",), {}),
    ):
        refused(start(*flags, workers=2, **settings), words)
        assert tree(tmp_path / "run") == before
    run = start("--port=0", "--log_level=warning", "--lease_seconds=12", workers=3)
    assert run.end() == 0, run.output()[-3000:]
    refused(start("--seed=2", workers=3), "seed was '1' and is now '2'")
    assert run.summary()["updates"] == updates + 40


def test_what_is_compiled_otherwise_is_refused_by_the_ps_and_resumes_where_wanted(start, tmp_path):
    (tmp_path / "slow").touch()
    updates = interrupt(start(OPTIMIZER="SGD"), tmp_path)
    run = start(OPTIMIZER="Adam")
    refused(run, r"the optimizer was SGD\(learning_rate=0.02\) and is Adam\(learning_rate=0.02\)")
    assert run.first_line() == f"resumes from update {updates}"
    run = start("--resume", OPTIMIZER="Adam")
    assert run.end() == 0, run.output()[-3000:]
    assert run.first_line() == f"resumes from update {updates}"
    assert run.results()[0] == {("Adam", 0.02, 40)}
    assert run.summary()["updates"] == updates + 40
    again = start(OPTIMIZER="Adam")
    assert again.end() == 0 and "this run is finished" in again.first_line()
    more = start("--resume", OPTIMIZER="Adam", arguments=["--more=1"])
    assert more.end() == 0 and more.summary()["updates"] == updates + 80, more.output()[-3000:]
