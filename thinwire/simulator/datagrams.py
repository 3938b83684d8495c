"""Simulated datagrams: the sender of a worker and the port of a PS shard, without sockets.

`SimulatedTransport` holds the uplink that the streams and datagrams of one simulated worker share,
as `thinwire.worker.client.datagrams.WorkerTransport` does in a real worker.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from thinwire.ops.routing.base import Router, Transport
from thinwire.ops.routing.packetizer import SealedBatch
from thinwire.ops.types import Link
from thinwire.proto.emulation.priority_link import HEADER_BYTES, PacketArrival
from thinwire.proto.emulation.uplink import class_of_channel
from thinwire.proto.token_bucket import TokenBucket
from thinwire.proto.udp.sender import (
    MAX_SEND_BYTES,
    ChannelCounts,
    DatagramSender,
    Outbox,
    SendBurst,
    UdpSettings,
    pacing,
)
from thinwire.simulator.clock import Clock
from thinwire.simulator.links import ClassPipe, Endpoint, Pipe, carry, uplink_of
from thinwire.worker.client.datagrams import DatagramChannel, open_channel

#: Function (bytes, size of one datagram, channel) that receives datagrams which arrive together.
Deliver = Callable[[memoryview, int, int], None]
#: Duration, at the paced rate, of the datagrams that are sent together, in seconds.
_PIECE_SECONDS = 1e-3
_SHORTEST_WAIT_SECONDS = 5e-5


class SimulatedSender:
    """A simulated worker's sender of datagrams (`DatagramSender`), on a virtual clock.

    `SimulatedSender` corresponds to a `UdpSender` over an emulated link. `SimulatedSender` has the
    queues per channel and the pacing of a `UdpSender`, but no thread.

    Args:
        clock: Virtual clock of the simulation.
        pipe: Simulated uplink of the worker.
        sending: Settings of the datagram sender: signing key, sizes of datagrams, DSCP scheme.
        channels: Number of datagram channels.
        deliver: Function that is called with the datagrams that have passed the uplink.
        bucket: Token bucket that limits the rate of all senders of the worker. None: datagrams are
            sent as fast as the link accepts them.
    """

    failure: Exception | None = None  # always None, because no sending thread could fail

    def __init__(
        self,
        clock: Clock,
        pipe: ClassPipe,
        sending: UdpSettings,
        channels: int,
        deliver: Deliver,
        bucket: TokenBucket | None = None,
    ) -> None:
        self._clock, self._pipe, self._sending = clock, pipe, sending
        self._deliver, self._bucket = deliver, bucket
        self._outbox = Outbox(channels, sending.max_late)
        self._classes = [
            class_of_channel(sending.scheme, channel, channels) for channel in range(channels + 1)
        ]
        self._piece_bytes = MAX_SEND_BYTES if bucket is None else int(bucket.rate * _PIECE_SECONDS)
        self._waits = self._closed = False
        pipe.on_space.append(self._run)

    @property
    def mtu(self) -> int:
        """Size of the largest datagram that the network path carries, in bytes."""
        return self._sending.mtu

    def send(self, batches: Sequence[SealedBatch], step: int) -> None:
        """Queue datagrams of one training step; send as many datagrams as pacing and link allow."""
        if not self._closed:
            self._outbox.put(batches, step)
            self._run()

    def counts(self) -> tuple[ChannelCounts, ...]:
        """Return a copy of the channels' counters of datagrams, channel 1 first."""
        return tuple(dataclasses.replace(counts) for counts in self._outbox.counts)

    def close(self) -> None:
        """Drop all datagrams that are queued or on the simulated link; may be called twice."""
        self._closed = True
        self._outbox.clear()
        if self._run in self._pipe.on_space:
            self._pipe.on_space.remove(self._run)

    def _run(self) -> None:
        """Send as many queued datagrams as the pacing rate and the simulated link allow now."""
        while self._outbox and not self._waits:
            wait = self._bucket.wait_seconds(self._clock.now) if self._bucket else 0.0
            if wait > 0:
                self._waits = True
                when = self._clock.now + max(wait, _SHORTEST_WAIT_SECONDS)
                self._clock.at(when, self._resume)
                return
            piece = self._outbox.take(self._piece_bytes)
            if piece is None:
                return
            if not self._pipe.has_space(self._classes[piece.waiting.batch.channel]):
                self._outbox.put_back(piece, 0)
                return
            self._carry(piece)

    def _resume(self) -> None:
        self._waits = False
        self._run()

    def _carry(self, piece: SendBurst) -> None:
        waiting = piece.waiting
        batch = waiting.batch
        if not waiting.signed:
            batch.sign(self._sending.key)
            waiting.signed = True
        num_bytes = piece.count * (batch.size + HEADER_BYTES)
        counts = self._outbox.counts[batch.channel - 1]
        counts.datagrams += piece.count
        counts.bytes_on_wire += num_bytes
        if self._bucket is not None:
            self._bucket.take(self._clock.now, num_bytes)
        # Copy the bytes, because the owner may reuse a batch's buffer once the batch has been sent,
        # but the datagrams are delivered later.
        arrived = functools.partial(self._arrived, bytes(piece.data), batch.size, batch.channel)
        self._pipe.offer_datagrams(self._classes[batch.channel], batch.size, piece.count, arrived)

    def _arrived(self, data: bytes, size: int, channel: int, arrival: PacketArrival) -> None:
        if self._closed or arrival.indices is None:
            return
        parts = [data[at : at + size] for at in (size * arrival.indices).tolist()]
        self._deliver(memoryview(b"".join(parts)), size, channel)


