"""A shard's side of the datagram path: sessions, sockets, and when pushes are whole."""

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


#: By which the kernel knows datagrams of open sessions.
_START = MAGIC.to_bytes(4, "little")
_SESSION_AT = HEADER.fields["session"][1] if HEADER.fields else 0


class DatagramPort:
    """What a shard has of datagrams; only where the router uses them.

    Attributes:
        receptions: The workers' sessions.

    Args:
        core: Whose pushes they belong to.
        decoder: Of these pushes.
        sizes: Entries of each slot.
        put: Queues an event, or something to call, for the writer thread.
        say_no: Refuses a push to its worker (writer thread).
    """

    def __init__(
        self,
        core: PsCore,
        decoder: PushDecoder,
        sizes: list[int],
        put: Callable[[events.Event | Callable[[], None]], None],
        say_no: Callable[[events.Reject], None],
    ) -> None:
        self._core, self._put, self._say_no = core, put, say_no
        self._router = core.model.method.router
        self._receiver: UdpReceiver | None = None
        # Of receivers that have failed: kept out by the kernel, and without a byte.
        self._kept_out = self._empty = 0
        self.receptions = DatagramReceiver(
            decoder, sizes, self._router, put, self._refuse, lambda: put(_take_a_turn)
        )

    def open(self, transport: Transport, bind: str) -> None:
        """Open a UDP port for each channel, unless datagrams come in the stream.

        Raises:
            ConfigurationError: The address is not of this machine.
        """
        self.receptions.obey(transport)
        if transport.dgt_transport == "grpc":
            if self._router.needs_datagrams_first:
                logging.warning(
                    "--dgt_transport=grpc sends unreliable blocks behind each push, and with "
                    "--dgt_reception=drop and --dgt_wait_ms=0 none of them is used; give a wait."
                )
            return
        self._receiver = UdpReceiver(bind, self._router.channels, self)
        self._receiver.start()
        logging.info("datagrams: UDP ports %s", ", ".join(map(str, self._receiver.ports)))

    @property
    def ports(self) -> tuple[int, ...]:
        """UDP ports, channel 1 first; none where datagrams come in the stream."""
        return self._receiver.ports if self._receiver is not None else ()

    def introduce(self, worker: int, incarnation: int, welcome: pb.Welcome) -> None:
        """Tell a worker where its datagrams go, and what signs them."""
        self.receptions.introduce(worker, incarnation, self.ports, welcome)
        self._admit()

    def received(self) -> DatagramCounts:
        """Return what was counted so far (any thread)."""
        kept_out, empty = _not_handed_over(self._receiver)
        known = self.receptions.received().beside(BY_THE_KERNEL, self._kept_out + kept_out)
        return known.beside(EMPTY, self._empty + empty)

    def turn(self) -> None:
        """Do what time has made due (writer thread)."""
        self.receptions.tick()
        receiver = self._receiver
        if receiver is None or receiver.failure is None:
            return
        logging.error(
            "datagrams are not received any more (%r); workers are to send them in the stream",
            receiver.failure,
        )
        receiver.close()
        kept_out, empty = _not_handed_over(receiver)
        self._kept_out, self._empty = self._kept_out + kept_out, self._empty + empty
        self._receiver = None
        self.receptions.end_all()  # they say Hello again, and hear of no ports

    def end_sessions(self) -> None:
        """End those of workers that have gone (writer thread)."""
        state = self._core.sync_state
        self.receptions.keep([*state["live"], *state["joining"]])
        self._admit()

    def _admit(self) -> None:
        """Have the kernel keep out what is of no session, where it can."""
        if self._receiver is not None:
            numbers = [number.to_bytes(8, "little") for number in self.receptions.numbers()]
            self._receiver.admit(_START, _SESSION_AT, numbers)

    def deliver(self, channel: int, data: memoryview, size: int) -> int:
        """Take what a socket has received; see `thinwire.proto.udp.receiver.DatagramOwner`."""
        del channel
        return self.receptions.take(data, size)

    def next_deadline(self) -> float | None:
        """Ask nothing of the receiving thread: the writer thread watches the time."""

    def tick(self, now: float) -> None:
        """Do nothing: see `next_deadline`."""

    def close(self) -> None:
        """End the receiving thread and close its sockets."""
        if self._receiver is not None:
            self._receiver.close()

    def _refuse(self, worker: int, step: int, message: str) -> None:
        """Refuse a push that turned out not to be finite when it was whole (any thread)."""

        def refuse() -> None:
            incarnation = self._core.members[worker].incarnation
            epoch = self._core.membership.epoch
            self._say_no(events.Reject(worker, incarnation, "NON_FINITE", message, step, epoch))

        self._put(events.PushRejected(worker, "non_finite"))
        self._put(refuse)


def _not_handed_over(receiver: UdpReceiver | None) -> tuple[int, int]:
    """Return how many datagrams the kernel kept out, and how many had not a byte."""
    counts = receiver.counts() if receiver is not None else ()
    return sum(each.kernel_drops or 0 for each in counts), sum(each.num_empty for each in counts)


def _take_a_turn() -> None:
    """Let the writer thread look at its deadlines again."""
