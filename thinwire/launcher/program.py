"""The Python interpreter's arguments that start each kind of Thinwire process.

In a source checkout, nodes run `main.py` by its path. If Thinwire is installed from a wheel, which
has no `main.py`, nodes run ``-m thinwire`` with ``-P``, because the current folder may hold modules
of any name, even another `thinwire`. `thinwire/__main__.py` never runs by its path, because the
path would put `thinwire/` itself on the module path, and ``import ops`` would import a second copy
of `thinwire.ops`. `launcher/script.py` runs by its path with ``-P`` and finds the package itself,
because the module path belongs to the user's script.
"""

from __future__ import annotations

import pathlib
from typing import NamedTuple

#: Folder of the package thinwire.
PACKAGE = pathlib.Path(__file__).resolve().parents[1]
_FILES = [PACKAGE.parent / name for name in ("main.py", "pyproject.toml")]
#: Root folder of the source checkout; None if the package is installed from a wheel.
CHECKOUT = PACKAGE.parent if all(path.is_file() for path in _FILES) else None


class HostPrograms(NamedTuple):
    """Python's arguments that run the programs of Thinwire on a host."""

    node: tuple[str, ...]
    script: tuple[str, ...]  # runs a user's script as a worker
    watchdog: tuple[str, ...]


#: Python's arguments that run a node on this host, or on a host with the same files. They also run
#: the command `thinwire` on this host, because main.py accepts `run` and --type_node.
NODE = ("-P", "-m", "thinwire") if CHECKOUT is None else (str(CHECKOUT / "main.py"),)
#: Python's arguments that run a script as a worker on this host, or on a host with the same files.
SCRIPT = (
    ("-P", "-m", "thinwire.launcher.script")
    if CHECKOUT is None
    else ("-P", str(PACKAGE / "launcher" / "script.py"))
)
#: Python's arguments that run the watchdog on this host, as a bare file that needs no packages.
WATCHDOG = ("-I", str(PACKAGE / "launcher" / "watchdog.py"))
HERE = HostPrograms(NODE, SCRIPT, WATCHDOG)
#: Programs of a host that has the same packages, or the same checkout at the same path.
ELSEWHERE = HERE if CHECKOUT else HERE._replace(watchdog=("-P", "-m", "thinwire.launcher.watchdog"))
#: Programs of a copy of the package in the current folder.
COPIED = HostPrograms(
    ("-m", "thinwire"),
    ("-P", "thinwire/launcher/script.py"),
    ("-I", "thinwire/launcher/watchdog.py"),
)
