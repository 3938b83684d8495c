"""What surrounds a script works without TensorFlow: commands, PS, Supervisor, report and files.

Where TensorFlow is installed, the processes of these tests lack it all the same.
"""

import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests.missing import without
from tests.nodes import free_port
from tests.test_offered_processes import train
from tests.threads.offered import FLAGS, OfferedRun
from tests.waiting import patience
from thinwire.launcher.program import HERE

ROOT = pathlib.Path(__file__).resolve().parents[2]
BACKEND = os.environ.get("KERAS_BACKEND", "jax")
HAS_BACKEND = BACKEND in ("jax", "torch") and importlib.util.find_spec(BACKEND) is not None
#: Modules that compute the built-in networks of main.py, on TensorFlow alone.
TENSORFLOWS_OWN = {
    f"thinwire.{name}"
    for name in (
        *("advisor.measure", "advisor.predict", "advisor.role", "advisor.script"),
        *("launcher.standalone", "models.fast_bias", "simulator.role", "simulator.trainer"),
        *("ops.kernels.device", "ops.kernels.tensorflow_ops", "ops.kernels.tensorflow_scan"),
        *("ops.kernels.tensorflow_select", "worker.role"),
        *("worker.standalone", "worker.train_step"),
        # in scripts: tf.data, tf.train.Checkpoint, and AdaComp's own interface
        *(f"script.data.{name}" for name in ("array_pipeline", "by_rows", "datasets")),
        *("script.data.pipeline", "script.data.windows", "script.adacomp"),
        "script.keras.checkpoints",
    )
}
#: Packages whose modules import TensorFlow where the script's backend is TensorFlow.
OF_BACKENDS = (
    "thinwire.script.backends.",
    *(f"thinwire.ops.optimizers.{name}_steps" for name in ("tensorflow", "jax", "torch")),
    *(f"thinwire.ops.kernels.{name}_ops" for name in ("jax", "torch")),
)
#: What cannot be imported if there is no backend at all.
OF_KERAS = (
    "thinwire.script.",
    "thinwire.models.",
    "thinwire.advisor.stand_in",
    "thinwire.supervisor.scorer",
)
IMPORT_ALL = """
import importlib, json, os, pathlib, sys
failures = {}
for folder, _, files in os.walk("thinwire", followlinks=True):
    for path in (pathlib.Path(folder, name) for name in files if name.endswith(".py")):
        name = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
        if name.endswith("__main__"):
            continue
        try:
            importlib.import_module(name)
        except ImportError as error:
            failures[name] = error.name
print(json.dumps([failures, "tensorflow" in sys.modules]))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """Return the variables of a process without TensorFlow that finds a Keras backend."""
    folder = tmp_path_factory.mktemp("without")
    if not HAS_BACKEND:  # the launcher looks for one, and no test here computes on it
        (folder / "jax.py").write_text("raise ImportError('no JAX')")
    variables = without(folder, "tensorflow")
    variables["PYTHONPATH"] += f":{ROOT}"
    return os.environ | variables | {"KERAS_BACKEND": BACKEND}


def play(environment, folder, *words):
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=patience(100),
        check=False,
    )


def test_every_module_but_tensorflow_s_own_is_imported(environment):
    done = play(environment, ROOT, "-c", IMPORT_ALL)
    assert done.returncode == 0, done.stderr
    failures, has_tensorflow = json.loads(done.stdout.splitlines()[-1])
    allowed = OF_BACKENDS if HAS_BACKEND else (*OF_BACKENDS, *OF_KERAS)
    others = {name for name in failures if not name.startswith(allowed)}
    assert others - TENSORFLOWS_OWN == set(), failures
    assert TENSORFLOWS_OWN - failures.keys() == set(), "not TensorFlow's own any more"
    assert not has_tensorflow


@pytest.mark.parametrize(
    "words", [["--help"], ["run", "--help"], ["worker", "--help"], ["simulate", "--help"]]
)
def test_help_is_shown(environment, tmp_path, words):
    done = play(environment, tmp_path, "-m", "thinwire", *words)
    assert done.returncode == 0 and "thinwire" in done.stdout, done.stderr


@pytest.mark.parametrize("role", ["Worker", "Standalone", "Simulator"])
def test_a_role_of_built_in_networks_names_the_extra(environment, tmp_path, role):
    done = play(environment, tmp_path, "-m", "thinwire", f"--type_node={role}", "--run_dir=run")
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert "pip install 'thinwire[cpu]'" in line and f"--type_node={role}" in line


def test_the_public_names_that_compute_nothing_are_there(environment, tmp_path):
    text = "import thinwire; print(thinwire.W_global, thinwire.run, thinwire.worker_id)"
    done = play(environment, tmp_path, "-c", text)
    assert done.returncode == 0, done.stderr


#: A PS does not import Keras beforehand for a script that names SGD.
SCRIPT = """
import json, os, sys
optimizer = "SGD"
names = ("KERAS_BACKEND", "CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS")
found = {name: os.environ.get(name) for name in names}
print("found", json.dumps([found, sorted({"tensorflow", "keras"} & {*sys.modules})]))
sys.exit(7)
"""


@pytest.mark.processes
def test_a_script_is_run_by_workers_with_the_user_s_environment(environment, tmp_path):
    """The script ends early, so that no worker needs Thinwire's Keras wing."""
    (tmp_path / "script.py").write_text(SCRIPT)
    own = environment | {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu,tpu"}
    words = (*HERE.node, "run", "--nb_workers=2", "--run_dir=run", "script.py")
    done = play(own, tmp_path, *words)
    assert done.returncode == 7, done.stderr
    assert "Traceback" not in done.stderr
    lines = [line for line in done.stdout.splitlines() if "found" in line]
    found, modules = json.loads(lines[0].partition("found ")[2])
    names = ("KERAS_BACKEND", "CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS")
    assert found == dict(zip(names, (BACKEND, "", "cpu,tpu"), strict=True)) and modules == []
    for node in ("ps-0", "supervisor-0"):
        text = (tmp_path / "run" / "logs" / f"{node}.log").read_text()
        assert "Traceback" not in text, text


@pytest.mark.processes
def test_the_evaluator_computes_on_the_processor(environment, tmp_path):
    """The Supervisor's evaluator starts as here, with the script and --device=cpu."""
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ["--evaluates", "--device=cpu", "--seed=1", "--run_dir=run", "--", "script.py"]
    done = play(environment | {"CUDA_VISIBLE_DEVICES": "0"}, tmp_path, *HERE.script, *words)
    assert done.returncode == 7, done.stderr
    found, modules = json.loads(done.stdout.partition("found ")[2])
    assert (found["CUDA_VISIBLE_DEVICES"], found["JAX_PLATFORMS"]) == ("-1", "cpu")
    assert modules == []


@pytest.fixture
def started(environment, tmp_path):
    """Return a function (name, words) that starts a node; end all nodes with the test."""
    processes = []

    def start(name, *words):
        with open(tmp_path / f"{name}.out", "wb") as log:
            processes.append(
                subprocess.Popen(
                    [sys.executable, *HERE.node, *words],
                    cwd=tmp_path,
                    env=environment,
                    stdout=log,
                    stderr=log,
                )
            )
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.wait(10)


@pytest.mark.processes
def test_ps_supervisor_report_and_event_files(environment, started, tmp_path):
    """A worker of this process trains a model, without any backend, on a real PS."""
    run = OfferedRun(tmp_path / "run", "--nb_workers=1")
    own = (f"--port={run.ports[0]}", "--run_dir=run", *FLAGS, "--nb_workers=1", "--iter_max=4")
    port = free_port()
    ps = started("ps", "--type_node=PS", *own, "--linger_seconds=20")
    flags = (*own, "--status_interval_seconds=0.2", f"--metrics_port={port}")
    supervisor = started("supervisor", "--type_node=Supervisor", *flags)
    train(run.worker(1, flags=("--nb_workers=1", "--iter_max=4")), 4)
    output = (tmp_path / "supervisor.out").read_text
    assert (supervisor.wait(patience(60)), ps.wait(patience(60))) == (0, 0), output()
    assert "Traceback" not in output()
    folder = tmp_path / "run"
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["stop_reason"], summary["updates"]) == ("iter_max", 4)
    assert (folder / "report" / "index.html").stat().st_size > 1000
    report = play(environment, tmp_path, "-m", "thinwire", "report", "run", "--out=compared")
    assert report.returncode == 0, report.stderr
    tags = play(environment, tmp_path, "-c", READ_EVENTS, str(folder / "tb"))
    assert tags.returncode == 0, tags.stderr
    assert "net/bytes_up" in json.loads(tags.stdout.splitlines()[-1]), tags.stdout


#: TensorBoard's own reader.
READ_EVENTS = """
import json, pathlib, sys
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
tags = set()
for path in pathlib.Path(sys.argv[1]).rglob("events.out.tfevents.*"):
    for event in EventFileLoader(str(path)).Load():
        tags |= {value.tag for value in event.summary.value}
print(json.dumps(sorted(tags)))
"""
