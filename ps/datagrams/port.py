"""A PS shard's UDP sockets, which receive datagrams from workers. If the shard's UDP sockets fail,
all datagram sessions of its workers end.

`DatagramPort` passes received buffers to the `DatagramReceiver`, makes the kernel drop datagrams
without a session, and ends the sessions of workers that have left the run. With
--dgt_transport=grpc the gRPC stream carries the datagrams, and `DatagramPort` opens no sockets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from absl import logging

from thinwire.ops.routing.base import Transport
from thinwire.ops.routing.datagram_format import HEADER, MAGIC
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.udp.receiver import UdpReceiver
from thinwire.ps.core import events
from thinwire.ps.datagrams.counters import BY_THE_KERNEL, EMPTY, DatagramCounts
from thinwire.ps.datagrams.receiver import DatagramReceiver
from thinwire.ps.wire.push_decoder import PushDecoder

if TYPE_CHECKING:
    from thinwire.ps.core.core import PsCore

#: First bytes of Thinwire's datagrams, and byte offset of the session id in a datagram. The
#: kernel's filter compares the first bytes and the session id.
_START = MAGIC.to_bytes(4, "little")
_SESSION_AT = HEADER.fields["session"][1] if HEADER.fields else 0


class DatagramPort:
    """The UDP datagram path of a shard, which exists only if the training method's router uses
    datagrams.

    Attributes:
        receiver: Object that joins workers' datagrams into pushes, and holds their open sessions.

    Args:
        core: Core (state machine) of the shard, which applies complete pushes.
        decoder: Decoder of the pushes that the shard receives.
        sizes: Number of values in each slot (slice of a variable) of the shard.
        put: Function that queues an event or a function call for the shard's writer thread.
        reject: Function that sends a worker the rejection of its push; called on the writer thread.
    """

    def __init__(
        self,
        core: PsCore,
        decoder: PushDecoder,
        sizes: list[int],
        put: Callable[[events.Event | Callable[[], None]], None],
        reject: Callable[[events.Reject], None],
    ) -> None:
        self._core, self._put, self._reject = core, put, reject
        self._router = core.model.method.router
        self._udp: UdpReceiver | None = None
        # Totals of UDP receivers that have failed: datagrams dropped by the kernel, empty
        # datagrams.
        self._num_filtered = self._num_empty = 0
        self.receiver = DatagramReceiver(
            decoder, sizes, self._router, put, self._refuse, lambda: put(_wake_up)
        )

    def open(self, transport: Transport, bind: str) -> None:
        """Open a UDP port for each datagram channel of the shard. The shard opens no UDP port if
        the gRPC stream carries the datagrams.

        Raises:
            ConfigurationError: `bind` is not an address of this machine.
        """
        self.receiver.configure(transport)
        if transport.dgt_transport == "grpc":
            if self._router.needs_datagrams_first:
                logging.warning(
                    "--dgt_transport=grpc sends unreliable blocks after each push, but with "
                    "--dgt_reception=drop and --dgt_wait_ms=0 a PS shard uses none of these "
                    "blocks; increase --dgt_wait_ms."
                )
            return
        self._udp = UdpReceiver(bind, self._router.channels, self)
        self._udp.start()
        logging.info("receiving datagrams at UDP ports %s", ", ".join(map(str, self._udp.ports)))

    @property
    def ports(self) -> tuple[int, ...]:
        """UDP ports of the shard by channel, channel 1 first; empty if gRPC carries the
        datagrams.
        """
        return self._udp.ports if self._udp is not None else ()

    def fill_welcome(self, worker: int, incarnation: int, welcome: pb.Welcome) -> None:
        """Add the UDP ports, session id and signing key to a worker's Welcome message."""
        self.receiver.fill_welcome(worker, incarnation, self.ports, welcome)
        self._filter_sessions()

    def counts(self) -> DatagramCounts:
        """Return the counts of received and dropped datagrams since the run began; callable from
        any thread.
        """
        filtered, empty = _not_handed_over(self._udp)
        counts = self.receiver.counts().with_dropped(BY_THE_KERNEL, self._num_filtered + filtered)
        return counts.with_dropped(EMPTY, self._num_empty + empty)

    def poll(self) -> None:
        """Deliver incomplete pushes at their deadlines; close failed UDP sockets (called on the
        writer thread).
        """
        self.receiver.poll()
        udp = self._udp
        if udp is None or udp.failure is None:
            return
        logging.error(
            "the UDP sockets failed (%r): closing them; workers will send datagrams over gRPC",
            udp.failure,
        )
        udp.close()
        filtered, empty = _not_handed_over(udp)
        self._num_filtered, self._num_empty = self._num_filtered + filtered, self._num_empty + empty
        self._udp = None
        # the workers then send Hello again, and the shard's next Welcome names no UDP ports
        self.receiver.end_all_sessions()

    def end_sessions(self) -> None:
        """End the datagram sessions of workers that have left the run (called on the writer
        thread).
        """
        core = self._core
        self.receiver.retain_members([*core.rounds.live(), *core.rounds.joining()])
        self._filter_sessions()

    def _filter_sessions(self) -> None:
        """Make the kernel drop datagrams that belong to no open session, if the kernel supports
        it.
        """
        if self._udp is not None:
            ids = [session_id.to_bytes(8, "little") for session_id in self.receiver.session_ids()]
            self._udp.admit(_START, _SESSION_AT, ids)

    def deliver(self, channel: int, data: memoryview, size: int) -> int:
        """Process a buffer of received datagrams; return how many were genuine and new."""
        return self.receiver.receive(data, size)

    def next_deadline(self) -> float | None:
        """Return no deadline (None), as the writer thread watches the deadlines of incomplete
        pushes.
        """

    def tick(self, now: float) -> None:
        """Do nothing, because the writer thread watches the deadlines of incomplete pushes."""

    def close(self) -> None:
        """End the thread that receives datagrams, and close its UDP sockets."""
        if self._udp is not None:
            self._udp.close()

    def _refuse(self, worker: int, step: int, message: str) -> None:
        """Reject a worker's complete push, which holds NaN or infinity; callable from any
        thread.
        """

        def refuse() -> None:
            incarnation = self._core.incarnation_of(worker)
            epoch = self._core.membership.epoch
            self._reject(events.Reject(worker, incarnation, "NON_FINITE", message, step, epoch))

        self._put(events.PushRejected(worker, "non_finite"))
        self._put(refuse)


def _not_handed_over(udp: UdpReceiver | None) -> tuple[int, int]:
    """Return the number of datagrams that the kernel dropped, plus the number of empty
    datagrams.
    """
    counts = udp.counts() if udp is not None else ()
    return sum(port.kernel_drops or 0 for port in counts), sum(port.num_empty for port in counts)


def _wake_up() -> None:
    """Do nothing: the queued call only makes the shard's writer thread check its deadlines
    again.
    """
