"""AutoGraph's generated code leaves no file, and errors show the script's own lines."""

import linecache
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
import tensorflow as tf
from tensorflow.python.autograph.pyct import loader

from thinwire.runtime.run.quiet import keep_generated_code_in_memory

ROOT = Path(__file__).resolve().parents[4]
KILLED = """
import os, signal
from thinwire.runtime.run.quiet import import_quietly
import_quietly("tensorflow")
import tensorflow as tf

@tf.function
def total(values):
    found = 0.0
    for value in values:
        if value > 1.0:
            found += value
    return found

assert total(tf.constant([1.0, 2.0, 3.0])) == 5.0
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_leaves_no_generated_code(tmp_path):
    script, temporary = tmp_path / "killed.py", tmp_path / "temporary"
    script.write_text(KILLED)
    temporary.mkdir()
    environment = {"TMPDIR": str(temporary), "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "-1"}
    done = subprocess.run([sys.executable, str(script)], env=environment, check=False, timeout=120)
    assert done.returncode == -9
    assert list(temporary.iterdir()) == []


def test_an_error_of_converted_code_shows_the_script_s_line(monkeypatch):
    monkeypatch.setattr(loader, "load_source", loader.load_source)
    keep_generated_code_in_memory()

    @tf.function
    def fails(value):
        if value > 0:
            raise ValueError("it is positive")  # this line is shown
        return value

    with pytest.raises(ValueError, match="it is positive") as caught:
        fails(tf.constant(1.0))
    assert "# this line is shown" in str(caught.value)
    frames = traceback.extract_tb(caught.tb)
    generated = {frame.filename for frame in frames if "autograph_generated" in frame.filename}
    assert all(linecache.getline(name, 1) for name in generated)
