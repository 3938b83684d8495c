"""Which temporary files and folders this process has made: no other worker's script knows them."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
from typing import Any

_EVENTS = ("tempfile.mkdtemp", "tempfile.mkstemp")
_MADE: dict[str, None] = {}  # in order, without symbolic links


@functools.cache
def record_temporary() -> None:
    """Note every one from here on, once for the process."""
    sys.addaudithook(_note)


def is_temporary(path: str) -> bool:
    """Return whether a path is one of them, or lies in one."""
    whole = os.path.realpath(path)
    while whole not in _MADE:
        whole, before = os.path.dirname(whole), whole
        if whole == before:
            return False
    return True


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
        _MADE[os.path.realpath(os.fsdecode(arguments[0]))] = None
