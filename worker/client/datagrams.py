"""Sends a worker's datagrams to the shards; counts blocks and bytes per datagram channel.

The class `DatagramChannel` sends the datagrams for one shard, over UDP or in the gRPC stream. The
class `WorkerTransport` holds the emulated uplink, the pacing and the class of service that all
streams and datagrams of one worker share. The class `DatagramTotals` counts blocks when the router
divides a push among channels, and bytes when they are sent.
"""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from absl import logging

from thinwire.ops.routing.base import LostEntries, Routed, Router, Transport
from thinwire.ops.routing.counters import SentCounts
from thinwire.ops.routing.datagram_format import DatagramSession
from thinwire.ops.routing.packetizer import Packetizer, SealedStep
from thinwire.ops.types import Link
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.emulation.link import EmulatedSender, LinkModel
from thinwire.proto.emulation.uplink import PrioritySender, RunningLink, class_of_channel
from thinwire.proto.moved import present_address
from thinwire.proto.udp import sender as udp_sender
from thinwire.proto.udp.sender import ChannelCounts, DatagramSender, UdpSettings
from thinwire.proto.udp.sockets import stream_dscp

#: Function that makes the UDP sender for a shard, given the shard's host, its ports and the
#: session's key.
Connect = Callable[[str, Sequence[int], bytes], DatagramSender]


class DatagramChannel:
    """Sender of one worker's datagrams to one shard.

    Datagrams take one of three paths from a worker to a shard. Over UDP, datagrams to a shard can
    be lost or late. In the gRPC stream after each push, datagrams to a shard cannot be lost but can
    be late. After too many losses over UDP, the datagrams are sent in the gRPC stream ahead of each
    push, where they are neither lost nor late.

    Attributes:
        marks_slots: True if the message with one variable's blocks announces the datagrams of that
            variable.

    Args:
        worker: Id of the worker that sends the datagrams.
        router: Router of the training method, which divides an update among channels.
        transport: Settings of the datagrams: their sizes, and the choice between UDP and the gRPC
            stream.
        connect: Function that returns a sender of datagrams over UDP.
    """

    def __init__(
        self,
        worker: int,
        router: Router,
        transport: Transport,
        connect: Connect,
    ) -> None:
        self._worker, self._channels, self._transport = worker, router.channels, transport
        self.marks_slots = router.marks_slots
        self._connect = connect
        self._session: DatagramSession | None = None
        self._sender: DatagramSender | None = None
        self._sealer: Packetizer | None = None
        # Pair (step, datagrams of the push in that step); None before the first push.
        self._sealed: tuple[int, SealedStep] | None = None
        # Lock for the datagram counts, which the heartbeat thread reads.
        self._lock = threading.RLock()
        self._counts_before = [ChannelCounts() for _ in range(router.channels)]
        self._poor_steps = 0
        self.fell_back = False
        self.address = ""

    def open(self, address: str, welcome: pb.Welcome) -> None:
        """Start the datagram session that a shard's Welcome message names, unless it is open."""
        offered = welcome.datagrams
        if self._session is not None and self._session.id == offered.session:
            return
        self.close()
        self.address = address
        self._session = DatagramSession(offered.session, offered.key, self._worker)
        mtu = self._transport.dgt_mtu
        by_udp = self._transport.dgt_transport == "udp"
        if by_udp and not offered.ports:
            self._fall_back("%s has no UDP ports for datagrams", address)
        if by_udp and not self.fell_back:
            host = present_address(address).rpartition(":")[0].strip("[]")
            self._sender = self._connect(host, list(offered.ports), offered.key)
            mtu = self._sender.mtu
        self._sealer = Packetizer(self._session, mtu, self._channels)
        self._sealed = None

    def seal(self, step: int, routed: Routed) -> SealedStep:
        """Return the datagrams of one exchange with the shard.

        A second call of `seal` for the same step, in the same datagram session, returns the same
        datagrams.
        """
        if self._sealer is None:
            raise ValueError("datagrams cannot be sealed before the shard opens a session")
        if self._sealed is None or self._sealed[0] != step:
            if self._sender is not None:
                self._sealer.mtu = self._sender.mtu
            self._sealed = step, self._sealer.seal(step, routed.unreliable)
        return self._sealed[1]

    def before(self) -> Iterable[pb.ToServer]:
        """Return the datagrams that the gRPC stream carries ahead of the push, as messages."""
        failure = self._sender.failure if self._sender is not None else None
        if failure is not None:
            self._fall_back("datagrams to %s cannot be sent: %r", self.address, failure)
        return self._in_stream() if self.fell_back else ()

    def after(self) -> Iterable[pb.ToServer]:
        """Send a push's datagrams over UDP, or return them as messages that follow the push."""
        if self._sealed is None or self.fell_back:
            return ()
        if self._sender is None:
            return self._in_stream()
        step, sealed = self._sealed
        self._sender.send(sealed.batches, step)
        return ()

    def _in_stream(self) -> Iterable[pb.ToServer]:
        if self._sealed is None or self._session is None:
            return
        for batch in self._sealed[1].batches:
            batch.sign(self._session.key)
            # Counts datagrams only, because the gRPC stream counts the bytes of the datagrams it
            # carries.
            self._counts_before[batch.channel - 1].datagrams += batch.count
            yield pb.ToServer(datagrams=pb.Datagrams(size=batch.size, data=bytes(batch.data)))

    def record(self, reception: pb.DatagramOutcome) -> list[LostEntries]:
        """Record which datagrams of an exchange reached a shard; return the push's lost entries."""
        self._check_losses(reception)
        if self._sealed is None or not reception.bitmap:
            return []
        return self._sealed[1].lost(reception.bitmap)

    def _check_losses(self, reception: pb.DatagramOutcome) -> None:
        """Stop using UDP after too many consecutive exchanges in which many datagrams were lost."""
        if self._sender is None or not reception.announced:
            return
        transport, received = self._transport, reception.arrived + reception.came_late
        poor = received < transport.dgt_fallback_fill * reception.announced
        self._poor_steps = self._poor_steps + 1 if poor else 0
        if not transport.dgt_fallback_steps or self._poor_steps < transport.dgt_fallback_steps:
            return
        self._fall_back(
            "UDP to %s: fewer than %g %% of the datagrams arrived in each of the last %d exchanges "
            "(a firewall?)",
            self.address,
            100 * transport.dgt_fallback_fill,
            transport.dgt_fallback_steps,
        )

    def _fall_back(self, why: str, *details: object) -> None:
        """Send all later datagrams in the gRPC stream instead of over UDP; log the reason once."""
        if not self.fell_back:
            consequence = "sending all further datagrams in the gRPC stream, without losses"
            logging.warning(f"{why}; {consequence}", *details)
        self.fell_back = True
        self._end_sender()

    def counts(self) -> tuple[ChannelCounts, ...]:
        """Return the datagram counts by channel, from channel 1 on."""
        with self._lock:
            current = self._sender.counts() if self._sender is not None else ()
            padded = itertools.chain(current, itertools.repeat(ChannelCounts()))
            return tuple(before.plus(next(padded)) for before in self._counts_before)

    @property
    def bytes_sent(self) -> int:
        """Number of bytes sent over UDP, with IP and UDP headers, without the stream's bytes."""
        return sum(counts.bytes_on_wire for counts in self.counts())

    def close(self) -> None:
        """Drop the queued datagrams and end the datagram session with the shard."""
        self._end_sender()
        self._session = None

    def _end_sender(self) -> None:
        if self._sender is None:
            return
        # Close the sender before reading the counts: datagrams that it sends while it closes must
        # still be counted.
        self._sender.close()
        with self._lock:
            self._counts_before, self._sender = list(self.counts()), None


