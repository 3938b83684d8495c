"""Run one measurement in a separate process: TensorFlow's thread numbers are set only once."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]
_TIMEOUT_SECONDS = 600.0


def measure_apart(module: str, *arguments: str) -> Any:
    """Return what ``python -m module arguments`` prints as JSON in its last line.

    Raises:
        subprocess.SubprocessError: The process failed, or ran longer than `_TIMEOUT_SECONDS`.
    """
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"},
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_SECONDS,
        check=True,
    )
    return json.loads(done.stdout.splitlines()[-1])
