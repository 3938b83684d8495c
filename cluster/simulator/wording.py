"""What a simulated worker says to one shard of a push: messages, and the sizes of their frames."""

from __future__ import annotations

from collections.abc import Sequence

from cluster.simulator.messages import Arrival, Datagrams, Part
from cluster.simulator.pipes import sizes_on_wire
from ops import wire
from proto import convert
from proto import thinwire_pb2 as pb
from proto.framing import BytesLike
from ps import events
from ps.pushes import NonFinite, PushDecoder
from worker.datagram_leg import DatagramLeg
from worker.exchanged import Outgoing
from worker.push_messages import sealed_messages

#: What a shard takes in, and the sizes of the frames that bring it.
Spoken = tuple[Arrival, list[int]]


class Wording:
    """One worker's pushes to one shard.

    Attributes:
        leg: What goes in datagrams; None where the method sends none.
        chunk_bytes: Most bulk bytes of one frame.

    Args:
        number: Of the worker.
        shard: Of the shard.
        decoder: Of the shard's pushes.
        leg: See above.
        chunk_bytes: See above.
    """

    def __init__(
        self,
        number: int,
        shard: int,
        decoder: PushDecoder,
        leg: DatagramLeg | None,
        chunk_bytes: int,
    ) -> None:
        self._number, self._shard, self._decoder = number, shard, decoder
        self.leg, self.chunk_bytes = leg, chunk_bytes
        self._chooser = wire.IndexChooser()

    def begin_life(self) -> None:
        """Forget how positions were coded."""
        self._chooser = wire.IndexChooser()

    def push(self, outgoing: Outgoing, incarnation: int, epoch: int) -> list[Spoken]:
        """Return the messages of a push, with datagrams that go ahead of it in the stream."""
        leg = self.leg
        messages = sealed_messages(outgoing, self._shard, incarnation, epoch, self._chooser, leg)
        ahead = [_in_stream(message) for message in leg.before()] if leg is not None else []
        return [*ahead, *(self._spoken(message, pieces) for message, pieces in messages)]

    def behind(self) -> list[Spoken]:
        """Send the push's datagrams; return those that follow it in the stream."""
        return [_in_stream(message) for message in self.leg.after()] if self.leg is not None else []

    def _spoken(self, message: pb.ToServer, pieces: Sequence[BytesLike]) -> Spoken:
        sizes = sizes_on_wire(list(convert.frames(message, pieces, self.chunk_bytes)))
        payload = memoryview(b"".join(pieces))
        if self.leg is not None:
            return Part(self._number, message.push, payload), sizes
        try:
            return self._decoder.decode(self._number, message.push, payload), sizes
        except NonFinite:
            return events.Refused(self._number, "non_finite"), sizes


def _in_stream(message: pb.ToServer) -> Spoken:
    return Datagrams(message.datagrams), sizes_on_wire([convert.frame(message)])
