"""Where a shard that an engine has replaced on another machine is found.

Nodes know shards by the addresses that they were started with. An engine that moves one keeps a
file for them, a line for each former address: it, a blank, and the present one. Clients look there
before every attempt to connect.
"""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping

#: Environment variable that names the file.
MOVED_VARIABLE = "THINWIRE_PS_MOVED"


def present_address(address: str) -> str:
    """Return where the shard of an address is now: there, as long as no file knows better.

    Args:
        address: ``host:port``.
    """
    path = os.environ.get(MOVED_VARIABLE)
    if not path:
        return address
    try:
        lines = pathlib.Path(path).read_text().splitlines()
    except OSError:  # nothing has moved yet
        return address
    found = dict(line.split(" ", 1) for line in lines if " " in line)
    return found.get(address, address)


def moved_lines(moved: Mapping[str, str]) -> str:
    """Return the content of the file.

    Args:
        moved: Former address -> the present one.
    """
    return "".join(f"{former} {present}\n" for former, present in moved.items())
