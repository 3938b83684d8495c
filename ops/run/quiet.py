"""Libraries that write to stderr while they are imported, before their log settings apply."""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Iterator


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
    """Import a module without what it writes to stderr."""
    with quiet_stderr():
        importlib.import_module(module)
