"""A shard's sockets for datagrams, and what becomes of the sessions when they fail.

`DatagramPort` gives the UDP receiver's buffers to the `DatagramReceiver`, has the kernel filter out
datagrams without a session, and ends sessions of workers that have left. Where datagrams travel in
the stream (--dgt_transport=grpc) it opens no sockets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from absl import logging

from thinwire.ops.routing.base import Transport
from thinwire.ops.routing.datagram_format import HEADER, MAGIC
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.udp import UdpReceiver
from thinwire.ps.core import events
from thinwire.ps.datagrams.counters import BY_THE_KERNEL, EMPTY, DatagramCounts
from thinwire.ps.datagrams.receiver import DatagramReceiver
from thinwire.ps.wire.push_decoder import PushDecoder

if TYPE_CHECKING:
    from thinwire.ps.core.core import PsCore

#: How the kernel's filter recognises datagrams of open sessions.
_START = MAGIC.to_bytes(4, "little")
_SESSION_AT = HEADER.fields["session"][1] if HEADER.fields else 0


class DatagramPort:
    """The datagram path of a shard; it exists only where the router uses datagrams.

    Attributes:
        receiver: The workers' sessions.

    Args:
        core: Whose pushes they belong to.
        decoder: Of these pushes.
        sizes: Entries of each slot.
        put: Queues an event, or a callable, for the writer thread.
        reject: Sends a worker the refusal of its push (writer thread).
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
        # Of UDP receivers that have failed: datagrams dropped by the kernel, and empty ones.
        self._num_filtered = self._num_empty = 0
        self.receiver = DatagramReceiver(
            decoder, sizes, self._router, put, self._refuse, lambda: put(_wake_up)
        )

    def open(self, transport: Transport, bind: str) -> None:
        """Open a UDP port for each channel, unless datagrams come in the stream.

        Raises:
            ConfigurationError: The address is not of this machine.
        """
        self.receiver.configure(transport)
        if transport.dgt_transport == "grpc":
            if self._router.needs_datagrams_first:
                logging.warning(
                    "--dgt_transport=grpc sends unreliable blocks behind each push, and with "
                    "--dgt_reception=drop and --dgt_wait_ms=0 none of them is used; give a wait."
                )
            return
        self._udp = UdpReceiver(bind, self._router.channels, self)
        self._udp.start()
        logging.info("datagrams: UDP ports %s", ", ".join(map(str, self._udp.ports)))

    @property
    def ports(self) -> tuple[int, ...]:
        """UDP ports, channel 1 first; none where datagrams come in the stream."""
        return self._udp.ports if self._udp is not None else ()

    def fill_welcome(self, worker: int, incarnation: int, welcome: pb.Welcome) -> None:
        """Enter in a worker's Welcome where its datagrams go, and the key that signs them."""
        self.receiver.fill_welcome(worker, incarnation, self.ports, welcome)
        self._filter_sessions()

    def counts(self) -> DatagramCounts:
        """Return what was counted so far (any thread)."""
        filtered, empty = _not_handed_over(self._udp)
        counts = self.receiver.counts().with_dropped(BY_THE_KERNEL, self._num_filtered + filtered)
        return counts.with_dropped(EMPTY, self._num_empty + empty)

    def poll(self) -> None:
        """Deliver what is due, and close sockets that have failed (writer thread)."""
        self.receiver.poll()
        udp = self._udp
        if udp is None or udp.failure is None:
            return
        logging.error(
            "datagrams are not received any more (%r); workers are to send them in the stream",
            udp.failure,
        )
        udp.close()
        filtered, empty = _not_handed_over(udp)
        self._num_filtered, self._num_empty = self._num_filtered + filtered, self._num_empty + empty
        self._udp = None
        self.receiver.end_all_sessions()  # workers send Hello again; the next Welcome has no ports

    def end_sessions(self) -> None:
        """End the sessions of workers that have left (writer thread)."""
        core = self._core
        self.receiver.retain_members([*core.live_workers(), *core.joining_workers()])
        self._filter_sessions()

    def _filter_sessions(self) -> None:
        """Have the kernel drop datagrams of no open session, where it can."""
        if self._udp is not None:
            ids = [session_id.to_bytes(8, "little") for session_id in self.receiver.session_ids()]
            self._udp.admit(_START, _SESSION_AT, ids)

    def deliver(self, channel: int, data: memoryview, size: int) -> int:
        """Process a receive buffer; see `thinwire.proto.udp.receiver.DatagramOwner`."""
        del channel
        return self.receiver.receive(data, size)

    def next_deadline(self) -> float | None:
        """Return no deadline for the receiving thread: the writer thread watches the time."""

    def tick(self, now: float) -> None:
        """Do nothing: see `next_deadline`."""

    def close(self) -> None:
        """End the receiving thread and close its sockets."""
        if self._udp is not None:
            self._udp.close()

    def _refuse(self, worker: int, step: int, message: str) -> None:
        """Refuse a push that proved not to be finite when it was complete (any thread)."""

        def refuse() -> None:
            incarnation = self._core.incarnation_of(worker)
            epoch = self._core.membership.epoch
            self._reject(events.Reject(worker, incarnation, "NON_FINITE", message, step, epoch))

        self._put(events.PushRejected(worker, "non_finite"))
        self._put(refuse)


def _not_handed_over(udp: UdpReceiver | None) -> tuple[int, int]:
    """Return how many datagrams the kernel dropped, and how many were empty."""
    counts = udp.counts() if udp is not None else ()
    return sum(each.kernel_drops or 0 for each in counts), sum(each.num_empty for each in counts)


def _wake_up() -> None:
    """Do nothing: once it has run, the writer thread looks at its deadlines again."""
