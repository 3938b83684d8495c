"""TensorFlow's AutoGraph compiles code that it generates; here it does so without files.

TensorFlow writes each piece to the folder of temporary files, imports it from there, and removes
the files when the interpreter ends. A process that is killed leaves them all, and Python's compiled
copies of them stay even after a good end.
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
    """Replace AutoGraph's loader of source code; to be called once TensorFlow is imported.

    Another version of TensorFlow may have no such function; it then writes its files as ever.
    """
    try:
        loader = importlib.import_module(_LOADER)
    except ImportError:
        return
    if hasattr(loader, "load_source"):
        loader.load_source = _load_source  # type: ignore[attr-defined]


def _load_source(source: str, delete_on_exit: bool) -> tuple[types.ModuleType, str]:
    """Return a module of this source, and the name of the file that its frames show."""
    del delete_on_exit
    name = f"__autograph_generated_code{next(_NUMBERS)}"
    path = f"<{name}>"
    module = types.ModuleType(name)
    module.__file__ = path
    # Tracebacks and `inspect` find the lines here: an entry without a time is never looked up.
    linecache.cache[path] = (len(source), None, source.splitlines(keepends=True), path)
    exec(compile(source, path, "exec"), module.__dict__)
    sys.modules[name] = module
    return module, path
