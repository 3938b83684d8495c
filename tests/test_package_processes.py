"""The built package: the content of wheel and sdist, and runs from the wheel alone.

A user's folder may hold modules with the names of the checkout's folders. An installed Thinwire
must not import these modules, and the user's code must not import Thinwire's.
"""

import collections
import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

from tests.nodes import free_port
from thinwire import __version__
from thinwire.launcher.deployment import pack
from thinwire.launcher.program import COPIED

pytest.importorskip("setuptools", minversion="77")

ROOT = Path(__file__).resolve().parents[1]
LINKS = sorted(path.name for path in (ROOT / "thinwire").iterdir() if path.is_symlink())
#: Files of an sdist in addition to the package.
BESIDE = {
    *("CHANGELOG.md", "LICENSE", "MANIFEST.in", "PKG-INFO", "README.md", "main.py"),
    *("pyproject.toml", "requirements.txt", "requirements-dev.txt", "setup.cfg"),
}
BUILD = "from setuptools import build_meta as b; b.build_wheel('dist')"


def tracked():
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    try:
        names = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("not a git checkout")
    return [name for name in names.splitlines() if (ROOT / name).exists()]


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """Return a fresh copy of the checkout, links as links, with its wheel and sdist in dist/."""
    copy = tmp_path_factory.mktemp("tree")
    for name in tracked():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name, follow_symlinks=False)
    build(copy, f"{BUILD}; b.build_sdist('dist')")
    return copy


def build(folder, what):
    subprocess.run([sys.executable, "-c", what], cwd=folder, capture_output=True, check=True)


def wheel_of(folder):
    (wheel,) = (folder / "dist").glob("*.whl")
    return wheel


def packed(tree):
    """Return the names of the files that the package must have."""
    found = set()
    for name in tracked():
        first = name.partition("/")[0]
        inside = name if first == "thinwire" else f"thinwire/{name}"
        if first in (*LINKS, "thinwire") and not (tree / name).is_symlink():
            found.add(inside)
    return {name for name in found if not name.endswith(".md")}


def test_the_wheel_has_every_file_of_the_package_once(tree):
    with zipfile.ZipFile(wheel_of(tree)) as wheel:
        names = [name for name in wheel.namelist() if ".dist-info/" not in name]
        texts = [wheel.read(name) for name in names]
        scripts = next(name for name in wheel.namelist() if name.endswith("entry_points.txt"))
        assert "thinwire = thinwire.cli.commands:run_command" in wheel.read(scripts).decode()
    assert collections.Counter(names) == collections.Counter(packed(tree))
    assert {"thinwire/py.typed", "thinwire/data/fashion_mnist_sample/NOTICE"} <= set(names)
    digests = collections.Counter(hashlib.sha256(text).digest() for text in texts if text)
    assert max(digests.values()) == 1, "a file is there twice"
    assert "thinwire/proto/thinwire.proto" in names


def test_the_sdist_has_the_same_and_what_a_checkout_needs(tree, tmp_path):
    (path,) = (tree / "dist").glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        assert not [member.name for member in sdist if member.issym() or member.islnk()]
        names = [member.name.partition("/")[2] for member in sdist if member.isfile()]
        sdist.extractall(tmp_path, filter="data")
    assert max(collections.Counter(names).values()) == 1
    examples = {name for name in tracked() if name.startswith("examples/")}
    own = {name for name in names if not name.startswith("thinwire.egg-info/")}
    assert own == packed(tree) | examples | BESIDE
    unpacked = tmp_path / f"thinwire-{__version__}"
    build(unpacked, BUILD)
    with zipfile.ZipFile(wheel_of(unpacked)) as again, zipfile.ZipFile(wheel_of(tree)) as first:
        assert sorted(again.namelist()) == sorted(first.namelist())


def test_the_base_forces_no_build_of_tensorflow(tree):
    with zipfile.ZipFile(wheel_of(tree)) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith("/METADATA"))
        about = HeaderParser().parsestr(wheel.read(name).decode())
    assert (about["Version"], about["Requires-Python"]) == (__version__, ">=3.11")
    extras = {"cpu", "gpu", "jax", "torch", "dp", "ray", "s3", "tls", "dev"}
    assert set(about.get_all("Provides-Extra")) == extras
    needed = about.get_all("Requires-Dist")
    base = [each for each in needed if "extra ==" not in each]
    assert any(each.startswith("keras") for each in base)
    assert not [each for each in base if each.startswith("tensorflow")]
    first = {re.search(r"extra == .(\w+)", each)[1]: each for each in needed if each not in base}
    assert first["cpu"].startswith("tensorflow-cpu")
    assert first["gpu"].startswith("tensorflow[and-cuda]")
    assert (first["jax"][:3], first["torch"][:5]) == ("jax", "torch")


