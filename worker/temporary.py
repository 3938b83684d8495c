"""Records the temporary files and folders that this process has made.

The names of temporary files are random, so no other worker's script can refer to these files.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import sys
from typing import Any

_EVENTS = ("tempfile.mkdtemp", "tempfile.mkstemp")
# recorded temporary paths in the order of creation, without symbolic links
_MADE: dict[str, None] = {}


@functools.cache
def record_temporary() -> None:
    """Start recording new temporary files and folders; later calls do nothing."""
    sys.addaudithook(_note)


def is_temporary(path: str) -> bool:
    """Return True if a path is a recorded temporary file or folder, or inside such a folder."""
    whole = os.path.realpath(path)
    while whole not in _MADE:
        whole, before = os.path.dirname(whole), whole
        if whole == before:
            return False
    return True


def remove_temporary() -> None:
    """Remove the temporary files and folders that still exist, at the end of a script."""
    for path in _MADE:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                os.unlink(path)


def _note(event: str, arguments: tuple[Any, ...], events: tuple[str, ...] = _EVENTS) -> None:
    # The variable `events` is a default argument, because Python still calls audit hooks while the
    # interpreter shuts down, after it has cleared the globals of modules.
    if event in events:
        _MADE[os.path.realpath(os.fsdecode(arguments[0]))] = None