def open_channel(
    worker: int, router: Router, transport: Transport, connect: Connect
) -> DatagramChannel | None:
    """Return a worker's datagram channel to one shard; None if the router sends no datagrams."""
    if not router.uses_datagrams:
        return None
    return DatagramChannel(worker, router, transport, connect)


class WorkerTransport:
    """Emulated uplink, pacing and class of service that all streams of one worker share.

    Attributes:
        sender: Object that paces the worker's streams on the emulated link; None if no link is
            emulated.
        dscp: Class of service (DSCP) of the streams' packets; None for the operating system's
            default.

    Args:
        link: Settings of the worker's emulated network link.
        seed: Seed of the random packet losses on the emulated network link.
        transport: Settings of the datagrams: their sizes, and the choice between UDP and the gRPC
            stream.
        router: Router of the training method, which divides an update among channels.
    """

    def __init__(self, link: Link, seed: int, transport: Transport, router: Router) -> None:
        self._transport, self._router = transport, router
        self._scheme = transport.dgt_dscp
        self.dscp: int | None = None
        if router.channels:
            self.dscp = stream_dscp(self._scheme, router.channels)
        self.sender: EmulatedSender | None = None
        self._uplink: RunningLink | None = None
        if link.active and (router.channels or link.background_mbps):
            self._uplink = RunningLink(link, seed)
            priority = class_of_channel(self._scheme, 0, router.channels)
            self.sender = PrioritySender(self._uplink, priority)
        # streams without datagrams have one class of service, because their packets keep their
        # order
        elif link.active:
            self.sender = EmulatedSender(LinkModel(link, seed))
        self._bucket = udp_sender.pacing(transport.dgt_pace_mbps)

    def open_channel(self, worker: int) -> DatagramChannel | None:
        """Return a new datagram channel to one shard; None if the method sends no datagrams."""
        return open_channel(worker, self._router, self._transport, self._connect)

    def close(self) -> None:
        """Close the emulated uplink of the worker."""
        if self._uplink is not None:
            self._uplink.close()

    def _connect(self, host: str, ports: Sequence[int], key: bytes) -> DatagramSender:
        mtu, max_late = self._transport.dgt_mtu, self._router.max_late
        over: Callable[..., Any] | None = None
        if self._uplink is not None:
            over = self._uplink.over(self._scheme, self._router.channels)
        sending = UdpSettings(key, mtu, max_late, self._scheme)
        return udp_sender.connect(host, ports, sending, self._bucket, over)


