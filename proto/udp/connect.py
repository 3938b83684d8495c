"""Makes senders: sockets to the ports of a shard, a datagram size that passes, a pace."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable, Sequence

from absl import logging

from thinwire.ops.types import ConfigurationError
from thinwire.proto.token_bucket import TokenBucket
from thinwire.proto.udp import sockets as udp_sockets
from thinwire.proto.udp.sender import SendingSocket, UdpSender, UdpSettings

#: A paced sender catches up so much after a late wake-up.
_BURST_SECONDS = 4e-3

#: Makes what to send over, of a socket and its channel; closing it closes the socket.
Over = Callable[[socket.socket, int], SendingSocket]


def pacing(mbps: float) -> TokenBucket | None:
    """Return the bucket for a rate on the wire in Mbit/s, for all senders of a worker; 0: None."""
    rate = mbps * 1e6 / 8
    return TokenBucket(rate, rate * _BURST_SECONDS) if mbps > 0 else None


def connect(
    host: str,
    ports: Sequence[int],
    sending: UdpSettings,
    bucket: TokenBucket | None = None,
    over: Over | None = None,
) -> UdpSender:
    """Return a sender to the ports of a shard, channel 1 first.

    Where the route is known to carry only smaller datagrams than ``sending.mtu``, they are as large
    as it carries, but no smaller than half of that.

    Args:
        host: Of the shard.
        ports: Channel 1 first.
        sending: Key, sizes, switches.
        bucket: Paces; None: as fast as the kernel takes them.
        over: Puts an emulated link before each socket.

    Raises:
        ConfigurationError: The host cannot be reached, or half the mtu is still too large for
            the route.
    """
    sockets = udp_sockets.connect(host, ports, sending.scheme)
    limit = udp_sockets.path_limit(sockets[0]) if sockets else None
    mtu = sending.mtu if limit is None else min(sending.mtu, limit)
    if mtu < sending.mtu // 2:
        for each in sockets:
            each.close()
        raise ConfigurationError(
            f"--dgt_mtu={sending.mtu} does not pass to {host}, nor does half of it: the route "
            f"carries {mtu} bytes; set --dgt_mtu={mtu} or less"
        )
    if mtu < sending.mtu:
        logging.info(
            "--dgt_mtu=%d does not pass to %s: datagrams have %d bytes", sending.mtu, host, mtu
        )
    family = sockets[0].family if sockets else socket.AF_INET
    sending = dataclasses.replace(
        sending,
        mtu=mtu,
        segmentation=sending.segmentation and all(map(udp_sockets.splits_sent, sockets)),
        overhead_bytes=udp_sockets.overhead_bytes(family),
    )
    ways = sockets if over is None else [over(each, at) for at, each in enumerate(sockets, 1)]
    return UdpSender(ways, sending, bucket)
