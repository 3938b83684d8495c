"""Creates senders of UDP datagrams: sockets to a shard's ports, datagram size, and rate limit."""

from __future__ import annotations

import dataclasses
import socket
from collections.abc import Callable, Sequence

from absl import logging

from thinwire.ops.types import ConfigurationError
from thinwire.proto.token_bucket import TokenBucket
from thinwire.proto.udp import sockets as udp_sockets
from thinwire.proto.udp.sender import SendingSocket, UdpSender, UdpSettings

#: Largest burst of a rate-limited datagram sender, in seconds at its rate. After a late wake-up,
#: the sender sends at most this burst faster than its rate.
_BURST_SECONDS = 4e-3

#: Function that wraps a channel's socket into a `SendingSocket`, which closes the socket.
Over = Callable[[socket.socket, int], SendingSocket]


def pacing(mbps: float) -> TokenBucket | None:
    """Return a token bucket (rate limiter) of a worker's senders for a rate in Mbit/s; None for
    0.
    """
    rate = mbps * 1e6 / 8
    return TokenBucket(rate, rate * _BURST_SECONDS) if mbps > 0 else None


def connect(
    host: str,
    ports: Sequence[int],
    sending: UdpSettings,
    bucket: TokenBucket | None = None,
    over: Over | None = None,
) -> UdpSender:
    """Return a sender of datagrams from a worker to a shard.

    If the route to the shard is known to carry only datagrams smaller than ``sending.mtu``, the
    datagram size is the route's limit, but at least half of ``sending.mtu``.

    Args:
        host: Host name or address of the shard.
        ports: UDP port of each channel, channel 1 first.
        sending: Signing key, datagram size and options of the sender.
        bucket: Token bucket that limits the rate of the datagrams; None for no limit.
        over: Function that puts an emulated link before each socket; None for no emulated link.

    Raises:
        ConfigurationError: The host cannot be reached, or half of ``sending.mtu`` is still too
            large for the route.
    """
    sockets = udp_sockets.connect(host, ports, sending.scheme)
    limit = udp_sockets.path_limit(sockets[0]) if sockets else None
    mtu = sending.mtu if limit is None else min(sending.mtu, limit)
    if mtu < sending.mtu // 2:
        for udp_socket in sockets:
            udp_socket.close()
        raise ConfigurationError(
            f"the route to {host} carries datagrams of {mtu} bytes, less than half of "
            f"--dgt_mtu={sending.mtu}; set --dgt_mtu={mtu} or less"
        )
    if mtu < sending.mtu:
        logging.info(
            "--dgt_mtu=%d is too large for the route to %s: sending datagrams of %d bytes",
            sending.mtu,
            host,
            mtu,
        )
    family = sockets[0].family if sockets else socket.AF_INET
    sending = dataclasses.replace(
        sending,
        mtu=mtu,
        segmentation=sending.segmentation and all(map(udp_sockets.splits_sent, sockets)),
        overhead_bytes=udp_sockets.overhead_bytes(family),
    )
    senders = sockets if over is None else [over(sock, i) for i, sock in enumerate(sockets, 1)]
    return UdpSender(senders, sending, bucket)
