"""The examples as a reader would start them."""

import os
import pathlib
import re

import pytest

from tests.forked import forker
from tests.nodes import free_port

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"


def test_two_lines_make_a_script_a_worker():
    text = (EXAMPLES / "fit.py").read_text()
    lines = [line.strip() for line in text.partition('"""\n\n')[2].splitlines()]
    named = [line for line in lines if "thinwire" in line and "thinwire.data" not in line]
    assert named == ["import thinwire", "model = thinwire.distribute(model)"]


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
    assert len(lines) >= 6
    assert [line for line in lines if line not in run] == []


@pytest.mark.processes
def test_two_loops_train_one_model(tmp_path):
    flags = (f"--port={free_port()}", "--nb_workers=2", "--method=dgs", "--learning_rate=0.03")
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "-1"}
    started = {}
    for name, script, own in (
        ("server", "server.py", "--iter_max=300"),
        ("first", "loop_worker.py", "--id_worker=1"),
        ("second", "loop_worker.py", "--id_worker=2"),
    ):
        with open(tmp_path / name, "wb") as log:
            command = [str(EXAMPLES / script), *flags, own]
            started[name] = forker().start(command, log, environment)
    try:
        for name, process in started.items():
            assert process.wait(90) == 0, (tmp_path / name).read_text()[-3000:]
    finally:
        for process in started.values():
            process.kill()
            process.wait()
    assert "iter_max after 300 updates" in (tmp_path / "server").read_text()
    assert "version" in (tmp_path / "first").read_text() + (tmp_path / "second").read_text()
