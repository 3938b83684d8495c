"""What a process does to its environment and standard streams, for libraries and at its end."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator


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


def open_missing_streams() -> None:
    """Open the null device in place of standard streams that the process was started without.

    The next file that the process opens would otherwise get the number of a standard stream, and
    output of other processes that inherit it.
    """
    with open(os.devnull, "r+b", buffering=0) as probe:
        if probe.fileno() > 2:
            return
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdin = sys.stdin or open(0)  # noqa: SIM115 - until the process ends
    sys.stdout = sys.stdout or open(1, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w")  # noqa: SIM115


def drop_unwritable_output() -> None:
    """Flush stdout and stderr, and drop what cannot be written, as at the end of a process.

    The interpreter flushes them, too, and where that fails it exits with code 120, and not with the
    code that the process has chosen.
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            with contextlib.suppress(OSError, ValueError), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), stream.fileno())


def import_quietly(module: str) -> None:
    """Import a module without what it writes to stderr."""
    with quiet_stderr():
        importlib.import_module(module)
