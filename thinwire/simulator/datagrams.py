"""Datagrams on the virtual clock: the worker's sender, the shard's port, without sockets.

`SimulatedTransport` holds what the streams and datagrams of one worker share, as
`thinwire.worker.client.datagrams.WorkerTransport` does for a real one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from thinwire.ops.routing.base import Router, Transport
from thinwire.ops.types import BEST_EFFORT, Link, ShardLayout
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto import udp
from thinwire.proto.emulation.priority_link import HEADER_BYTES, PacketArrival
from thinwire.proto.emulation.uplink import class_of_channel
from thinwire.proto.token_bucket import TokenBucket
from thinwire.proto.udp.sender import MAX_SEND_BYTES, Outbox, SendBurst, UdpSettings
from thinwire.proto.udp.types import ChannelCounts, DatagramBatch, DatagramSender
from thinwire.ps.datagrams.receiver import DatagramReceiver
from thinwire.ps.wire.push_decoder import NonFinite, PushDecoder
from thinwire.simulator.clock import Clock
from thinwire.simulator.links import ClassPipe, Endpoint, Pipe, carry, uplink_of
from thinwire.simulator.messages import Datagrams, Delivery, NonFinitePush, StreamPart
from thinwire.worker.client.datagrams import DatagramChannel, open_channel

#: Takes datagrams of one size that arrive together: the bytes, the size of each, the channel.
Deliver = Callable[[memoryview, int, int], None]
_PIECE_SECONDS = 1e-3  # of paced datagrams that leave together
_SHORTEST_WAIT_SECONDS = 5e-5


class SimulatedSender:
    """What `UdpSender` over an emulated link is to a real worker; see `DatagramSender`.

    The same queues by channel, pacing and link, without a thread.

    Args:
        clock: Virtual time.
        pipe: The worker's uplink.
        sending: Key, sizes, marks.
        channels: How many there are.
        deliver: Called with what comes through.
        bucket: Paces all senders of the worker; None: as fast as the link takes it.
    """

    failure: Exception | None = None  # there is no thread that could fail

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
        """Bytes of the largest datagram that passes."""
        return self._sending.mtu

    def send(self, batches: Sequence[DatagramBatch], step: int) -> None:
        """Queue batches of one step; see `DatagramSender.send`."""
        if not self._closed:
            self._outbox.put(batches, step)
            self._run()

    def flush(self, timeout_seconds: float) -> bool:
        """Return whether nothing is queued; virtual time cannot pass meanwhile."""
        del timeout_seconds
        return not self._outbox

    def counts(self) -> tuple[ChannelCounts, ...]:
        """Return a copy of the counters, channel 1 first."""
        return tuple(dataclasses.replace(counts) for counts in self._outbox.counts)

    def close(self) -> None:
        """Drop what is queued, and deliver nothing any more; may be called twice."""
        self._closed = True
        self._outbox.clear()
        if self._run in self._pipe.on_space:
            self._pipe.on_space.remove(self._run)

    def _run(self) -> None:
        """Send what pace and link allow now."""
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
        # Copied, because a batch's buffer may be used again once it has left.
        arrived = functools.partial(self._arrived, bytes(piece.data), batch.size, batch.channel)
        self._pipe.offer_datagrams(self._classes[batch.channel], batch.size, piece.count, arrived)

    def _arrived(self, data: bytes, size: int, channel: int, arrival: PacketArrival) -> None:
        if self._closed or arrival.indices is None:
            return
        parts = [data[at : at + size] for at in (size * arrival.indices).tolist()]
        self._deliver(memoryview(b"".join(parts)), size, channel)


class SimulatedTransport:
    """What a simulated worker's streams and datagrams share.

    Attributes:
        uplink: The worker's.

    Args:
        clock: Virtual time.
        link: The worker's link.
        seed: Of the losses on it.
        router: The policy.
        transport: How datagrams travel.
    """

    def __init__(
        self, clock: Clock, link: Link, seed: int, router: Router, transport: Transport
    ) -> None:
        self._clock, self._router, self._transport = clock, router, transport
        self._bucket = udp.pacing(transport.dgt_pace_mbps)
        priority = BEST_EFFORT
        if router.channels:
            priority = class_of_channel(transport.dgt_dscp, 0, router.channels)
        datagrams = router.channels > 0
        self.uplink: Pipe | ClassPipe = uplink_of(clock, link, seed, datagrams, priority)

    def open_channel(self, worker: int, shard: Endpoint) -> DatagramChannel | None:
        """Return a channel to one shard; None where the method sends no datagrams."""
        connect = functools.partial(self._connect, shard)
        return open_channel(worker, self._router, self._transport, connect)

    def _connect(
        self, shard: Endpoint, host: str, ports: Sequence[int], key: bytes
    ) -> DatagramSender:
        del host
        if not isinstance(self.uplink, ClassPipe):
            raise TypeError("datagrams on a link without classes of service")
        transport = self._transport
        sending = UdpSettings(key, transport.dgt_mtu, self._router.max_late, transport.dgt_dscp)
        deliver = functools.partial(self._deliver, shard)
        return SimulatedSender(self._clock, self.uplink, sending, len(ports), deliver, self._bucket)

    def _deliver(self, shard: Endpoint, data: memoryview, size: int, channel: int) -> None:
        """Let datagrams that have passed the worker's link pass the shard's own, if it has one."""
        del channel
        receive = functools.partial(shard.receive_datagrams, data, size)
        if not shard.has_own_link:
            receive()
            return
        count = len(data) // size
        num_bytes = len(data) + count * HEADER_BYTES
        carry(self._clock, (shard.uplink,), (num_bytes,), True, receive)


_ENTROPY = 71  # of session numbers and keys, which nobody attacks here


class PortOwner(Protocol):
    """The shard that a datagram port belongs to."""

    number: int
    life: int
    layout: ShardLayout

    @property
    def now(self) -> float:
        """The shard's own time."""

    def arrive(self, event: Delivery) -> None:
        """Take in what has passed the network."""

    def set_alarm(self) -> None:
        """Wake up when something is due."""

    def live_workers(self) -> Iterable[int]:
        """Return the workers whose sessions go on."""


