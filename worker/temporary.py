"""Which temporary files and folders this process has made: no other worker's script knows them."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
from typing import Any

_EVENTS = ("tempfile.mkdtemp", "tempfile.mkstemp")
_MADE: list[str] = []


@functools.cache
def record_temporary() -> None:
    """Note every one from here on, once for the process."""
    sys.addaudithook(_note)


def is_temporary(path: str) -> bool:
    """Return whether a path is one of them, or lies in one."""
    whole = os.path.realpath(path)
    found = (os.path.realpath(each) for each in _MADE)
    return any(whole == each or whole.startswith(each + os.sep) for each in found)


def remove_temporary() -> None:
    """Remove those that are left, as a script does that ends by itself."""
    for path in _MADE:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _note(event: str, arguments: tuple[Any, ...], events: tuple[str, ...] = _EVENTS) -> None:
    # Bound early: a module's names are gone when the interpreter ends, and hooks are called yet.
    if event in events:
        _MADE.append(os.fsdecode(arguments[0]))
