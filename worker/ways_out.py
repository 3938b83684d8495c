"""One worker's ways to the shards: what paces its streams, and what carries its datagrams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ops.routing.transport import Transport
from ops.types import Link
from proto import channel_udp
from proto.channel_emulated import EmulatedSender, LinkModel
from proto.channel_priority import EmulatedUplink
from proto.channel_udp import DatagramSender, Sending
from worker.datagram_leg import DatagramLeg, leg_of


class WaysOut:
    """What all streams and datagrams of one worker share.

    Attributes:
        sender: Paces the streams, where a link is emulated.
        dscp: Class of service that the streams' packets ask for; None: as the system has it.

    Args:
        link: The worker's emulated link.
        seed: Of what befalls on it.
        transport: How datagrams travel.
        router: The policy.
    """

    def __init__(self, link: Link, seed: int, transport: Transport, router: Any) -> None:
        self._transport, self._router = transport, router
        self._scheme = transport.dgt_dscp
        self.dscp: int | None = None
        if router.channels:
            self.dscp = channel_udp.stream_dscp(self._scheme, router.channels)
        self.sender: EmulatedSender | None = None
        self._uplink: EmulatedUplink | None = None
        if link.active and (router.channels or link.background_mbps):
            self._uplink = EmulatedUplink(link, seed, self.dscp)
            self.sender = self._uplink.sender
        elif link.active:  # nothing overtakes: the simpler model
            self.sender = EmulatedSender(LinkModel(link, seed))
        self._bucket = channel_udp.pacing(transport.dgt_pace_mbps)

    def leg(self, worker: int) -> DatagramLeg | None:
        """Return what goes to one shard in datagrams; None where the method sends none."""
        return leg_of(worker, self._router, self._transport, self._connect)

    def close(self) -> None:
        """End; whoever waits for an emulated link goes on."""
        if self._uplink is not None:
            self._uplink.close()

    def _connect(self, host: str, ports: Sequence[int], key: bytes) -> DatagramSender:
        mtu, max_late = self._transport.dgt_mtu, self._router.max_late
        over: Callable[..., Any] | None = None
        if self._uplink is not None:
            over = self._uplink.over(self._scheme, self._router.channels)
        sending = Sending(key, mtu, max_late, self._scheme)
        return channel_udp.connect(host, ports, sending, self._bucket, over)
