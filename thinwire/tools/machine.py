"""Checks of this machine for `thinwire doctor`: packages, backend, files, ports, processors."""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import platform
import re
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

from thinwire.tools.findings import Finding, graded
from thinwire.tools.versions import version_of

#: Package -> oldest version that works with Thinwire, equal to the bound in pyproject.toml.
FLOORS = {
    "keras": "3.10",
    "numpy": "2.0",
    "absl-py": "2.0",
    "protobuf": "6.31.1",
    "grpcio": "1.80",
    "grpcio-health-checking": "1.80",
    "prometheus-client": "0.17",
    "tensorboard": "2.20",
    "matplotlib": "3.9",
    "rich": "13",
    "ml_dtypes": "0.5.1",
    "cloudpickle": "3.0",
}


@dataclasses.dataclass(frozen=True)
class BackendPackage:
    """A library on which Keras can run."""

    title: str  # name of the library in texts
    packages: tuple[str, ...]  # packages of which one installs the library
    floor: str  # oldest version that works with Thinwire, equal to the bound in pyproject.toml
    with_cuda: str  # how to install the library for NVIDIA's GPUs


#: Name of a Keras backend -> its library, the preferred backend first.
BACKENDS = {
    "tensorflow": BackendPackage(
        "TensorFlow",
        ("tensorflow", "tensorflow-cpu", "tf-nightly"),
        "2.20",
        "pip install 'thinwire[gpu]'",
    ),
    "jax": BackendPackage("JAX", ("jax",), "0.7.2", "pip install 'jax[cuda13]'"),
    "torch": BackendPackage("PyTorch", ("torch",), "2.11", "install torch for CUDA"),
}
_EXTRAS = ("cpu", "gpu", "jax", "torch")  # extras of Thinwire that install a backend
_PYTHON_FLOOR = (3, 11)
_PROBE = pathlib.Path(__file__).resolve().parent / "backend_probe.py"
#: CPU instruction sets for which TensorFlow has different kernels, the fastest set last.
_INSTRUCTIONS = ("avx", "avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")
_GPUS = pathlib.Path("/proc/driver/nvidia/gpus")
_SLOW_IMPORT_SECONDS, _SLOW_STEP_SECONDS = 10.0, 0.5
_FEW_FILES, _TOO_FEW_FILES = 1024, 128
_LITTLE_DISK_BYTES, _TOO_LITTLE_DISK_BYTES = 2e9, 1e8
_SLOW_SYNC_SECONDS = 0.05
_SYNCS, _SYNC_BYTES = 5, 1 << 20


def python() -> Finding:
    """Check that Thinwire supports the version of the running Python interpreter."""
    text = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info[:2] >= _PYTHON_FLOOR:
        return Finding("Python", "ok", text)
    return Finding("Python", "problem", text, "install 3.11 or newer")


def packages() -> Iterator[Finding]:
    """Yield a problem per missing or outdated package; yield one ok result if there is none."""
    wrong = []
    for name, floor in FLOORS.items():
        version = version_of(name)
        if version is None or _numbers(version) < _numbers(floor):
            text = "not installed" if version is None else f"{version}, older than {floor}"
            wrong.append(Finding(name, "problem", text, f"pip install '{name}>={floor}'"))
    yield from wrong or [Finding("packages", "ok", f"all {len(FLOORS)} packages are new enough")]


def processors() -> Finding:
    """Check the number and the instruction sets of the CPUs that this process may use."""
    number = len(os.sched_getaffinity(0))
    flags = set(re.findall(r"\w+", _first_line("/proc/cpuinfo", r"(?:flags|Features)\s*:")))
    sets = [name for name in _INSTRUCTIONS if name in flags]
    text = f"{number} of {os.cpu_count()}, {', '.join(sets) or 'unknown instruction sets'}"
    if platform.machine() == "x86_64" and "avx" not in flags:
        return Finding("processors", "problem", text, "TensorFlow's packages need AVX")
    advice = "a PS and a worker need one core each; move the PS or the worker to another host"
    return graded("processors", 2 - number, text, advice, 0)


def memory() -> Finding:
    """Check the machine's available memory, because a node with TensorFlow needs 0.65 GB."""
    line = _first_line("/proc/meminfo", r"MemAvailable:")
    free_bytes = 1024 * int(re.findall(r"\d+", line)[0]) if line else 0
    text = f"{free_bytes / 1e9:.1f} GB available"
    return graded("memory", -free_bytes, text, "a worker with TensorFlow needs 0.7 GB", -1.5e9)


