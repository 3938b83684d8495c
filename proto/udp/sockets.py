"""UDP sockets for a worker's datagrams, with socket options that need no privileges.

Some options of UDP sockets exist only on Linux. On systems other than Linux, datagrams are sent one
by one, without a priority in the local queue, and IP may fragment the datagrams.

The function `tos` returns the class of service that a channel's packets request from the network,
and `queue_priority` returns their priority in the local queue. Channel 0 is the reliable gRPC
stream, and channel 1 is the most important UDP datagram channel.
"""

from __future__ import annotations

import math
import socket
import struct
import sys
from collections.abc import Sequence
from typing import Any

from absl import logging

from thinwire.ops.types import ConfigurationError

SCHEMES = ("cs", "compact", "off")
_MOST_CHANNELS = 7
_CLASS = 32  # difference in the TOS byte between two adjacent classes of service of CS0..CS7
# Highest class of service of the scheme `compact`, as networks reserve CS6 and CS7 and may change
# such marks.
_COMPACT_TOP = 5
_NUM_QUEUE_PRIORITIES = 3


def tos(scheme: str, channel: int, channels: int) -> int | None:
    """Return the TOS byte (IPv6: traffic class) of a channel's packets.

    With the scheme ``cs``, the gRPC stream gets class CS ``channels``, and UDP channel i gets CS
    ``channels - i``, so that the last channel is best effort (CS0).

    With the scheme ``compact``, the gRPC stream gets CS5, and UDP channel i gets
    CS ``max(0, 5 - ceil(5 i / channels))``. The scheme ``compact`` avoids the classes of network
    control.

    With the scheme ``off``, `tos` returns None, and packets are not marked.

    Args:
        scheme: Scheme that marks packets with classes of service, one of `SCHEMES`.
        channel: Number of the datagram channel; 0 for the reliable stream.
        channels: Number of datagram channels, 0..7.

    Raises:
        ValueError: The scheme, channel or number of channels is out of range.

    Source: the marking rules of the DGT authors' code (``cs``).

    >>> [tos("cs", channel, 3) for channel in range(4)]
    [96, 64, 32, 0]
    >>> [tos("compact", channel, 3) for channel in range(4)]
    [160, 96, 32, 0]
    """
    if scheme not in SCHEMES:
        raise ValueError(f"the DSCP scheme {scheme!r} is none of {', '.join(SCHEMES)}")
    if not 0 <= channel <= channels <= _MOST_CHANNELS:
        raise ValueError(f"channel {channel} of {channels}; expected 0 <= channel <= channels <= 7")
    if scheme == "off":
        return None
    if scheme == "cs":
        return _CLASS * (channels - channel)
    if channel == 0:
        return _CLASS * _COMPACT_TOP
    return _CLASS * max(0, _COMPACT_TOP - math.ceil(_COMPACT_TOP * channel / channels))


def stream_dscp(scheme: str, channels: int) -> int | None:
    """Return the reliable stream's DSCP for gRPC, 0..63, or None for no marking.

    >>> stream_dscp("cs", 7), stream_dscp("off", 7)
    (56, None)
    """
    byte = tos(scheme, 0, channels)
    return None if byte is None else byte >> 2


def queue_priority(channel: int, channels: int) -> int:
    """Return the Linux priority of a datagram channel in the local queue: 3, 2 or 1.

    Linux maps every class of service to priority 0, so classes of service alone reorder nothing on
    the sending host. The default queues of Linux (pfifo_fast, prio) send priority 0, which the
    reliable stream has, before priorities 1, 2 and 3. Only queues of Linux that sort packets by
    priority number distinguish the priorities 1, 2 and 3. A process needs no privileges to set the
    queue priorities 1, 2 and 3.
    """
    return _NUM_QUEUE_PRIORITIES - _NUM_QUEUE_PRIORITIES * (channel - 1) // channels


ON_LINUX = sys.platform.startswith("linux")

# Constants of Linux's headers that Python's socket module does not define in every version.
SOL_UDP = 17
UDP_SEGMENT = 103
UDP_GRO = 104
_IP_MTU_DISCOVER, _IP_MTU = 10, 14
_IPV6_MTU_DISCOVER, _IPV6_MTU = 23, 24
_PMTUDISC_DO = 2
_SO_MEMINFO = 55
_MEMINFO_FORMAT = "9I"
_MEMINFO_DROPS = 8  # index of the number of dropped packets in Linux's SO_MEMINFO array

_RECEIVE_BUFFER_BYTES = 64 << 20
_UDP_HEADER_BYTES = 8
_IP_HEADER_BYTES = {socket.AF_INET: 20, socket.AF_INET6: 40}


def overhead_bytes(family: int) -> int:
    """Return the size of a datagram's IP and UDP headers, in bytes."""
    return _UDP_HEADER_BYTES + _IP_HEADER_BYTES[socket.AddressFamily(family)]