class SimulatedTransport:
    """The simulated uplink that a worker's streams and datagrams share.

    Attributes:
        uplink: Simulated uplink of the worker.

    Args:
        clock: Virtual clock of the simulation.
        link: Rate, delay and loss of the worker's simulated link.
        seed: Seed of the random losses on the simulated link.
        router: Policy that chooses which entries of a push are sent in datagrams.
        transport: Settings of the datagrams, for example their size and pacing.
    """

    def __init__(
        self, clock: Clock, link: Link, seed: int, router: Router, transport: Transport
    ) -> None:
        self._clock, self._router, self._transport = clock, router, transport
        self._bucket = pacing(transport.dgt_pace_mbps)
        priority = class_of_channel(transport.dgt_dscp, 0, router.channels)
        datagrams = router.channels > 0
        self.uplink: Pipe | ClassPipe = uplink_of(clock, link, seed, datagrams, priority)

    def open_channel(self, worker: int, shard: Endpoint) -> DatagramChannel | None:
        """Return a datagram channel to a PS shard; None if the run's router sends no datagrams."""
        connect = functools.partial(self._connect, shard)
        return open_channel(worker, self._router, self._transport, connect)

    def _connect(
        self, shard: Endpoint, host: str, ports: Sequence[int], key: bytes
    ) -> DatagramSender:
        if not isinstance(self.uplink, ClassPipe):
            raise TypeError("datagrams on a link without classes of service")
        transport = self._transport
        sending = UdpSettings(key, transport.dgt_mtu, self._router.max_late, transport.dgt_dscp)
        deliver = functools.partial(self._deliver, shard)
        return SimulatedSender(self._clock, self.uplink, sending, len(ports), deliver, self._bucket)

    def _deliver(self, shard: Endpoint, data: memoryview, size: int, channel: int) -> None:
        """Deliver datagrams to the PS shard, over the shard's own simulated link if it has one."""
        receive = functools.partial(shard.receive_datagrams, data, size)
        if not shard.has_own_link:
            receive()
            return
        count = len(data) // size
        num_bytes = len(data) + count * HEADER_BYTES
        carry(self._clock, (shard.uplink,), (num_bytes,), True, receive)
