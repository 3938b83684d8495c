"""Functions that keep TensorFlow and gRPC from printing to stderr."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator

from thinwire.runtime.run.autograph import keep_generated_code_in_memory


def configure_libraries(tensorflow_log_level: int) -> None:
    """Set environment variables that TensorFlow and gRPC read at import, unless they are set.

    Args:
        tensorflow_log_level: Log level of TensorFlow's native code: 2 logs errors, 3 logs nothing.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", str(tensorflow_log_level))
    # Several processes may share a GPU, so TensorFlow must not reserve all memory of the GPU.
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    # By default gRPC logs every failed handshake, so any client could fill the disk.
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Drop all stderr output of the process within the block, also of native code."""
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
    """Import a module without its stderr output; make AutoGraph keep generated code in memory."""
    with quiet_stderr():
        importlib.import_module(module)
        if "tensorflow" in sys.modules:
            keep_generated_code_in_memory()
