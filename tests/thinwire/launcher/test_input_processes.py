"""The launcher's stdin reaches every process that runs the script."""

import os
import subprocess
import textwrap

import pytest

from tests.forked import MAIN, forker
from tests.thinwire.launcher.test_script import FLAGS, TRAINED
from thinwire.launcher.local import start_here
from thinwire.launcher.role import Node
from thinwire.runtime.standard_input import StandardInput

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

READS = f"{TRAINED}\nimport sys\nprint('READ', sys.stdin.read(3), sys.stdin.readline().strip())"


class Lines:
    """The output of a node."""

    def __init__(self):
        self.lines = []

    def on_line(self, line, is_error):
        self.lines.append(line)


@pytest.fixture
def start(tmp_path):
    """Start the script as a worker of this launcher."""
    (tmp_path / "reads.py").write_text(textwrap.dedent(READS))
    started = []
    where = os.getcwd()
    os.chdir(tmp_path)

    def begin(given):
        output = Lines()
        script = (str(tmp_path / "reads.py"),)
        node = Node("worker-2", "Worker", 2, FLAGS, script=script, output=output, input=given)
        started.append(start_here(node))
        return started[-1], output

    yield begin
    os.chdir(where)
    for each in started:
        each.kill()
        each.wait()


def test_two_workers_and_one_that_is_started_again_read_the_same_pipe(start, tmp_path):
    reader, writer = os.pipe()
    given = StandardInput(tmp_path / "run", reader)
    both = [start(given), start(given)]
    os.write(writer, b"seven words\n")  # and no end
    for process, output in both:
        assert process.wait() == 0, output.lines
        assert "READ sev en words" in output.lines
    process, output = start(given)
    assert process.wait() == 0 and "READ sev en words" in output.lines
    os.close(reader)
    os.close(writer)


def test_the_lines_that_a_loop_of_the_shell_has_not_read_stay(start, tmp_path):
    """The shell's descriptor is the launcher's: ``while read f; do ...; done < list``."""
    (tmp_path / "list").write_text("one\ntwo\nthree\n")
    with open(tmp_path / "list", "rb") as shell:
        assert os.read(shell.fileno(), 4) == b"one\n"
        process, output = start(StandardInput(tmp_path / "run", shell.fileno()))
        assert process.wait() == 0 and "READ two " in output.lines, output.lines
        assert os.read(shell.fileno(), 4) == b"two\n"


SCRIPT = """
import json, sys
import keras, numpy as np
import thinwire
config = json.load(sys.stdin)
sys.stderr.write(f"CONFIG {config['epochs']}\\n")
x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
y = x.sum(1, keepdims=True)
model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
model.compile(keras.optimizers.SGD(0.05), "mse")
history = thinwire.distribute(model).fit(
    x, y, epochs=config["epochs"], verbose=0, validation_data=(x, y)
)
print("EPOCHS", len(history.history["val_loss"]))
"""


def test_workers_and_the_evaluator_read_what_the_command_was_given(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    run_dir = tmp_path / "run"
    process = subprocess.Popen(
        [forker().python, str(MAIN), "run", f"--run_dir={run_dir}", "train.py"],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1"},
    )
    try:
        out, _ = process.communicate('{"epochs": 2}', timeout=200)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, out
    assert out.count("EPOCHS 2") == 2 and out.count("every worker receives the whole stdin") == 1
    assert "CONFIG 2" in (run_dir / "logs" / "evaluator.out").read_text()
    assert not (run_dir / "settings").exists()
