"""The examples as a reader would start them."""

import difflib
import os
import pathlib
import re

import pytest

from tests.forked import forker
from tests.nodes import free_port

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def test_the_worker_differs_from_the_single_machine_by_three_lines():
    single, worker = (
        (EXAMPLES / name).read_text().splitlines() for name in ("fit_single.py", "fit_worker.py")
    )
    changes = [
        line
        for line in difflib.unified_diff(single, worker, n=0)
        if line[0] in "+-" and line[:3] not in ("+++", "---") and line[1:].strip()
    ]
    assert 1 <= len(changes) <= 3, changes


def test_what_the_page_shows_is_run_somewhere():
    page = (ROOT / "docs" / "API.md").read_text()
    run = "".join(path.read_text() for path in EXAMPLES.glob("*.py"))
    run += (ROOT / "tests" / "thinwire" / "test_adacomp.py").read_text()
    lines = [
        line.strip()
        for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        for line in block.splitlines()
        if "..." not in line
    ]
    assert len(lines) >= 8
    assert [line for line in lines if line not in run] == []


@pytest.mark.processes
def test_fit_and_a_loop_train_one_model(tmp_path):
    flags = (f"--port={free_port()}", "--nb_workers=2", "--method=dgs", "--learning_rate=0.03")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "-1"}
    started = {}
    for name, own in (
        ("server.py", ("--iter_max=300",)),
        ("fit_worker.py", ("--id_worker=1",)),
        ("loop_worker.py", ("--id_worker=2",)),
    ):
        with open(tmp_path / name, "wb") as log:
            command = [str(EXAMPLES / name), *flags, *own]
            started[name] = forker().start(command, log, environment)
    try:
        for name, process in started.items():
            assert process.wait(90) == 0, (tmp_path / name).read_text()[-3000:]
    finally:
        for process in started.values():
            process.kill()
            process.wait()
    assert "iter_max after 300 updates" in (tmp_path / "server.py").read_text()
    assert "version" in (tmp_path / "loop_worker.py").read_text()
    assert "val_accuracy" in (tmp_path / "fit_worker.py").read_text()