# -- installed, in a folder of the user's ---------------------------------------------------------

#: Modules of the user's, named like folders of the checkout.
OWN = ("data", "models", "ops", "ps", "worker", "proto", "supervisor")
MODULES = {
    "data": """
import numpy as np

def stripes(count):
    rng = np.random.default_rng(1)
    y = rng.integers(4, size=count)
    patterns = np.sin(np.arange(8) * np.arange(1, 5)[:, None])[:, :, None, None]
    return (patterns[y] + rng.normal(size=(count, 8, 8, 1))).astype("float32"), y
""",
    "models": """
import keras
from ops import WIDTH

def small():
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Flatten(name="flatten"),
            keras.layers.Dense(WIDTH, activation="relu", name="hidden"),
            keras.layers.Dense(4, name="logits"),
        ],
        name="own_model",
    )
""",
    "ops": "WIDTH = 8\n",
}
#: Writes the path of every imported module that matters.
TRACE = """
import json
import os
import pathlib
import sys

import data, models, ops, proto, ps, supervisor, worker

def trace(what):
    found = {
        name: getattr(module, "__file__", None)
        for name, module in list(sys.modules.items())
        if name in NAMES or name.partition(".")[0] == "thinwire"
    }
    pathlib.Path(f"trace-{what}-{os.getpid()}.json").write_text(json.dumps(found))
"""
OWN_MODEL = """
from trace_imports import trace

import data
import models
from thinwire import W_global

def build_model():
    model = models.small()
    W_global.extend(model.trainable_variables)
    trace("model")
    return model

def load_data():
    x, y = data.stripes(400)
    return (x[:300], y[:300]), (x[300:], y[300:])
"""
SCRIPT = """
import sys

import keras

import data
import models
from thinwire import distribute
from trace_imports import trace

keras.utils.set_random_seed(1)
model = models.small()
model.compile(
    optimizer=keras.optimizers.SGD(0.02),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
)
x, y = data.stripes(300)
x, y = distribute(model, sys.argv[1:]).thinwire.shard(x, y)
model.fit(x, y, batch_size=10, epochs=50, verbose=0)
trace("script")
"""


