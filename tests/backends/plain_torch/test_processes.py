"""`thinwire run` with plain torch scripts: loaders, evaluations, files, kills, forks, resume."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch

from tests.waiting import patience

ROOT = pathlib.Path(__file__).resolve().parents[3]
LIFE = pathlib.Path(__file__).with_name("life.py")
pytestmark = pytest.mark.processes


def play(folder, *flags, script=(), path=LIFE):
    """Run a script in two workers; return the result and everything that was printed."""
    (folder / "files").mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "thinwire", "run", f"--run_dir={folder / 'run'}"]
    words = [*command, "--nb_workers=2", *flags, str(path), *script]
    done = subprocess.run(
        # the shell's number of its process stays the launcher's
        ["sh", "-c", 'LAUNCHER=$$ exec "$@"', "sh", *words],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=patience(240),
        check=False,
    )
    return done, done.stdout + done.stderr


def ends(folder):
    """Return what both workers have written at their ends."""
    files = folder / "files"
    return [
        (json.loads((files / f"end-{n}.json").read_text()), torch.load(files / f"end-{n}.pt"))
        for n in (1, 2)
    ]


def test_two_workers_share_a_loader_and_the_chief_evaluates_and_saves(tmp_path):
    done, printed = play(tmp_path, "--method=bsp", script=("files", "SGD"))
    assert done.returncode == 0, printed
    (one, (weights, state)), (two, (others, _)) = ends(tmp_path)
    assert one["foreign"] == two["foreign"] == []
    assert one["steps"] == two["steps"] == 64
    for epoch in range(8):
        rows = slice(96 * epoch, 96 * epoch + 96)
        assert len({*one["seen"][rows], *two["seen"][rows]}) == 192
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    assert sorted(state["state"][0]) == ["momentum_buffer"]
    saved = torch.load(tmp_path / "files" / "model.pt")
    assert all(torch.equal(weights[name], saved[name]) for name in weights)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["updates"] == 64 and summary["test_accuracy"] > 0.6


def test_a_worker_that_was_killed_comes_back_with_its_optimizer_s_state(tmp_path):
    flags = ("--method=diloco", "--local_steps=4", "--restart_workers=2")
    flags += ("--checkpoint_interval_seconds=0.2",)
    done, printed = play(tmp_path, *flags, script=("files", "AdamW", "kill"))
    assert done.returncode == 0, printed
    assert "worker-2 died (code -9); starting it again" in printed
    assert "resetting the optimizer" not in printed
    assert ends(tmp_path)[0][0]["steps"] == 64


def test_an_interrupted_run_is_resumed(tmp_path):
    flags = ("--method=bsp", "--checkpoint_interval_seconds=0.2")
    done, printed = play(tmp_path, *flags, script=("files", "Adam", "interrupt"))
    assert "the same command resumes the run" in printed
    done, printed = play(tmp_path, *flags, script=("files", "Adam", "interrupt"))
    assert done.returncode == 0, printed
    (_, (weights, state)), (_, (others, _)) = ends(tmp_path)
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    # the PS has counted the steps of both commands
    assert int(state["state"][0]["step"]) > 64, printed


FORKS = """
import os, torch, thinwire
net = torch.nn.Linear(6, 4)
optimizer = thinwire.distribute(torch.optim.SGD(net.parameters(), 0.01), model=net)
bad = 0
for _ in range(60):
    optimizer.zero_grad()
    net(torch.ones(8, 6)).square().mean().backward()
    optimizer.step()
    child = os.fork()
    if not child:
        os._exit(0)
    bad += bool(os.waitpid(child, 0)[1])
print("crashed:", bad, "of 60")
"""


def test_no_forked_child_crashes_beside_a_busy_stream(tmp_path):
    """DataLoader forks its processes; gRPC's support for forks started threads there."""
    path = tmp_path / "forks.py"
    path.write_text(FORKS)
    done, printed = play(tmp_path, "--method=bsp", path=path)
    assert done.returncode == 0, printed
    assert re.findall(r"crashed: (\d+) of", printed) == ["0", "0"]
