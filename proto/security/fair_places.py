"""A bounded number of places for clients that nothing is known of yet, shared fairly by address."""

from __future__ import annotations

import collections
import ipaddress
import urllib.parse
from typing import Generic, TypeVar

Holder = TypeVar("Holder")

_NETWORK_BITS = 64  # of an IPv6 address; whoever has one such network has all of its addresses


class FairPlaces(Generic[Holder]):
    """Who has a place, in the order in which they came; not thread-safe.

    A newcomer always gets a place. Where there is none, the one that came first of the address
    that has the most loses its own, of the newcomer's if several have as many: many places of few
    addresses cannot keep another address out, and of one address those stay that use their place
    soonest.
    """

    def __init__(self) -> None:
        self._places: dict[Holder, tuple[str, float]] = {}  # of which address, and since when

    def __len__(self) -> int:
        return len(self._places)

    def holders(self) -> list[Holder]:
        """Return everybody, the first first."""
        return list(self._places)

    def take(self, holder: Holder, address: str, now: float, most: int) -> list[Holder]:
        """Give a newcomer a place; return those that lose theirs.

        Args:
            holder: The newcomer.
            address: Of it; see `address_of`.
            now: In seconds.
            most: How many places there are.
        """
        self._places[holder] = address, now
        return self.shrink(most, address)

    def leave(self, holder: Holder) -> bool:
        """Free a place; return whether the holder still had one."""
        return self._places.pop(holder, None) is not None

    def shrink(self, most: int, newest: str = "") -> list[Holder]:
        """Take places away until so many are left; return who had them.

        Args:
            most: That are left.
            newest: The address of a newcomer.
        """
        counts = collections.Counter(address for address, _ in self._places.values())
        lost: list[Holder] = []
        while len(self._places) > most:
            address, count = counts.most_common(1)[0]
            address = newest if 1 < counts[newest] == count else address
            first = next(each for each, (its, _) in self._places.items() if its == address)
            counts[address] -= 1
            self.leave(first)
            lost.append(first)
        return lost

    def overdue(self, since: float) -> list[Holder]:
        """Take the place away from all that came at this time or before; return them."""
        late = [holder for holder, (_, came_at) in self._places.items() if came_at <= since]
        for holder in late:
            self.leave(holder)
        return late


def address_of(host: str) -> str:
    """Return what stands for all addresses that one client may have: of IPv6 its network."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((address, _NETWORK_BITS), strict=False))


def address_of_peer(peer: str) -> str:
    """Return `address_of` a client as gRPC names it: ipv4:10.0.0.3:4711, ipv6:%5B::1%5D:4711."""
    host = urllib.parse.unquote(peer).partition(":")[2].rpartition(":")[0]
    return address_of(host.strip("[]")) if host else peer
