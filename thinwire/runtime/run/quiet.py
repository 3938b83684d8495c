"""Functions that keep TensorFlow and gRPC from printing to stderr, and from writing files.

TensorFlow's AutoGraph writes each piece of generated code to a temporary file, imports the file,
and removes the file when the interpreter ends. A killed process leaves AutoGraph's temporary files
behind. Python's compiled copies of AutoGraph's temporary files stay even after a normal exit.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import linecache
import os
import sys
import types
from collections.abc import Iterator

_LOADER = "tensorflow.python.autograph.pyct.loader"
_NUMBERS = itertools.count(1)


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


def keep_generated_code_in_memory() -> None:
    """Make AutoGraph load generated code from memory; TensorFlow must be imported before.

    If a TensorFlow version lacks the loader function, the call has no effect.
    """
    try:
        loader = importlib.import_module(_LOADER)
    except ImportError:
        return
    if hasattr(loader, "load_source"):
        loader.load_source = _load_source  # type: ignore[attr-defined]


def _load_source(source: str, delete_on_exit: bool) -> tuple[types.ModuleType, str]:
    """Return a module compiled from source text, and the file name for the module's tracebacks."""
    name = f"__autograph_generated_code{next(_NUMBERS)}"
    path = f"<{name}>"
    module = types.ModuleType(name)
    module.__file__ = path
    # Tracebacks and `inspect` read source lines from linecache. A cache entry without a
    # modification time is never checked against a file.
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    exec(compile(source, path, "exec"), module.__dict__)
    sys.modules[name] = module
    return module, path