class Home:
    """A user's folder, and an environment in which the wheel is installed."""

    def __init__(self, folder, wheel):
        self.folder, self.bin = folder / "mine", folder / "venv" / "bin"
        self.folder.mkdir()
        for name in OWN:
            (self.folder / f"{name}.py").write_text(MODULES.get(name, "MINE = True\n"))
        (self.folder / "trace_imports.py").write_text(f"NAMES = {OWN!r}\n{TRACE}")
        (self.folder / "own_model.py").write_text(OWN_MODEL)
        (self.folder / "script.py").write_text(SCRIPT)
        venv.create(folder / "venv", symlinks=True)
        pip = (sys.executable, "-m", "pip", "--python", str(self.bin / "python"), "install")
        subprocess.run(
            [*pip, "--quiet", "--no-deps", "--no-index", str(wheel)], check=True, cwd=folder
        )
        (self.site,) = (folder / "venv" / "lib").glob("python*/site-packages")
        # The dependencies come from this environment; a path file there is not followed.
        (self.site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
        self.environment = {
            name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
        } | {"CUDA_VISIBLE_DEVICES": "-1"}

    def start(self, name, program, *arguments):
        with open(self.folder.parent / f"{name}.log", "wb") as log:
            return subprocess.Popen(
                [str(self.bin / program), *arguments],
                cwd=self.folder,
                env=self.environment,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def run(self, program, *arguments, code=0):
        """Run a command to its end; return its output."""
        process = self.start("one", program, *arguments)
        try:
            process.wait(60)
        finally:
            process.kill()
        text = self.log("one")
        assert process.returncode == code, text[-3000:]
        return text

    def log(self, name):
        return (self.folder.parent / f"{name}.log").read_text(errors="replace")

    def traces(self, what):
        """Check where the modules of every process came from; return how many wrote that down."""
        found = [json.loads(path.read_text()) for path in self.folder.glob(f"trace-{what}-*.json")]
        for modules in found:
            assert {modules[name] for name in OWN} == {
                str(self.folder / f"{name}.py") for name in OWN
            }
            ours = {name: path for name, path in modules.items() if name not in OWN}
            assert "thinwire.ops.types" in ours
            assert not {path for path in ours.values() if not path.startswith(str(self.site))}
        return len(found)


@pytest.fixture(scope="module")
def home(tree, tmp_path_factory):
    return Home(tmp_path_factory.mktemp("home"), wheel_of(tree))


SMALL = ("--model=own_model.py", "--worker_threads=1", "--batch_size=10")


@pytest.mark.processes
@pytest.mark.timeout(200)
def test_a_cluster_of_the_wheel_trains_the_users_own_model(home):
    budget = ("--iter_max=40", "--port=0", "--nb_workers=1", "--run_dir=runs/own")
    home.run("thinwire", "cluster", "--method=dgs", *SMALL, *budget)
    summary = json.loads((home.folder / "runs" / "own" / "summary.json").read_text())
    assert summary["updates"] == 40
    assert home.traces("model") == 3  # PS, worker, Supervisor
    home.run("thinwire", "report", "runs/own", "runs/own")
    assert (home.folder / "comparison.html").exists()


@pytest.mark.product
@pytest.mark.processes
@pytest.mark.timeout(200)
def test_nodes_by_command_and_a_script_with_distribute_train_together(home):
    for path in home.folder.glob("trace-*"):
        path.unlink()
    run = (f"--port={free_port()}", "--run_dir=runs/two", "--nb_workers=2", "--method=asgd")
    run = (*run, "--iter_max=60", "--lease_seconds=5")
    nodes = {
        "ps": ("thinwire", "ps", *SMALL, *run),
        "worker": ("thinwire", "worker", "--id_worker=1", *SMALL, *run),
        "supervisor": ("thinwire", "supervisor", *SMALL, *run),
        "script": ("python", "script.py", "--id_worker=2", *run[:-2], "--iter_max=60"),
    }
    with contextlib.ExitStack() as ending:
        started = {}
        for name, command in nodes.items():
            started[name] = home.start(name, *command)
            ending.callback(started[name].kill)
        for name, process in started.items():
            assert process.wait(90) == 0, home.log(name)[-3000:]
    assert home.traces("model") == 3
    assert home.traces("script") == 1


@pytest.mark.product
@pytest.mark.processes
@pytest.mark.timeout(200)
def test_the_other_commands_of_the_wheel(home):
    # The built-in model on the data that comes with the package.
    small = ("--network=lenet", "--worker_threads=1", "--nb_workers=2", "--iter_max=10")
    home.run("thinwire", "simulate", *small, "--run_dir=runs/simulated")
    assert (home.folder / "runs" / "simulated" / "summary.json").exists()
    assert f"thinwire                {__version__} (package in " in home.run("thinwire", "version")
    assert "wire protocol" in home.run("python", "-m", "thinwire", "version")
    home.run("thinwire", "certificates", "--out=certs", "--workers=1")
    home.run("thinwire", "health", "127.0.0.1:1", "--seconds=1", code=3)
    assert "--link_mbps" in home.run("thinwire", "cluster", "--help")
    assert "python -m thinwire" in home.run("python", str(home.site / "thinwire"), code=1)


#: The files that --sync_dst_dir sends to a host, as one file.
PACK = """
import pathlib
from thinwire.launcher import deployment, program
assert program.CHECKOUT is None and program.NODE == ("-P", "-m", "thinwire")
pathlib.Path("code.tar.gz").write_bytes(deployment.pack({}))
"""


@pytest.mark.product
@pytest.mark.processes
def test_an_installed_package_is_copied_to_hosts_that_lack_it(home, tmp_path):
    (home.folder / "pack.py").write_text(PACK)
    home.run("python", "pack.py")
    with tarfile.open(home.folder / "code.tar.gz") as code:
        assert not [member.name for member in code if member.issym()]
        code.extractall(tmp_path, filter="data")
    command = [sys.executable, *COPIED.node, "version"]
    done = subprocess.run(
        command, cwd=tmp_path, env=home.environment, capture_output=True, text=True, check=True
    )
    assert f"(package in {tmp_path / 'thinwire'})" in done.stdout
    (tmp_path / "code").mkdir()
    subprocess.run(["tar", "-xzf", "-", "-C", "code"], input=pack({}), cwd=tmp_path, check=True)
    done = subprocess.run(
        command, cwd=tmp_path / "code", env=home.environment, capture_output=True, text=True
    )
    assert f"(package in {tmp_path / 'code' / 'thinwire'})" in done.stdout, done.stderr
