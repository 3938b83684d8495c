"""`thinwire run` with unwritable output trains to its end and reports the lost output."""

import contextlib
import os
import subprocess
import sys

import pytest

from tests.forked import MAIN, forker
from tests.waiting import patience

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]

#: Prints 480 KB in each worker: many times the size of a pipe.
SCRIPT = """
import keras, numpy as np
import thinwire

class Prints(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        print(("x" * 99 + "\\n") * 200, end="")

def train():
    x = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile(keras.optimizers.SGD(0.05), "mse")
    model = thinwire.distribute(model)
    model.fit(x, x.sum(1, keepdims=True), batch_size=16, epochs=6, verbose=0,
              callbacks=[Prints()])
    print("the script is over")

if __name__ == "__main__":
    train()
"""
_SECONDS = 120


class Command:
    """One command in a folder, with the standard streams of a test."""

    def __init__(self, folder):
        self.folder, self.run_dir = folder, folder / "run"
        self.process = None
        (folder / "noisy.py").write_text(SCRIPT)

    def start(self, stdout, stderr, words=None):
        words = words or [str(MAIN), "run", "--nb_workers=2", f"--run_dir={self.run_dir}"]
        self.process = subprocess.Popen(
            [forker().python, *words, *(["noisy.py"] if words[0] == str(MAIN) else [])],
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1"},
        )

    def end(self):
        """Return the exit code; the process itself ends in time or the test fails."""
        return self.process.wait(patience(_SECONDS))

    def log(self):
        return (self.run_dir / "logs" / "cluster-0.log").read_text()

    def lines_of(self, worker):
        return (self.run_dir / "logs" / f"worker-{worker}.out").read_text().splitlines()


@pytest.fixture
def command(tmp_path):
    made = Command(tmp_path)
    yield made
    if made.process is not None and made.process.poll() is None:
        made.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            made.process.wait(30)
        made.process.kill()
        made.process.wait()


@contextlib.contextmanager
def pipe():
    reader, writer = os.pipe()
    with open(reader, "rb") as read, open(writer, "wb") as write:
        yield read, write


@pytest.mark.parametrize("both", [False, True])
def test_a_reader_that_leaves_after_a_line(both, command):
    """The case of `thinwire run noisy.py | head -1`, also with 2>&1."""
    errors = command.folder / "errors"
    with pipe() as (read, write), open(errors, "wb") as error:
        command.start(write, write if both else error)
        write.close()
        assert read.readline()
        read.close()
        assert command.end() == 0
    assert "(Broken pipe)" in command.log() and "lines" in command.log()
    if not both:
        assert "lost output: stdout: " in errors.read_text()
    for worker in (1, 2):  # the files have everything
        assert len(command.lines_of(worker)) == 6 * 4 * 200 + 1
        assert command.lines_of(worker)[-1] == "the script is over"


def test_a_reader_that_never_reads(command):
    with pipe() as (_, write), open(command.folder / "errors", "wb") as error:
        command.start(write, error)
        write.close()
        assert command.end() == 0
    assert "(nothing was read for 10 s at the end)" in (command.folder / "errors").read_text()
    assert len(command.lines_of(1)) == 6 * 4 * 200 + 1


def test_streams_on_a_full_disk(command):
    with open("/dev/full", "wb") as full:
        command.start(full, full)
        assert command.end() == 0
    assert "stdout and stderr: " in command.log() and "No space left on device" in command.log()


#: Runs main.py in a separate Python; its children are forks.
FRESH = """
import runpy, sys
sys.executable = sys.argv[1]
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_process_without_standard_streams(command):
    words = ["run", "--nb_workers=2", f"--run_dir={command.run_dir}", "noisy.py"]
    command.process = subprocess.Popen(
        [
            *("/bin/sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh"),
            *(sys.executable, "-P", "-c", FRESH, forker().python, str(MAIN), *words),
        ],
        cwd=command.folder,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "PYTHONPATH": str(MAIN.parent)},
    )
    assert command.end() == 0
    assert len(command.lines_of(2)) == 6 * 4 * 200 + 1


def test_a_log_of_a_worker_on_a_full_disk(command):
    logs = command.run_dir / "logs"
    logs.mkdir(parents=True)
    (logs / "worker-1.out").symlink_to("/dev/full")
    with open(command.folder / "output", "wb") as output:
        command.start(output, output)
        assert command.end() == 0
    text = (command.folder / "output").read_text()
    assert text.count("[worker 1] " + "x" * 99 + "\n") == 6 * 4 * 200, "the terminal has everything"
    assert f"{logs / 'worker-1.out'}: 4,801 lines (480,019 bytes) not written" in text


@pytest.fixture
def small_disk(command):
    """The whole run directory on a disk that the output fills."""
    command.run_dir.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "thinwire-test", str(command.run_dir)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("only root may mount a small disk")
    yield
    if command.process.poll() is None:
        command.process.terminate()
        command.process.wait(30)
    subprocess.run(["umount", "-l", str(command.run_dir)], check=True)


def test_a_run_directory_whose_disk_is_full_ends_the_run(command, small_disk):
    """The PS cannot save the result, so the exit code is the code of a full disk."""
    with open(command.folder / "output", "wb") as output:
        command.start(output, output)
        assert command.end() == 2
    text = (command.folder / "output").read_text()
    assert text.count("x" * 99) == 2 * 6 * 4 * 200
    assert text.count("[worker 1] the script is over") == 1
    assert "lost output: " in text and "Traceback" not in text


NOTEBOOK = """
import os, sys, threading
sys.path.insert(0, os.getcwd())
import noisy, thinwire

class Stream:  # as a notebook has one, whose server is gone or does not answer
    encoding = "utf-8"
    def write(self, text):
        if sys.argv[2] == "raises":
            raise BrokenPipeError(32, "Broken pipe")
        threading.Event().wait()
    def flush(self):
        pass
    def isatty(self):
        return False

sys.stdout = Stream()
found = thinwire.run(noisy.train, nb_workers=2, run_dir=sys.argv[1])
sys.stderr.write(f"ENDED {found.lost_output}\\n")
"""


@pytest.mark.parametrize("manner", ["raises", "never returns"])
def test_a_function_in_a_notebook_whose_output_is_not_taken(manner, command):
    (command.folder / "notebook.py").write_text(NOTEBOOK)
    errors = command.folder / "errors"
    with open(errors, "wb") as error:
        command.start(error, error, ["notebook.py", str(command.run_dir), manner])
        assert command.end() == 0
    ended = errors.read_text().partition("ENDED ")[2]
    why = "(Broken pipe)" if manner == "raises" else "(nothing was read for 10 s at the end)"
    assert ended.startswith("stdout: ") and why in ended and "lines" in ended
