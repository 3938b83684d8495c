"""How a process of Thinwire is started: what follows the interpreter on its command line.

From a checkout nodes run `main.py` by its path. Installed from a wheel there is none, and they run
``-m thinwire``, with ``-P``: the current folder may hold modules of any name, even another
`thinwire`. `thinwire/__main__.py` never runs by its path, which would put `thinwire/` itself on the
module path, and then ``import ops`` would find a second copy of `thinwire.ops`. What runs a
script does run by its path, but with ``-P``, and finds the package by itself: the module path is
the script's.
"""

from __future__ import annotations

import pathlib

#: The folder of the package, and that of the checkout; None: it is installed.
PACKAGE = pathlib.Path(__file__).resolve().parents[1]
_FILES = [PACKAGE.parent / name for name in ("main.py", "pyproject.toml")]
CHECKOUT = PACKAGE.parent if all(path.is_file() for path in _FILES) else None

_WATCHDOG = "thinwire.launcher.watchdog"

#: A node on this host, or on one with the same files.
NODE = ("-P", "-m", "thinwire") if CHECKOUT is None else (str(CHECKOUT / "main.py"),)
#: The command `thinwire`, likewise; of a checkout it knows `run`, and roles by --type_node.
RUN = NODE
#: What runs a script as a worker, likewise.
SCRIPT = (
    ("-P", "-m", "thinwire.launcher.script")
    if CHECKOUT is None
    else ("-P", str(PACKAGE / "launcher" / "script.py"))
)
#: The watchdog on this host: a file of its own, which needs no packages.
WATCHDOG = ("-I", str(PACKAGE / "launcher" / "watchdog.py"))
#: The watchdog on a host that has the same packages, or the same checkout at the same path.
REMOTE_WATCHDOG = ("-P", "-m", _WATCHDOG) if CHECKOUT is None else WATCHDOG
#: All in a folder that holds a copy of the package, and is the current one.
COPIED_NODE = ("-m", "thinwire")
COPIED_SCRIPT = ("-P", "thinwire/launcher/script.py")
COPIED_WATCHDOG = ("-I", f"{_WATCHDOG.replace('.', '/')}.py")
