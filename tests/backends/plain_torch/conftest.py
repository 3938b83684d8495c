"""Tests of plain torch scripts, which `make backends` runs where torch is installed."""

import os
from pathlib import Path

#: Names of files in this folder that pytest does not import.
collect_ignore = (
    []
    if os.environ.get("KERAS_BACKEND") == "torch"
    else [path.name for path in Path(__file__).parent.glob("test_*.py")]
)
