"""Environment variables that choose the devices on which a process computes.

CUDA, JAX and TensorFlow read these variables when they start, so they must be set before a process
imports a Keras backend.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

#: Variables of a process that computes on the CPU. CUDA_VISIBLE_DEVICES hides NVIDIA's GPUs from
#: every backend. JAX also finds other accelerators, and logs an error if CUDA finds no GPU.
ON_CPU = {"CUDA_VISIBLE_DEVICES": "-1", "JAX_PLATFORMS": "cpu"}
#: Variables of a process that shares a GPU with other processes. By default, JAX reserves three
#: quarters of the GPU's memory at its start, and TensorFlow all of it.
ON_SHARED_GPU = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "TF_FORCE_GPU_ALLOW_GROWTH": "true"}
#: Variables of a process that shares a machine's cores with other processes. By default, threads of
#: OpenMP (PyTorch) that have no work keep their cores busy for milliseconds.
ON_SHARED_CORES = {"OMP_WAIT_POLICY": "PASSIVE"}


def device_variables(device: str) -> dict[str, str]:
    """Return the environment variables that a value of the flag --device stands for.

    Args:
        device: Value of --device: "auto", "cpu" or "gpu:N".

    >>> device_variables("gpu:1")
    {'CUDA_VISIBLE_DEVICES': '1'}
    """
    if device == "cpu":
        return dict(ON_CPU)
    return {} if device == "auto" else {"CUDA_VISIBLE_DEVICES": device.removeprefix("gpu:")}


def unless_set(variables: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that the user has not set."""
    return {name: value for name, value in variables.items() if name not in os.environ}
