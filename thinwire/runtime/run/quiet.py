"""Environment variables and stderr of a process, set so that libraries print little."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator

from thinwire.runtime.run.autograph import keep_generated_code_in_memory


def configure_libraries(tensorflow_log_level: int) -> None:
    """Set variables that TensorFlow and gRPC read once, at import; variables already set stay.

    Args:
        tensorflow_log_level: Log level of TensorFlow's native code: 2 logs errors, 3 nothing.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", str(tensorflow_log_level))
    # Another process may share the GPU, so TensorFlow must not reserve all of its memory.
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    # By default gRPC logs every failed handshake, so any client could fill the disk.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Drop all stderr output of the process within the block, including native code's output."""
    sys.stderr.flush()
    stderr_copy = os.dup(2)
    with open(os.devnull, "w") as null:
        os.dup2(null.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(stderr_copy, 2)
        os.close(stderr_copy)


def import_quietly(module: str) -> None:
    """Import a module without its stderr output; keep AutoGraph's generated code in memory."""
    with quiet_stderr():
        importlib.import_module(module)
        if "tensorflow" in sys.modules:
            keep_generated_code_in_memory()
