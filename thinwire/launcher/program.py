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

#: Folder of the package thinwire.
PACKAGE = pathlib.Path(__file__).resolve().parents[1]
_FILES = [PACKAGE.parent / name for name in ("main.py", "pyproject.toml")]
#: Root folder of the source checkout; None if the package is installed from a wheel.
CHECKOUT = PACKAGE.parent if all(path.is_file() for path in _FILES) else None

_WATCHDOG = "thinwire.launcher.watchdog"

#: Python's arguments that run a node on this host, or on a host with the same files.
NODE = ("-P", "-m", "thinwire") if CHECKOUT is None else (str(CHECKOUT / "main.py"),)
#: Python's arguments that run the command `thinwire` on this host. They equal `NODE`, because
#: main.py accepts `run` and --type_node.
RUN = NODE
#: Python's arguments that run a script as a worker on this host, or on a host with the same files.
SCRIPT = (
    ("-P", "-m", "thinwire.launcher.script")
    if CHECKOUT is None
    else ("-P", str(PACKAGE / "launcher" / "script.py"))
)
#: Python's arguments that run the watchdog on this host, as a bare file that needs no packages.
WATCHDOG = ("-I", str(PACKAGE / "launcher" / "watchdog.py"))
#: Python's arguments that run the watchdog on a host that has the same packages, or the same
#: checkout at the same path.
REMOTE_WATCHDOG = ("-P", "-m", _WATCHDOG) if CHECKOUT is None else WATCHDOG
#: Python's arguments that run a node (a script, the watchdog) from a copy of the package in the
#: current folder.
COPIED_NODE = ("-m", "thinwire")
COPIED_SCRIPT = ("-P", "thinwire/launcher/script.py")
COPIED_WATCHDOG = ("-I", f"{_WATCHDOG.replace('.', '/')}.py")
