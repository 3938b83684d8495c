"""What a simulated worker says to one shard of a push: messages, and the sizes of their frames."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.ops.wire.blocks import IndexChooser
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import BytesLike, frame, frames
from thinwire.ps.core import events
from thinwire.ps.wire.push_decoder import NonFinite, PushDecoder
from thinwire.simulator.links import sizes_on_wire
from thinwire.simulator.messages import Datagrams, Delivery, StreamPart
from thinwire.worker.client.datagrams import DatagramChannel
from thinwire.worker.client.messages import sealed_messages
from thinwire.worker.core.messages import PushRequest

#: What a shard takes in, and the sizes of the frames that bring it.
EncodedMessage = tuple[Delivery, list[int]]


class PushEncoder:
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
        leg: DatagramChannel | None,
        chunk_bytes: int,
    ) -> None:
        self._number, self._shard, self._decoder = number, shard, decoder
        self.leg, self.chunk_bytes = leg, chunk_bytes
        self._chooser = IndexChooser()

    def begin_life(self) -> None:
        """Forget how positions were coded."""
        self._chooser = IndexChooser()

    def push(self, outgoing: PushRequest, incarnation: int, epoch: int) -> list[EncodedMessage]:
        """Return the messages of a push, with datagrams that go ahead of it in the stream."""
        leg = self.leg
        messages = sealed_messages(outgoing, self._shard, incarnation, epoch, self._chooser, leg)
        ahead = [_in_stream(message) for message in leg.before()] if leg is not None else []
        return [*ahead, *(self._spoken(message, pieces) for message, pieces in messages)]

    def behind(self) -> list[EncodedMessage]:
        """Send the push's datagrams; return those that follow it in the stream."""
        return [_in_stream(message) for message in self.leg.after()] if self.leg is not None else []

    def _spoken(self, message: pb.ToServer, pieces: Sequence[BytesLike]) -> EncodedMessage:
        sizes = sizes_on_wire(list(frames(message, pieces, self.chunk_bytes)))
        payload = memoryview(b"".join(pieces))
        if self.leg is not None:
            return StreamPart(self._number, message.push, payload), sizes
        try:
            return self._decoder.decode(self._number, message.push, payload), sizes
        except NonFinite:
            return events.PushRejected(self._number, "non_finite"), sizes


def _in_stream(message: pb.ToServer) -> EncodedMessage:
    return Datagrams(message.datagrams), sizes_on_wire([frame(message)])
