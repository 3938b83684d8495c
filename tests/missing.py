"""Lets a package be missing in processes that tests start, although it is installed."""

from __future__ import annotations

import pathlib

#: Python runs it at its start, and it has some packages missing.
_SITECUSTOMIZE = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in NAMES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Missing())
import importlib.util
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in NAMES else found(name, *rest)
"""


def without(folder: pathlib.Path, *names: str) -> dict[str, str]:
    """Return the environment variables by which a process lacks packages.

    Args:
        folder: An empty folder, which comes first on the process' module path.
        names: The packages.
    """
    text = _SITECUSTOMIZE.replace("NAMES", repr(names))
    (folder / "sitecustomize.py").write_text(text)
    return {"PYTHONPATH": str(folder)}
