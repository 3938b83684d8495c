"""A limit on the number of unauthenticated clients, shared fairly between their addresses."""

from __future__ import annotations

import collections
import ipaddress
import urllib.parse
from typing import Generic, TypeVar

Holder = TypeVar("Holder")

#: Prefix length of an IPv6 network that counts as one address: a client with a /64 network can use
#: all addresses of the network.
_NETWORK_BITS = 64


class FairPlaces(Generic[Holder]):
    """A bounded set of clients, in order of their arrival; not thread-safe.

    A new client is always added to the bounded set of clients. If the set of clients is full, the
    oldest client of the address with the most clients is removed. If several addresses have the
    most clients in a full set, an old client with the new client's address is removed. In a bounded
    set of clients, a few addresses with many clients cannot lock out another address, and a client
    that stays in the set only briefly is seldom removed.
    """

    def __init__(self) -> None:
        # Client -> (address of the client, time of its arrival in seconds).
        self._places: dict[Holder, tuple[str, float]] = {}

    def __len__(self) -> int:
        return len(self._places)

    def holders(self) -> list[Holder]:
        """Return all clients in the bounded set, oldest first."""
        return list(self._places)

    def take(self, holder: Holder, address: str, now: float, most: int) -> list[Holder]:
        """Add a new client to the bounded set; return the clients that are removed for it.

        Args:
            holder: The new client, which is added to the bounded set.
            address: Address of the client, as `address_of` returns it.
            now: Current time of the caller's clock, in seconds.
            most: Maximum number of clients in the bounded set.
        """
        self._places[holder] = address, now
        return self.shrink(most, address)

    def leave(self, holder: Holder) -> bool:
        """Remove a client from the bounded set; return False if the set does not contain the
        client.
        """
        return self._places.pop(holder, None) is not None

    def shrink(self, most: int, newest: str = "") -> list[Holder]:
        """Remove clients until at most ``most`` clients are in the set; return the removed clients.

        Args:
            most: Maximum number of clients in the bounded set.
            newest: Address of a new client; among addresses with equally many clients, a client of
                the new client's address is removed.
        """
        counts = collections.Counter(address for address, _ in self._places.values())
        lost: list[Holder] = []
        while len(self._places) > most:
            address, count = counts.most_common(1)[0]
            address = newest if 1 < counts[newest] == count else address
            first = next(holder for holder, (its, _) in self._places.items() if its == address)
            counts[address] -= 1
            self.leave(first)
            lost.append(first)
        return lost

    def overdue(self, since: float) -> list[Holder]:
        """Remove and return all clients that were added at the time ``since`` or earlier."""
        late = [holder for holder, (_, came_at) in self._places.items() if came_at <= since]
        for holder in late:
            self.leave(holder)
        return late


def address_of(host: str) -> str:
    """Return the key that all addresses of one host share: the /64 network for IPv6, else the
    address.
    """
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
    """Return the result of `address_of` for a peer in gRPC's form, for example ipv4:10.0.0.3:4711
    or ipv6:%5B::1%5D:4711.
    """
    host = urllib.parse.unquote(peer).partition(":")[2].rpartition(":")[0]
    return address_of(host.strip("[]")) if host else peer
