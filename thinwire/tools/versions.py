"""``thinwire version``: lists versions of Thinwire, packages and system, for bug reports.

`thinwire version` imports no slow module. The command `thinwire version` reads TensorFlow's build
information from TensorFlow's files, and the GPUs from the NVIDIA driver's files.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import pathlib
import platform
import re
import sys
from collections.abc import Iterator, Sequence

from thinwire import __version__
from thinwire.launcher import program

_TENSORFLOW = ("tensorflow", "tensorflow-cpu", "tf-nightly", "tensorflow-intel", "tensorflow-macos")
_PACKAGES = (
    *("keras", "numpy", "grpcio", "grpcio-health-checking", "protobuf", "ml_dtypes", "absl-py"),
    *("jax", "jaxlib", "torch"),
    *("tensorboard", "matplotlib", "h5py", "prometheus-client", "rich", "ray", "cryptography"),
)
_GPUS = pathlib.Path("/proc/driver/nvidia/gpus")


def main(arguments: Sequence[str] | None = None) -> int:
    """Write one line with the version of each component; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="thinwire version",
        description="Show the versions of Thinwire and its packages.",
    )
    parser.parse_args(arguments)
    sys.stdout.write("".join(f"{name:24}{version}\n" for name, version in versions()))
    return 0


def versions() -> Iterator[tuple[str, str]]:
    """Yield (component, version) for each component, for example a package."""
    from thinwire.proto.messages import PROTOCOL_VERSION

    where = "checkout" if program.CHECKOUT else "package"
    yield "thinwire", f"{__version__} ({where} in {program.CHECKOUT or program.PACKAGE})"
    yield "wire protocol", str(PROTOCOL_VERSION)
    yield "python", f"{platform.python_version()} ({sys.executable})"
    yield "platform", platform.platform()
    yield "processors", f"{len(os.sched_getaffinity(0))} of {os.cpu_count()}"
    yield "NVIDIA GPUs", ", ".join(_gpus()) or "none"
    yield "tensorflow", _tensorflow()
    yield "keras backend", os.environ.get("KERAS_BACKEND", "as Keras is configured")
    for name in _PACKAGES:
        yield name, version_of(name) or "not installed"


def version_of(name: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _tensorflow() -> str:
    """Return a text with TensorFlow's version, its package, and whether it was built with CUDA."""
    packages = [f"{version} ({name})" for name in _TENSORFLOW if (version := version_of(name))]
    spec = importlib.util.find_spec("tensorflow")
    if spec is None:
        return "not installed"
    build = _build(pathlib.Path(spec.origin or "").parent / "python/platform/build_info.py")
    return ", ".join([*packages, *build]) or "unknown version"


def _build(path: pathlib.Path) -> list[str]:
    """Return the CUDA entry of TensorFlow's build_info.py as a list; empty without the entry."""
    if not path.is_file():
        return []
    values = dict(re.findall(r"'(is_cuda_build|cuda_version)', '?([\w.]+)", path.read_text()))
    if values.get("is_cuda_build") == "True":
        return [f"built with CUDA {values.get('cuda_version', '')}".rstrip()]
    return ["built without CUDA"] if values else []


def _gpus() -> Iterator[str]:
    """Yield the model names of the GPUs that the NVIDIA driver lists."""
    for path in sorted(_GPUS.glob("*/information")):
        for line in path.read_text().splitlines():
            if line.startswith("Model:"):
                yield line.removeprefix("Model:").strip()
