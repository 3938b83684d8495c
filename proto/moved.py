"""Present addresses of shards that were restarted on another machine.

A node knows shards by the addresses in its command line. Before every attempt to connect, a client
resolves host names again and looks up the shard's present address in the module `moved`. There are
two sources of a moved shard's present address.

An engine that moves shards writes a file for its nodes. The engine's file has one line for each
moved shard: the original address, a blank, the present address.

Shard 0 knows where all other shards listen, because each shard announces its address and its number
of restarts. A client that cannot reach a shard requests the shard's address from shard 0 and stores
the answer in the module `moved`.
"""

from __future__ import annotations

import os
import pathlib
import threading
from collections.abc import Mapping

#: Environment variable with the path of the engine's file of moved shards.
MOVED_VARIABLE = "THINWIRE_PS_MOVED"

#: Addresses that shard 0 has sent: original address of a shard -> present address.
_announced: dict[str, str] = {}


def present_address(address: str) -> str:
    """Return the present address of a shard; the original address if no newer address is known.

    Args:
        address: Original address of the shard, ``host:port``.
    """
    return _of_engine().get(address) or _announced.get(address, address)


def note_announced(address: str, tried: str, present: str) -> None:
    """Store a shard's address that shard 0 has sent after a failed attempt to connect.

    If the failed attempt to connect used the address from shard 0, the next attempt uses the
    shard's original address, because the host name that a shard announces may be unknown on other
    machines.

    Args:
        address: Original address of the shard, ``host:port``.
        tried: Address of the failed attempt to connect. Because `tried` is compared with the stored
            address, several clients of one process with the same failure store the same result.
        present: Address of the shard that shard 0 has sent.
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
    except OSError:  # The file of moved shards does not exist, because no shard has moved yet.
        return {}
    return dict(line.split(" ", 1) for line in lines if " " in line)


def moved_lines(moved: Mapping[str, str]) -> str:
    """Return the content of the file in which an engine (program that starts nodes) lists moved
    shards.

    Args:
        moved: Original address -> present address of each moved shard.
    """
    return "".join(f"{former} {present}\n" for former, present in moved.items())


class ShardDirectory:
    """Addresses that the shards with ids from 1 on have announced to shard 0. Thread-safe.

    Args:
        num_shards: Number of parameter server shards of the run.
    """

    def __init__(self, num_shards: int) -> None:
        # Address and generation (number of restarts) of each shard from id 1 on.
        self._found = [("", 0)] * (num_shards - 1)
        self._lock = threading.Lock()

    @property
    def addresses(self) -> list[str]:
        """Address ``host:port`` of each shard from id 1 on; empty for a shard that has announced
        none.
        """
        return [address for address, _ in self._found]

    def announce(self, shard: int, generation: int, address: str) -> str | None:
        """Store the address that a shard announces to shard 0.

        Args:
            shard: Index of the shard, from 1.
            generation: Number of restarts of the shard.
            address: Address ``host:port`` of the shard; empty if the shard announces no address.

        Returns:
            Text of the refusal if a later generation of the shard listens at another address; None
            if the address was stored.
        """
        with self._lock:
            known, newest = self._found[shard - 1]
            if known and address != known and generation < newest:
                return (
                    f"generation: PS {shard} was restarted at {known} as generation {newest}, but "
                    f"this process, at {address or 'no known address'}, is generation {generation} "
                    "of the same PS; end one of the two processes."
                )
            self._found[shard - 1] = (address, generation)
            return None