class SimulatedDatagramPort:
    """What `thinwire.ps.datagrams.port.DatagramPort` is to a real shard, without sockets.

    Attributes:
        receiver: The workers' sessions with the shard's present life.

    Args:
        shard: Whose pushes are put together.
        router: The policy.
        decoder: Of these pushes.
        transport: How datagrams travel.
    """

    def __init__(
        self, shard: PortOwner, router: Router, decoder: PushDecoder, transport: Transport
    ) -> None:
        self._shard, self._router = shard, router
        self._decoder, self._transport = decoder, transport
        in_stream = transport.dgt_transport != "udp"
        self._ports = range(0) if in_stream else range(1, router.channels + 1)
        self.begin_life()

    def begin_life(self) -> None:
        """Belong to another life of the shard: nothing is open."""
        shard = self._shard
        self.receiver = DatagramReceiver(
            self._decoder,
            [piece.size for piece in shard.layout.slices],
            self._router,
            shard.arrive,
            self._refuse,
            shard.set_alarm,
            np.random.default_rng([_ENTROPY, shard.number, shard.life]).bytes,
            lambda: shard.now,
        )
        self.receiver.configure(self._transport)

    def fill_welcome(self, worker: int, incarnation: int, welcome: pb.Welcome) -> None:
        """Put into a Welcome where the worker's datagrams go, and what signs them."""
        self.receiver.fill_welcome(worker, incarnation, self._ports, welcome)

    def take(self, arrived: StreamPart | Datagrams) -> None:
        """Take in what has come in a stream."""
        if isinstance(arrived, Datagrams):
            message = arrived.message
            self.receiver.receive_from_stream(memoryview(message.data), message.size)
            return
        try:
            self.receiver.on_push(arrived.worker, arrived.push, arrived.payload)
        except NonFinite:
            self._shard.arrive(NonFinitePush(arrived.worker, arrived.push.step))

    def end_sessions(self) -> None:
        """End those of workers that have gone."""
        self.receiver.retain_members(self._shard.live_workers())

    def _refuse(self, worker: int, step: int, message: str) -> None:
        """Refuse a push that turned out not to be finite when it was whole."""
        del message
        self._shard.arrive(NonFinitePush(worker, step))
