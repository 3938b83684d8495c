"""What a process does to its environment and standard streams, for libraries and at its end."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator

from thinwire.runtime.run.autograph import keep_generated_code_in_memory


def configure_libraries(tensorflow_log_level: int) -> None:
    """Set what TensorFlow and gRPC look for once, when they are imported; what is set stays.

    gRPC has a line for every handshake that fails, so whoever can connect could fill the disk.

    Args:
        tensorflow_log_level: Of its native code: 2 leaves errors, 3 nothing.
    """
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", str(tensorflow_log_level))
    os.environ.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")  # others may have the same GPU
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


@contextlib.contextmanager
def quiet_stderr() -> Iterator[None]:
    """Drop what the process writes to stderr within the block, native code included."""
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def import_quietly(module: str) -> None:
    """Import a module without what it writes to stderr; TensorFlow then writes no files either."""
    with quiet_stderr():
        importlib.import_module(module)
        if "tensorflow" in sys.modules:
            keep_generated_code_in_memory()
