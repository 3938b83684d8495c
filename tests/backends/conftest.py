"""Tests on Keras' backends JAX and torch: `make backends` runs them, once on each.

They need an interpreter that has the backend, which KERAS_BACKEND names. On TensorFlow, pytest
imports only the files below, which hold for every backend.
"""

import os
from pathlib import Path

ON_EVERY_BACKEND = {
    "test_flat_variables.py",
    "test_pass_numbers.py",
    "test_server_optimizers.py",
    "test_table.py",
    "test_without_tensorflow.py",
}

_HERE = Path(__file__).parent
#: Names of files in this folder that pytest does not import.
collect_ignore = (
    []
    if os.environ.get("KERAS_BACKEND") in ("jax", "torch")
    else [path.name for path in _HERE.glob("test_*.py") if path.name not in ON_EVERY_BACKEND]
)
