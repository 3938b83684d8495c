"""Where a shard is found that has come back on another machine.

Nodes know shards by the addresses that they were started with. Clients resolve names anew, and look
here, before every attempt to connect. Two more may know better:

- An engine that moves shards keeps a file for its nodes, a line for each former address: it, a
  blank, and the present one.
- Shard 0 knows where the other shards listen: they announce it, with their generation. A client
  that reaches one of them no longer requests its address from shard 0, and notes it here.
"""

from __future__ import annotations

import os
import pathlib
import threading
from collections.abc import Mapping

#: Environment variable that names the file.
MOVED_VARIABLE = "THINWIRE_PS_MOVED"

#: What shard 0 has answered: address that a shard was known by -> the present one.
_announced: dict[str, str] = {}


def present_address(address: str) -> str:
    """Return where the shard of an address is now: there, as long as nobody knows better.

    Args:
        address: ``host:port``.
    """
    return _of_engine().get(address) or _announced.get(address, address)


def note_announced(address: str, tried: str, present: str) -> None:
    """Look for a shard where shard 0 knows it, after an attempt to reach it elsewhere has failed.

    If it was there that the attempt failed, the next one goes to the former address again: a name
    that a shard has for itself need not lead others there.

    Args:
        address: ``host:port`` that this process was started with.
        tried: Where the attempt went. Clients of one process that note the same at a time
            agree by it.
        present: By shard 0.
    """
    if tried == present:
        _announced.pop(address, None)
    else:
        _announced[address] = present


def _of_engine() -> dict[str, str]:
    path = os.environ.get(MOVED_VARIABLE)
    if not path:
        return {}
    try:
        lines = pathlib.Path(path).read_text().splitlines()
    except OSError:  # nothing has moved yet
        return {}
    return dict(line.split(" ", 1) for line in lines if " " in line)


def moved_lines(moved: Mapping[str, str]) -> str:
    """Return the content of the file.

    Args:
        moved: Former address -> the present one.
    """
    return "".join(f"{former} {present}\n" for former, present in moved.items())


class ShardDirectory:
    """Where the shards from 1 on listen, by their own word (any thread).

    Args:
        num_shards: Of the run.
    """

    def __init__(self, num_shards: int) -> None:
        self._found = [("", 0)] * (num_shards - 1)  # address and generation of each
        self._lock = threading.Lock()

    @property
    def addresses(self) -> list[str]:
        """``host:port`` of each shard from 1 on; empty: it has announced none."""
        return [address for address, _ in self._found]

    def announce(self, shard: int, generation: int, address: str) -> str | None:
        """Note where a shard listens.

        Args:
            shard: From 1.
            generation: How often it has been restarted.
            address: ``host:port``; empty: it announces none.

        Returns:
            Why it is refused: one of a later generation has come back elsewhere; None: it is not.
        """
        with self._lock:
            known, newest = self._found[shard - 1]
            if known and address != known and generation < newest:
                return (
                    f"generation: PS {shard} has come back at {known} as generation {newest}, and "
                    f"this one, at {address or 'no known address'}, is generation {generation}; "
                    "end the one that is not wanted."
                )
            self._found[shard - 1] = (address, generation)
            return None
