"""`thinwire run` on the present backend, without TensorFlow: PS, evaluator, report, kills."""

import importlib.util
import json
import os
import pathlib
import shutil
import subprocess
import sys

import keras
import numpy as np
import pytest

from tests.chaos.script_kills import LIVES, Plan
from tests.chaos.script_kills import play as play_kill
from tests.waiting import patience

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIFE = pathlib.Path(__file__).with_name("life.py")
BACKEND = keras.backend.backend()
pytestmark = pytest.mark.processes
needs_both = pytest.mark.skipif(
    not all(importlib.util.find_spec(name) for name in ("jax", "torch")), reason="needs both"
)


def play(folder, *flags, script=(), **environment):
    """Run the script in two workers; return the result and the folder of its files."""
    files = folder / "files"
    files.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "thinwire", "run", f"--run_dir={folder / 'run'}"]
    words = [*command, "--nb_workers=2", *flags, str(LIFE), files.name, *script]
    return subprocess.run(
        # the shell's number of its process stays the launcher's
        ["sh", "-c", 'LAUNCHER=$$ exec "$@"', "sh", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=patience(240),
        check=False,
    )


def flat(path):
    with np.load(path) as saved:
        return np.concatenate([saved[name].ravel() for name in saved.files])


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Weights after the same script without a launcher."""
    folder = tmp_path_factory.mktemp("alone")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, str(LIFE), str(folder)], env=environment, check=True)
    return flat(folder / f"{BACKEND}-1.npz")


def gap(weights, expected):
    """Return the norm of the difference, relative to the norm of the expected weights."""
    return float(np.linalg.norm(weights - expected) / np.linalg.norm(expected))


def test_two_workers_an_evaluator_and_a_report(tmp_path, alone):
    done = play(tmp_path, "--method=bsp")
    assert done.returncode == 0, done.stdout + done.stderr
    for number in (1, 2):
        assert gap(flat(tmp_path / "files" / f"{BACKEND}-{number}.npz"), alone) <= 1e-5
        history = json.loads((tmp_path / "files" / f"{BACKEND}-{number}.json").read_text())
        assert len(history["val_accuracy"]) == 4
    assert (tmp_path / "run" / "report" / "index.html").exists()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary


@needs_both
def test_workers_on_two_backends_train_one_model(tmp_path, alone):
    done = play(tmp_path, "--method=bsp", "--keras_backend=jax,torch")
    assert done.returncode == 0, done.stdout + done.stderr
    names = sorted(path.stem for path in (tmp_path / "files").glob("*.npz"))
    assert names == ["jax-1", "torch-2"]
    for name in names:
        assert gap(flat(tmp_path / "files" / f"{name}.npz"), alone) <= 1e-4


@needs_both
def test_a_run_is_resumed_on_another_backend(tmp_path):
    stopped = play(tmp_path / "first", "--method=bsp", script=("interrupt",))
    assert stopped.returncode == 130, stopped.stdout + stopped.stderr
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    weights = []
    for folder, backend in (("first", "jax"), ("second", "torch")):
        flags = ("--method=bsp", f"--keras_backend={backend}")
        done = play(tmp_path / folder, *flags, script=("interrupt",))
        assert done.returncode == 0, done.stdout + done.stderr
        assert "resumes from update 7" in done.stdout + done.stderr
        weights += [flat(tmp_path / folder / "files" / f"{backend}-{n}.npz") for n in (1, 2)]
    assert all(gap(each, weights[0]) <= 1e-4 for each in weights)


@pytest.mark.product
@pytest.mark.parametrize("life", LIVES)
@pytest.mark.parametrize(
    ("victim", "method"),
    [("worker-2", "bsp"), ("worker-2", "asgd"), ("evaluator", "bsp"), ("ps-0", "dgs")],
)
def test_a_kill_ends_as_promised(victim, method, life):
    outcome = play_kill(Plan(life, method, 1, "JOINED", "EXCHANGE", 20, victim, restarts=True))
    assert outcome.struck and not outcome.problems, outcome.output[-3000:]
