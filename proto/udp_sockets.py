"""UDP sockets with the options that datagrams need; nothing here needs privileges.

What Linux alone knows is asked for there only; elsewhere datagrams travel one by one, unmarked in
the local queue, and IP may fragment them.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Sequence
from typing import Any

from absl import logging

from ops.types import ConfigurationError
from proto import udp_marking

ON_LINUX = sys.platform.startswith("linux")

# Numbers of Linux's headers that Python's socket module does not name in every version.
SOL_UDP = 17
UDP_SEGMENT = 103
UDP_GRO = 104
_IP_MTU_DISCOVER, _IP_MTU = 10, 14
_IPV6_MTU_DISCOVER, _IPV6_MTU = 23, 24
_PMTUDISC_DO = 2
_SO_MEMINFO = 55
_MEMINFO_FORMAT = "9I"
_MEMINFO_DROPS = 8  # the place of the number of dropped packets

_RECEIVE_BUFFER_BYTES = 64 << 20
_UDP_HEADER_BYTES = 8
_IP_HEADER_BYTES = {socket.AF_INET: 20, socket.AF_INET6: 40}


def overhead_bytes(family: int) -> int:
    """Return the bytes of the IP and UDP headers around a datagram."""
    return _UDP_HEADER_BYTES + _IP_HEADER_BYTES[socket.AddressFamily(family)]


def _resolve(host: str, port: int, flags: int = 0) -> tuple[socket.AddressFamily, Any]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM, flags=flags)
    except socket.gaierror as error:
        raise ConfigurationError(
            f"no address is known for {host!r} ({error.strerror}); is --ip_PS right?"
        ) from error
    family, _, _, _, address = found[0]
    return family, address


def _allows(udp_socket: socket.socket, level: int, option: int, value: int) -> bool:
    try:
        udp_socket.setsockopt(level, option, value)
    except OSError:
        return False
    return True


def bind(address: str, count: int) -> list[socket.socket]:
    """Return non-blocking sockets bound to free ports of an address.

    Raises:
        ConfigurationError: The address is unknown, or not of this machine.
    """
    family, name = _resolve(address, 0, socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for _ in range(count):
            udp_socket = socket.socket(family, socket.SOCK_DGRAM)
            sockets.append(udp_socket)
            if family == socket.AF_INET6:  # "::" takes IPv4 too, as gRPC does there
                _allows(udp_socket, socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            _allows(udp_socket, socket.SOL_SOCKET, socket.SO_RCVBUF, _RECEIVE_BUFFER_BYTES)
            udp_socket.setblocking(False)
            udp_socket.bind(name)
    except OSError as error:
        for udp_socket in sockets:
            udp_socket.close()
        raise ConfigurationError(
            f"cannot receive datagrams at {address}: {error.strerror}; "
            "choose an address of this machine with --ip_PS"
        ) from error
    if sockets:
        granted = sockets[0].getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF)
        logging.info(
            "%d datagram sockets at %s; receive buffer: %.1f MiB each granted, %d asked for%s",
            count,
            address,
            granted / 2**20,
            _RECEIVE_BUFFER_BYTES >> 20,
            " (net.core.rmem_max is the limit)" if granted < _RECEIVE_BUFFER_BYTES else "",
        )
    return sockets


def join_received(udp_socket: socket.socket) -> bool:
    """Ask the kernel to hand over runs of equal datagrams as one buffer; return if it will."""
    return ON_LINUX and _allows(udp_socket, SOL_UDP, UDP_GRO, 1)


def splits_sent(udp_socket: socket.socket) -> bool:
    """Whether the kernel cuts one large buffer into datagrams itself."""
    return ON_LINUX and _allows(udp_socket, SOL_UDP, UDP_SEGMENT, 0)


def num_dropped(udp_socket: socket.socket) -> int | None:
    """Return how many packets a full buffer or a filter kept out of a socket; None: unknown."""
    if not ON_LINUX:
        return None
    try:
        size = struct.calcsize(_MEMINFO_FORMAT)
        data = udp_socket.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, size)
        return int(struct.unpack(_MEMINFO_FORMAT, data)[_MEMINFO_DROPS])
    except (OSError, struct.error):
        return None


def connect(host: str, ports: Sequence[int], scheme: str) -> list[socket.socket]:
    """Return non-blocking sockets, one for each channel, connected, marked, never fragmented.

    An option that the system refuses is no error; all that were refused make one warning.

    Args:
        host: Of the shard.
        ports: Channel 1 first.
        scheme: See `udp_marking.tos`.

    Raises:
        ConfigurationError: The host is unknown or has no route.
    """
    sockets: list[socket.socket] = []
    refused: set[str] = set()
    try:
        for channel, port in enumerate(ports, 1):
            family, address = _resolve(host, port)
            udp_socket = socket.socket(family, socket.SOCK_DGRAM)
            sockets.append(udp_socket)
            udp_socket.setblocking(False)
            udp_socket.connect(address)
            refused |= _mark(udp_socket, scheme, channel, len(ports))
    except OSError as error:
        for udp_socket in sockets:
            udp_socket.close()
        raise ConfigurationError(
            f"no datagrams can be sent to {host}: {error.strerror}; "
            "is it reachable, or set --dgt_transport=grpc"
        ) from error
    if refused:
        logging.warning(
            "this system refuses %s for datagrams; they are sent without",
            ", ".join(sorted(refused)),
        )
    return sockets


def _mark(udp_socket: socket.socket, scheme: str, channel: int, channels: int) -> set[str]:
    """Set the options of one channel; return the names of those refused."""
    six = udp_socket.family == socket.AF_INET6
    level = socket.IPPROTO_IPV6 if six else socket.IPPROTO_IP
    options = []
    byte = udp_marking.tos(scheme, channel, channels)
    if byte is not None:
        name = "IPV6_TCLASS" if six else "IP_TOS"
        options.append((name, level, socket.IPV6_TCLASS if six else socket.IP_TOS, byte))
        if ON_LINUX:  # after the class, which sets the priority too
            priority = udp_marking.queue_priority(channel, channels)
            options.append(("SO_PRIORITY", socket.SOL_SOCKET, socket.SO_PRIORITY, priority))
    if ON_LINUX:
        name = "IPV6_MTU_DISCOVER" if six else "IP_MTU_DISCOVER"
        discover = _IPV6_MTU_DISCOVER if six else _IP_MTU_DISCOVER
        options.append((name, level, discover, _PMTUDISC_DO))
    return {name for name, *option in options if not _allows(udp_socket, *option)}


def path_limit(udp_socket: socket.socket) -> int | None:
    """Return the largest datagram that the route is known to carry whole; None: unknown.

    The kernel answers it for a connected socket, so nothing need be sent to find out.
    """
    if not ON_LINUX:
        return None
    six = udp_socket.family == socket.AF_INET6
    level, option = (socket.IPPROTO_IPV6, _IPV6_MTU) if six else (socket.IPPROTO_IP, _IP_MTU)
    try:
        return udp_socket.getsockopt(level, option) - overhead_bytes(udp_socket.family)
    except OSError:
        return None