def backend(seconds: float) -> Iterator[Finding]:
    """Import Keras' backend and train a small model in a subprocess; yield the check's results.

    Args:
        seconds: Time limit of the subprocess that imports the backend, in seconds.
    """
    installed = [name for name, each in BACKENDS.items() if any(map(version_of, each.packages))]
    if not installed:
        extras = ", ".join(f"'thinwire[{extra}]'" for extra in _EXTRAS)
        yield Finding(
            "Keras backend", "problem", "none is installed", f"pip install one of {extras}"
        )
        return
    chosen = os.environ.get("KERAS_BACKEND")
    # Keras' own choice is TensorFlow or the backend of its configuration file.
    assumed = {} if chosen or "tensorflow" in installed else {"KERAS_BACKEND": installed[0]}
    title = BACKENDS[chosen if chosen in BACKENDS else installed[0]].title
    try:
        done = subprocess.run(
            [sys.executable, str(_PROBE)],
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
            env={**os.environ, **assumed},
        )
        probe = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        text = f"no step within {seconds:g} s"
        yield Finding(title, "warning", text, "raise --seconds; is the machine busy?")
        return
    except (ValueError, IndexError):
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        advice = f"reinstall it, or set KERAS_BACKEND to one of {', '.join(installed)}"
        yield Finding(title, "problem", f"cannot train: {reason[:200]}", advice)
        return
    yield from _backend_findings(probe)


def _backend_findings(probe: dict[str, Any]) -> Iterator[Finding]:
    """Yield the results about the backend's version, GPUs and speed."""
    library = BACKENDS[probe["backend"]]
    text = f"{probe['version']}, Keras {probe['keras']}"
    if _numbers(probe["version"]) < _numbers(library.floor):
        yield Finding(library.title, "problem", text, f"expected {library.floor} or newer")
    else:
        took, advice = probe["import_seconds"], "is the disk slow? Each node takes as long to start"
        text = f"{text}, imported in {took:.1f} s"
        yield graded(library.title, took, text, advice, _SLOW_IMPORT_SECONDS)
    yield _gpu(probe, library)
    step, advice = probe["step_seconds"], "is the machine busy with other work?"
    text = f"{1e3 * step:.1f} ms (mnist_cnn, batch 64, alone on this machine)"
    yield graded("training step", step, text, advice, _SLOW_STEP_SECONDS)


def _gpu(probe: dict[str, Any], library: BackendPackage) -> Finding:
    num_installed, seen = len(list(_GPUS.glob("*"))), probe["gpus"]
    text = f"{len(seen)} seen, {num_installed} in this machine"
    if num_installed and not seen:
        advice = (
            f"the driver or CUDA does not fit this {library.title}"
            if probe["built_with_cuda"]
            else f"this {library.title} is built without CUDA: {library.with_cuda}"
        )
        return Finding("GPU", "warning", text, advice)
    return Finding("GPU", "ok", text)


def open_files() -> Finding:
    """Check the number of files and sockets that a process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft} (at most {hard})"
    if soft == resource.RLIM_INFINITY:
        return Finding("open files", "ok", text)
    advice = "a PS needs one descriptor per worker: ulimit -n 4096"
    return graded("open files", -soft, text, advice, -_FEW_FILES, -_TOO_FEW_FILES)


def run_directory(folder: pathlib.Path) -> Iterator[Finding]:
    """Check that a run directory can be written, locked and synced, and check its free space.

    Args:
        folder: Path of the run directory. If it does not exist, its nearest existing parent is
            checked.
    """
    existing = next(
        parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.is_dir()
    )
    free = shutil.disk_usage(existing).free
    text = f"{free / 1e9:.1f} GB free for {folder}"
    advice = "checkpoints and journals need several model sizes; choose another --run_dir"
    yield graded("disk", -free, text, advice, -_LITTLE_DISK_BYTES, -_TOO_LITTLE_DISK_BYTES)
    try:
        seconds, locks = _sync_seconds(existing), _has_locks(existing)
    except OSError as error:
        text = f"{existing} cannot be written ({error.strerror})"
        yield Finding("run directory", "problem", text, "choose another --run_dir")
        return
    text = f"{1e3 * seconds:.1f} ms to write and sync 1 MiB"
    advice = "the journal may slow the run; a local disk is faster"
    yield graded("sync", seconds, text, advice, _SLOW_SYNC_SECONDS)
    if not locks:
        advice = "two runs in one directory would not be noticed; choose a disk with locks"
        yield Finding("locks", "warning", "this file system has no locks", advice)


def port(number: int) -> Finding:
    """Check that PS shard 0 of a run can listen on a port of this machine."""
    try:
        socket.create_server(("127.0.0.1", number)).close()
    except OSError as error:
        advice = "choose another --port, or --port=0 for any free port"
        return Finding("port", "warning", f"{number}: {error.strerror}", advice)
    return Finding("port", "ok", f"{number} is free")


def _sync_seconds(folder: pathlib.Path) -> float:
    """Return the median time to write and sync 1 MiB to a temporary file, in seconds."""
    seconds, content = [], os.urandom(_SYNC_BYTES)
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(_SYNCS):
            began = time.perf_counter()
            file.seek(0)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def _has_locks(folder: pathlib.Path) -> bool:
    from thinwire.runtime.run.lock import is_held

    with tempfile.NamedTemporaryFile(dir=folder) as file:
        return is_held(pathlib.Path(file.name)) is not None


def _numbers(version: str) -> tuple[int, ...]:
    """Return a version's numbers for comparisons, for example (2, 21, 0) for 2.21.0rc1."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("rc")[0])[:3])


def _first_line(path: str, begins: str) -> str:
    try:
        lines = pathlib.Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if re.match(begins, line)), "")
