"""Examines this machine: packages, TensorFlow, files, ports, processors."""

from __future__ import annotations

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

from thinwire.tools.findings import Finding, graded
from thinwire.tools.versions import version_of

#: Package -> the oldest version that a run works with, as pyproject.toml has them.
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
_TENSORFLOW_FLOOR = "2.20"
_PYTHON_FLOOR = (3, 11)
_TENSORFLOW = ("tensorflow", "tensorflow-cpu", "tf-nightly")
_PROBE = pathlib.Path(__file__).resolve().parent / "tensorflow_probe.py"
#: Instruction sets that TensorFlow's kernels choose between, best last.
_INSTRUCTIONS = ("avx", "avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "sve")
_GPUS = pathlib.Path("/proc/driver/nvidia/gpus")
_SLOW_IMPORT_SECONDS, _SLOW_STEP_SECONDS = 10.0, 0.5
_FEW_FILES, _TOO_FEW_FILES = 1024, 128
_LITTLE_DISK_BYTES, _TOO_LITTLE_DISK_BYTES = 2e9, 1e8
_SLOW_SYNC_SECONDS = 0.05
_SYNCS, _SYNC_BYTES = 5, 1 << 20


def python() -> Finding:
    """Return whether this Python is new enough."""
    text = f"{platform.python_version()} ({sys.executable})"
    if sys.version_info[:2] >= _PYTHON_FLOOR:
        return Finding("Python", "ok", text)
    return Finding("Python", "problem", text, "install 3.11 or newer")


def packages() -> Iterator[Finding]:
    """Yield a finding for each package that is missing or too old, or one that all are there."""
    wrong = []
    for name, floor in FLOORS.items():
        found = version_of(name)
        if found is None or _numbers(found) < _numbers(floor):
            text = "not installed" if found is None else f"{found}, older than {floor}"
            wrong.append(Finding(name, "problem", text, f"pip install '{name}>={floor}'"))
    yield from wrong or [Finding("packages", "ok", f"all {len(FLOORS)} as new as they must be")]


def processors() -> Finding:
    """Return how many processors this process may use, and their instruction sets."""
    number = len(os.sched_getaffinity(0))
    flags = set(re.findall(r"\w+", _first_line("/proc/cpuinfo", r"(?:flags|Features)\s*:")))
    sets = [name for name in _INSTRUCTIONS if name in flags]
    text = f"{number} of {os.cpu_count()}, {', '.join(sets) or 'unknown instruction sets'}"
    if platform.machine() == "x86_64" and "avx" not in flags:
        return Finding("processors", "problem", text, "TensorFlow's packages need AVX")
    advice = "a PS and a worker want a core each; use another host for one of them"
    return graded("processors", 2 - number, text, advice, 0)


def memory() -> Finding:
    """Return how much memory is free; the program with TensorFlow takes 0.65 GB a node."""
    line = _first_line("/proc/meminfo", r"MemAvailable:")
    free_bytes = 1024 * int(re.findall(r"\d+", line)[0]) if line else 0
    text = f"{free_bytes / 1e9:.1f} GB available"
    return graded("memory", -free_bytes, text, "a worker with TensorFlow takes 0.7 GB", -1.5e9)


def tensorflow(seconds: float) -> Iterator[Finding]:
    """Yield what an import of TensorFlow and a few steps of a small model show.

    Args:
        seconds: Patience.
    """
    installed = [name for name in _TENSORFLOW if version_of(name)]
    if not installed:
        advice = "pip install 'thinwire[cpu]', or 'thinwire[gpu]' for NVIDIA GPUs"
        yield Finding("TensorFlow", "problem", "not installed", advice)
        return
    try:
        done = subprocess.run(
            [sys.executable, str(_PROBE)],
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        found = json.loads(done.stdout.splitlines()[-1])
    except subprocess.TimeoutExpired:
        text = f"no step within {seconds:g} s"
        yield Finding("TensorFlow", "warning", text, "raise --seconds; is the machine busy?")
        return
    except (ValueError, IndexError):
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        yield Finding("TensorFlow", "problem", f"cannot train: {reason[:200]}", "install it anew")
        return
    text = f"{found['version']}, Keras {found['keras']}"
    if _numbers(found["version"]) < _numbers(_TENSORFLOW_FLOOR):
        yield Finding("TensorFlow", "problem", text, f"expected {_TENSORFLOW_FLOOR} or newer")
    elif found["backend"] != "tensorflow":
        yield Finding("TensorFlow", "problem", f"{text} on {found['backend']}", "set KERAS_BACKEND")
    else:
        took, advice = found["import_seconds"], "a slow disk? each node takes as long to start"
        text = f"{text}, imported in {took:.1f} s"
        yield graded("TensorFlow", took, text, advice, _SLOW_IMPORT_SECONDS)
    yield _gpu(found)
    step, advice = found["step_seconds"], "is the machine busy with other work?"
    text = f"{1e3 * step:.1f} ms (mnist_cnn, batch 64, alone on this machine)"
    yield graded("training step", step, text, advice, _SLOW_STEP_SECONDS)


def _gpu(found: dict[str, object]) -> Finding:
    there, seen = len(list(_GPUS.glob("*"))), found["gpus"]
    text = f"{len(seen) if isinstance(seen, list) else 0} seen, {there} in this machine"
    if there and not seen:
        advice = (
            "the driver or CUDA does not fit this TensorFlow"
            if found["built_with_cuda"]
            else "this TensorFlow is built without CUDA: pip install 'thinwire[gpu]'"
        )
        return Finding("GPU", "warning", text, advice)
    return Finding("GPU", "ok", text)


def open_files() -> Finding:
    """Return how many files and sockets a process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{soft} (at most {hard})"
    if soft == resource.RLIM_INFINITY:
        return Finding("open files", "ok", text)
    advice = "a PS needs one for each worker: ulimit -n 4096"
    return graded("open files", -soft, text, advice, -_FEW_FILES, -_TOO_FEW_FILES)


def run_directory(folder: pathlib.Path) -> Iterator[Finding]:
    """Yield whether a run directory can be written, locked and synchronised, and its free space.

    Args:
        folder: The directory; the nearest folder that exists is examined.
    """
    there = next(each for each in (folder.absolute(), *folder.absolute().parents) if each.is_dir())
    free = shutil.disk_usage(there).free
    text = f"{free / 1e9:.1f} GB free for {folder}"
    advice = "checkpoints and journals need several times the model; choose another --run_dir"
    yield graded("disk", -free, text, advice, -_LITTLE_DISK_BYTES, -_TOO_LITTLE_DISK_BYTES)
    try:
        seconds, locks = _sync_seconds(there), _has_locks(there)
    except OSError as error:
        text = f"{there} cannot be written ({error.strerror})"
        yield Finding("run directory", "problem", text, "choose another --run_dir")
        return
    text = f"{1e3 * seconds:.1f} ms to write and sync 1 MiB"
    advice = "a journal keeps up more slowly; a local disk is faster"
    yield graded("sync", seconds, text, advice, _SLOW_SYNC_SECONDS)
    if not locks:
        advice = "two runs there by mistake would not be noticed; choose a disk with locks"
        yield Finding("locks", "warning", "this file system has none", advice)


def port(number: int) -> Finding:
    """Return whether shard 0 can listen at this port."""
    try:
        socket.create_server(("127.0.0.1", number)).close()
    except OSError as error:
        advice = "choose another --port, or --port=0 for any free one"
        return Finding("port", "warning", f"{number}: {error.strerror}", advice)
    return Finding("port", "ok", f"{number} is free")


def _sync_seconds(folder: pathlib.Path) -> float:
    """Return the median time to write and sync 1 MiB; leaves nothing there."""
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
    """Return the release's numbers, to compare: (2, 21, 0) of 2.21.0rc1."""
    return tuple(int(part) for part in re.findall(r"\d+", version.split("rc")[0])[:3])


def _first_line(path: str, begins: str) -> str:
    try:
        lines = pathlib.Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if re.match(begins, line)), "")
