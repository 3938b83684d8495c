"""The examples as a reader would start them, each compared with its run on one machine."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

from tests.forked import forker
from tests.nodes import free_port
from tests.scripts import quality

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
#: Examples that use two lines of Thinwire; the other examples show other interfaces.
TWO_LINES = (
    *("convnet", "forecasting", "gan", "keras_hub_bert", "language_model"),
    *("lora", "tabular", "transformer"),
)
#: Allowed difference between one seed's score and the script alone.
MARGIN = 0.03
#: The environment that examples/keras_hub_bert.py describes.
KERAS_HUB = os.environ.get("THINWIRE_KERAS_HUB_PYTHON") or str(
    ROOT / "runs" / "keras-hub" / "bin" / "python"
)
#: Weights of lora.py's adapters: rank 6 for 784 x 256, 256 x 256 and 256 x 10.
ADAPTERS = 6 * (784 + 256 + 256 + 256 + 256 + 10)


@pytest.mark.parametrize("name", TWO_LINES)
def test_two_lines_make_a_script_a_worker(name):
    text = (EXAMPLES / f"{name}.py").read_text()
    lines = [line.strip() for line in text.split('"""', 2)[2].splitlines()]
    named = [line for line in lines if "thinwire" in line and "thinwire.data" not in line]
    assert named == ["import thinwire", "model = thinwire.distribute(model)"]


def test_the_page_names_every_example():
    page = (ROOT / "docs" / "guide/examples.md").read_text()
    missing = [path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")]
    assert [name for name in missing if f"(../../examples/{name})" not in page] == []


def _alone(name, *arguments, python=sys.executable):
    finished = quality.run(EXAMPLES / f"{name}.py", arguments, python=python)
    assert finished.problems(1) == [], finished.output[-3000:]
    return finished


def _compare(name, method, *arguments, python=sys.executable, run_dir=None, flags=()):
    """Run an example alone and on two workers; the shared model must be as good."""
    (alone,) = _alone(name, *arguments, python=python).values
    finished = quality.run(
        EXAMPLES / f"{name}.py",
        arguments,
        method=method,
        python=python,
        run_dir=run_dir,
        flags=flags,
    )
    assert finished.problems(2) == [], finished.output[-3000:]
    assert min(finished.values) >= alone - MARGIN, (alone, finished.values)


@pytest.mark.product
@pytest.mark.processes
def test_a_table_alone_and_on_two_workers():
    _compare("tabular", "bsp", "--epochs=4")


@pytest.mark.product
@pytest.mark.timeout(600)
@pytest.mark.parametrize("method", ["bsp", "dgs"])
@pytest.mark.parametrize(
    "name", sorted({*TWO_LINES} - {"keras_hub_bert", "language_model", "lora"})
)
def test_an_example_alone_and_on_two_workers(name, method):
    _compare(name, method)


@pytest.mark.product
@pytest.mark.timeout(600)
def test_a_language_model_with_many_local_steps():
    """As many steps as alone, each on half a batch, and plain means of sixteen workers' results."""
    small = ("--width=64", "--blocks=1", "--sequences=9600", "--epochs=2")
    rounds = ("--pacer=fixed", "--local_steps=16", "--batch=global")
    _compare("language_model", "bsp", *small, flags=rounds)


@pytest.mark.product
@pytest.mark.timeout(600)
def test_only_adapters_travel(tmp_path):
    _compare("lora", "bsp", run_dir=tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["num_parameters"] == ADAPTERS
    assert summary["bytes_up_per_push"] < 1.02 * 4 * ADAPTERS
    assert summary["bytes_down_per_pull"] < 1.02 * 4 * ADAPTERS
    command = [sys.executable, "-m", "thinwire", "run", "--dry_run", "--nb_workers=2"]
    command += ["--method=bsp", f"--run_dir={tmp_path / 'run'}", str(EXAMPLES / "lora.py")]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"with N = {ADAPTERS:,}" in shown


@pytest.mark.product
@pytest.mark.timeout(600)
def test_a_model_of_keras_hub():
    if not os.path.exists(KERAS_HUB):
        pytest.skip(f"no {KERAS_HUB}: examples/keras_hub_bert.py describes how to make it")
    _compare("keras_hub_bert", "dgs", python=KERAS_HUB)


#: Runs the code of a notebook cell by cell in `__main__`, as a kernel does.
KERNEL = """
import __main__, json, sys
cells = json.load(open(sys.argv[1]))["cells"]
for cell in cells:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), cell["id"], "exec"), __main__.__dict__)
"""


@pytest.mark.product
@pytest.mark.timeout(600)
def test_the_notebook(tmp_path):
    command = [sys.executable, "-c", KERNEL, str(EXAMPLES / "notebook.ipynb")]
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "MPLBACKEND": "agg",
        "CUDA_VISIBLE_DEVICES": "-1",
    }
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"metric"')]
    alone, both = (json.loads(line)["value"] for line in lines)
    assert both >= alone - MARGIN


def test_the_notebook_holds_no_results():
    notebook = json.loads((EXAMPLES / "notebook.ipynb").read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["id"] for cell in cells if cell["outputs"] or cell["execution_count"]] == []


# -- other interfaces -----------------------------------------------------------------------------


def test_what_the_page_shows_is_run_somewhere():
    page = (ROOT / "docs" / "guide/api.md").read_text()
    scripts = [*EXAMPLES.glob("*.py"), *quality.scripts().values()]
    run = "".join(path.read_text() for path in scripts)
    run += (ROOT / "tests" / "thinwire" / "script" / "test_adacomp.py").read_text()
    lines = [
        line.strip()
        for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        for line in block.splitlines()
        if "..." not in line
    ]
    assert len(lines) >= 6
    assert [line for line in lines if line not in run] == []


@pytest.mark.product
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
