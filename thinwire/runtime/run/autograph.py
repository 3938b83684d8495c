"""Replacement of AutoGraph's source loader, so that TensorFlow writes no temporary files.

TensorFlow's AutoGraph writes each piece of generated code to a temporary file, imports the file,
and removes the file when the interpreter ends. A killed process leaves AutoGraph's temporary files
behind. Python's compiled copies of AutoGraph's temporary files stay even after a normal exit.
"""

from __future__ import annotations

import importlib
import itertools
import linecache
import sys
import types

_LOADER = "tensorflow.python.autograph.pyct.loader"
_NUMBERS = itertools.count(1)


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
