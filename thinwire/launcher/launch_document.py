"""``launch.json`` of a run directory: what `thinwire run` was given, so that it can be repeated."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import pathlib
import platform
from collections.abc import Sequence
from typing import Any

from thinwire.flags import launch
from thinwire.launcher.role import given_flags
from thinwire.ops.persistence.documents import write_json_atomically
from thinwire.ops.run.directory import LAUNCH_FILE
from thinwire.ops.run.settings import Run

#: Packages whose versions may change what a run computes.
_PACKAGES = ("keras", "numpy", "tensorflow", "tensorflow-cpu", "grpcio", "protobuf")
#: Flags that another run has of its own.
_NOT_REPEATED = ("type_node", "model_from", "run_dir", "overwrite", "flagfile")


def write(run: Run, script: Sequence[str]) -> None:
    """Write the document of a run."""
    run.run_dir.mkdir(parents=True, exist_ok=True)
    write_json_atomically(run.run_dir / LAUNCH_FILE, document(run, script))


def document(run: Run, script: Sequence[str]) -> dict[str, Any]:
    """Return the flags, the versions and the script of a run, as summary.json has them too."""
    path = pathlib.Path(script[0]).resolve()
    words = given_flags((*_NOT_REPEATED, *launch.SCRIPT_NAMES))
    return {
        "flags": [*words, f"--seed={run.seed}", f"--method={run.method.name}"],
        "versions": versions(),
        "script": {
            "path": str(path),
            "arguments": list(script[1:]),
            "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        },
    }


def versions() -> dict[str, str]:
    """Return package -> version, of those that are installed."""
    found = {
        "python": platform.python_version(),
        "thinwire": str(importlib.import_module("thinwire").__version__),
    }
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