def _resolve(host: str, port: int, flags: int = 0) -> tuple[socket.AddressFamily, Any]:
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM, flags=flags)
    except socket.gaierror as error:
        raise ConfigurationError(
            f"the host {host!r} has no known address ({error.strerror}); correct --ip_PS"
        ) from error
    family, _, _, _, address = addresses[0]
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
        ConfigurationError: The address is unknown, or this machine does not have the address.
    """
    family, name = _resolve(address, 0, socket.AI_PASSIVE)
    sockets: list[socket.socket] = []
    try:
        for _ in range(count):
            udp_socket = socket.socket(family, socket.SOCK_DGRAM)
            sockets.append(udp_socket)
            # A socket at "::" also accepts IPv4, as gRPC's sockets do.
            if family == socket.AF_INET6:
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
            "opened %d datagram sockets at %s; receive buffers: %.1f MiB each, %d requested%s",
            count,
            address,
            granted / 2**20,
            _RECEIVE_BUFFER_BYTES >> 20,
            " (net.core.rmem_max is the limit)" if granted < _RECEIVE_BUFFER_BYTES else "",
        )
    return sockets


def join_received(udp_socket: socket.socket) -> bool:
    """Let the kernel join received datagrams of one size into one buffer; return False if it
    cannot.
    """
    return ON_LINUX and _allows(udp_socket, SOL_UDP, UDP_GRO, 1)


def splits_sent(udp_socket: socket.socket) -> bool:
    """Return True if the kernel can split one large buffer into datagrams."""
    return ON_LINUX and _allows(udp_socket, SOL_UDP, UDP_SEGMENT, 0)


def num_dropped(udp_socket: socket.socket) -> int | None:
    """Return the number of packets that a socket's full buffer or filter dropped; None if
    unknown.
    """
    if not ON_LINUX:
        return None
    try:
        size = struct.calcsize(_MEMINFO_FORMAT)
        data = udp_socket.getsockopt(socket.SOL_SOCKET, _SO_MEMINFO, size)
        return int(struct.unpack(_MEMINFO_FORMAT, data)[_MEMINFO_DROPS])
    except (OSError, struct.error):
        return None


def connect(host: str, ports: Sequence[int], scheme: str) -> list[socket.socket]:
    """Return a connected non-blocking UDP socket for each channel, with class of service set and
    without fragmentation.

    A UDP socket option that the system rejects is not an error: one warning lists all rejected
    options.

    Args:
        host: Host name or address of the shard.
        ports: UDP port of each channel, channel 1 first.
        scheme: Scheme that marks packets with classes of service, one of `SCHEMES`.

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
            "check that the host is reachable, or set --dgt_transport=grpc"
        ) from error
    if refused:
        logging.warning(
            "this system rejects the socket options %s; sending datagrams without them",
            ", ".join(sorted(refused)),
        )
    return sockets


def _mark(udp_socket: socket.socket, scheme: str, channel: int, channels: int) -> set[str]:
    """Set the socket options of one datagram channel; return the names of rejected options."""
    is_ipv6 = udp_socket.family == socket.AF_INET6
    level = socket.IPPROTO_IPV6 if is_ipv6 else socket.IPPROTO_IP
    options = []
    byte = tos(scheme, channel, channels)
    if byte is not None:
        name = "IPV6_TCLASS" if is_ipv6 else "IP_TOS"
        options.append((name, level, socket.IPV6_TCLASS if is_ipv6 else socket.IP_TOS, byte))
        if ON_LINUX:  # set the priority after the class of service, which also sets the priority
            priority = queue_priority(channel, channels)
            options.append(("SO_PRIORITY", socket.SOL_SOCKET, socket.SO_PRIORITY, priority))
    if ON_LINUX:
        name = "IPV6_MTU_DISCOVER" if is_ipv6 else "IP_MTU_DISCOVER"
        discover = _IPV6_MTU_DISCOVER if is_ipv6 else _IP_MTU_DISCOVER
        options.append((name, level, discover, _PMTUDISC_DO))
    return {name for name, *option in options if not _allows(udp_socket, *option)}


def path_limit(udp_socket: socket.socket) -> int | None:
    """Return the size in bytes of the largest datagram that the route carries unfragmented; None if
    unknown.

    The kernel knows the route's size limit for a connected socket, so no test datagram is sent.
    """
    if not ON_LINUX:
        return None
    is_ipv6 = udp_socket.family == socket.AF_INET6
    level, option = (socket.IPPROTO_IPV6, _IPV6_MTU) if is_ipv6 else (socket.IPPROTO_IP, _IP_MTU)
    try:
        return udp_socket.getsockopt(level, option) - overhead_bytes(udp_socket.family)
    except OSError:
        return None
