"""Starts `thinwire run` for tests: a toy script in a folder, its processes, and their end."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess

from tests.forked import MAIN, forker
from tests.waiting import patience, wait_until

#: First lines of every toy script. Its data are the rows x [rows, 4] and their sums y [rows, 1].
HEAD = """
import json, os, pathlib, shutil, signal, sys, threading, time
import keras, numpy as np
import thinwire

x = np.random.default_rng(0).normal(size=(ROWS, 4)).astype("float32")
y = x.sum(1, keepdims=True)

def dense(*units):
    return keras.Sequential([keras.Input((4,)), *map(keras.layers.Dense, (*units, 1))])
"""


def toy_script(body: str, rows: int = 64) -> str:
    """Return a script that does `body` after `HEAD`."""
    return f"{HEAD.replace('ROWS', str(rows))}\n{body}"


def wait_for_nodes(condition, seconds=90.0):
    """Wait for an event that needs several processes to start and train."""
    wait_until(condition, seconds, pause_seconds=0.05)


class Command:
    """One `thinwire run` of `script`, which is toy.py in a folder."""

    script = ""
    #: Python that starts the command; None: the forker's, which takes no SIGSTOP to its processes
    python = None

    def __init__(self, folder, *arguments, script=""):
        self.folder = folder
        (folder / "toy.py").write_text(script or self.script)
        self.log = folder / "command.log"
        with open(self.log, "wb") as log:
            python = self.python or forker().python
            self.process = subprocess.Popen(
                [python, str(MAIN), "run", f"--run_dir={folder / 'run'}", *arguments],
                cwd=folder,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | {"CUDA_VISIBLE_DEVICES": "-1"},
            )

    def output(self):
        return self.log.read_text()

    def wait_for(self, text):
        wait_for_nodes(lambda: text in self.output() or self.process.poll() is not None)
        assert text in self.output(), self.output()[-3000:]

    def end(self):
        try:
            return self.process.wait(patience(120))
        finally:
            self.process.kill()
            self.process.wait()

    def summary(self):
        return json.loads((self.folder / "run" / "summary.json").read_text())

    def find(self, word):
        """Return the process, not its watchdog, with a word on its command line."""
        mine = [
            (pid, words) for pid, words in processes() if str(self.folder / "run") in str(words)
        ]
        found = [pid for pid, words in mine if word in words and "watchdog" not in str(words)]
        assert len(found) == 1, mine
        return found[0]


def processes():
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield int(path.parent.name), path.read_text().split("\0")
        except (OSError, UnicodeDecodeError):  # it has just ended
            continue


@contextlib.contextmanager
def commands(kind, tmp_path):
    """Start commands of a kind, and see to it that nothing of them is left."""
    started = []

    def start(*arguments):
        started.append(kind(tmp_path, *arguments))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()
    run_dir = str(tmp_path / "run")
    wait_for_nodes(lambda: not [words for _, words in processes() if run_dir in str(words)], 40)