#: Fields of ChannelCounts that count datagrams that were not sent, one field per reason.
_UNSENT = ("outdated", "refused", "too_large")


@dataclasses.dataclass
class DatagramTotals:
    """Counts the blocks, datagrams and bytes of one worker, over all shards.

    Attributes:
        worker: Id of the worker that sends the datagrams.
        to_shards: For each shard, the worker's datagram channel to it.
        num_channels: Number of datagram channels, one per class of service.
        bytes_up: Function that returns the number of bytes that the worker has sent, in streams and
            datagrams.
        logs: True to log the datagram counts for each exchange.
    """

    worker: int
    to_shards: Sequence[DatagramChannel]
    num_channels: int
    bytes_up: Callable[[], int]
    logs: bool

    def __post_init__(self) -> None:
        # Counts of how the router divided pushes among channels, without sent bytes.
        self._parted = SentCounts(blocks=[0] * (self.num_channels + 1))
        self._logged = SentCounts()

    def record(self, routed: Sequence[Routed]) -> None:
        """Count the blocks of an exchange by channel (called in the training thread).

        Args:
            routed: The router's division of the push among channels, for each shard.
        """
        blocks = np.zeros(self.num_channels + 1, np.int64)
        for part in routed:
            blocks[0] += part.num_reliable
            for unreliable in part.unreliable:
                blocks += np.bincount(unreliable.channels, minlength=len(blocks))
        self._parted = self._parted.plus(
            SentCounts(
                pushes=1,
                # The fraction k of blocks that are sent reliably is equal for all shards.
                sum_k=routed[0].k,
                blocks=blocks.tolist(),
                skipped=sum(part.num_skipped for part in routed),
                dropped=sum(part.num_dropped for part in routed),
                non_finite=sum(part.num_nonfinite for part in routed),
            )
        )

    def counts(self) -> SentCounts:
        """Return the datagram counts over all shards since this process started (any thread)."""
        datagrams, num_bytes = [0], [0]
        by_shard = [channel.counts() for channel in self.to_shards]
        by_channel = list(zip(*by_shard, strict=True))
        for shard_counts in by_channel:
            datagrams.append(sum(counts.datagrams for counts in shard_counts))
            num_bytes.append(sum(counts.bytes_on_wire for counts in shard_counts))
        # The gRPC stream (channel 0) sent all bytes that the datagram channels did not send.
        num_bytes[0] = max(0, self.bytes_up() - sum(num_bytes))
        unsent = {
            reason: sum(getattr(counts, reason) for row in by_channel for counts in row)
            for reason in _UNSENT
        }
        fallen_back = sum(channel.fell_back for channel in self.to_shards)
        return dataclasses.replace(
            self._parted,
            datagrams=datagrams,
            num_bytes=num_bytes,
            unsent=unsent,
            fallen_back=fallen_back,
        )

    def log(self, step: int) -> None:
        """Log the datagram counts since the previous log line, if `logs` is True."""
        if not self.logs:
            return
        counts = self.counts()
        new, self._logged = counts.minus(self._logged), counts
        logging.info(
            "worker %d, step %d: reliable fraction %.3f; blocks by channel (0 is reliable): %s; "
            "%d blocks of zeros skipped, %d dropped, %d not finite; bytes by channel: %s",
            self.worker,
            step,
            new.sum_k / max(1, new.pushes),
            _by_channel(new.blocks),
            new.skipped,
            new.dropped,
            new.non_finite,
            _by_channel(new.num_bytes),
        )


def totals_of(
    worker: int,
    to_shards: Sequence[DatagramChannel | None],
    num_channels: int,
    bytes_up: Callable[[], int],
    logs: bool,
) -> DatagramTotals | None:
    """Return the counter of all datagram channels; None if the training method has none."""
    channels = [channel for channel in to_shards if channel is not None]
    return DatagramTotals(worker, channels, num_channels, bytes_up, logs) if num_channels else None


def _by_channel(counts: Sequence[int]) -> str:
    return " / ".join(map(str, counts))
