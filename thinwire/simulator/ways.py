"""One worker's ways up on the virtual clock: `thinwire.worker.client.datagrams` without sockets
and threads.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

from thinwire.ops.routing.base import Transport
from thinwire.ops.types import BEST_EFFORT, Link
from thinwire.proto import udp
from thinwire.proto.emulation.priority_link import HEADER_BYTES
from thinwire.proto.emulation.uplink import class_of_channel
from thinwire.proto.udp import DatagramSender, UdpSettings
from thinwire.simulator.clock import Clock
from thinwire.simulator.datagrams import SimulatedSender
from thinwire.simulator.links import ClassPipe, Pipe, carry, way_up
from thinwire.simulator.shard import SimulatedShard
from thinwire.worker.client.datagrams import DatagramChannel, open_channel


class SimulatedTransport:
    """What a simulated worker's streams and datagrams share.

    Attributes:
        up: The way up.

    Args:
        clock: Virtual time.
        link: The worker's link.
        seed: Of what befalls on it.
        router: The policy.
        transport: How datagrams travel.
    """

    def __init__(
        self, clock: Clock, link: Link, seed: int, router: Any, transport: Transport
    ) -> None:
        self._clock, self._router, self._transport = clock, router, transport
        self._bucket = udp.pacing(transport.dgt_pace_mbps)
        priority = BEST_EFFORT
        if router.channels:
            priority = class_of_channel(transport.dgt_dscp, 0, router.channels)
        self.up: Pipe | ClassPipe = way_up(clock, link, seed, router.channels > 0, priority)

    def leg(self, worker: int, shard: SimulatedShard) -> DatagramChannel | None:
        """Return what goes to one shard in datagrams; None where the method sends none."""
        connect = functools.partial(self._connect, shard)
        return open_channel(worker, self._router, self._transport, connect)

    def _connect(
        self, shard: SimulatedShard, host: str, ports: Sequence[int], key: bytes
    ) -> DatagramSender:
        del host
        if not isinstance(self.up, ClassPipe):
            raise TypeError("datagrams on a link without classes of service")
        transport = self._transport
        sending = UdpSettings(key, transport.dgt_mtu, self._router.max_late, transport.dgt_dscp)
        deliver = functools.partial(self._deliver, shard)
        return SimulatedSender(self._clock, self.up, sending, len(ports), deliver, self._bucket)

    def _deliver(self, shard: SimulatedShard, data: memoryview, size: int, channel: int) -> None:
        """Let datagrams that have passed the worker's link pass the shard's own, if it has one."""
        del channel
        if shard.datagrams is None:
            return
        take = functools.partial(shard.datagrams.receptions.take, data, size)
        if not shard.has_own_link:
            take()
            return
        count = len(data) // size
        num_bytes = len(data) + count * HEADER_BYTES
        carry(self._clock, (shard.up,), (num_bytes,), True, take)
