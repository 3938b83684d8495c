"""Dialogue of a PS shard without a model with a client: a worker that offers its model, or a client
that must wait.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from thinwire.ops.offer import Offer, read_offer
from thinwire.ops.types import ConfigurationError
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import MIN_CHUNK_BYTES, Malformed
from thinwire.proto.grpc import ServerStream
from thinwire.ps.flags import PsFlags
from thinwire.ps.scripts.initial_model import offered_bytes
from thinwire.ps.service.dialogues.base import Dialogue, EndOfStream, RemoteClient
from thinwire.ps.service.handshake import program_of
from thinwire.ps.service.stream_state import ClientStreamState
from thinwire.runtime.run.program import Rows
from thinwire.runtime.run.settings import Run

if TYPE_CHECKING:
    from numpy.typing import NDArray


class OfferRefused(Exception):
    """Error: the model that a worker offers is invalid. The worker that offered an invalid model
    receives the text of this error.
    """


class OtherWeights(Exception):
    """Error: offered initial weights differ from those that another worker has offered to shard
    0.
    """


@dataclasses.dataclass(frozen=True)
class ReceivedOffer:
    """Model that a worker has offered: its checked description and its payload.

    Attributes:
        offer: Checked description of the model, from the worker's document.
        payload: Bytes of the shard's initial weights, then of moving statistics and optimizer
            slots, of the expected length.
        worker: Id of the worker that offered the model.
        stream: Stream of the worker that offered the model and waits for an answer.
        program: Rows that describe the script of the worker; empty if the worker has no script.
    """

    offer: Offer
    payload: memoryview
    worker: int
    stream: ServerStream
    program: Rows = ()


class OfferDialogue(Dialogue):
    """Dialogue that receives the model of a worker's script.

    The stream begins in the state HELD. `request` changes the state to OFFERING, the worker's
    offer changes it to OFFERED. The shard then requests all clients to connect again, so that each
    begins the dialogue of its kind on a new stream.

    Attributes:
        stream: Message stream of the client.
        worker: Worker id of the client.
        progress_at: Time at which the client last sent enough bytes, in seconds of `clock`.

    Args:
        client: The client, whose Hello fits the run.
        hello: Hello message of the client.
        clock: Function that returns monotonic time in seconds.
        check: Function that checks the description of an offered model, before memory is allocated
            for the payload; it returns the description and the payload's length in bytes, as
            `checked_offer`.
        receive: Function that gets the received model.
        refuse: Function that refuses a worker's offer: called with its stream and an error text.
        forget: Function called with the client's stream when the stream has ended.
    """

    def __init__(
        self,
        client: RemoteClient,
        hello: pb.Hello,
        clock: Callable[[], float],
        check: Callable[[pb.Offer], tuple[Offer, int]],
        receive: Callable[[ReceivedOffer], None],
        refuse: Callable[[ServerStream, str], None],
        forget: Callable[[ServerStream], None],
    ) -> None:
        self.stream, self.worker, self._program = client.stream, hello.id, program_of(hello)
        self._client, self._clock, self._check = client, clock, check
        self._receive, self._refuse, self._forget = receive, refuse, forget
        self._state = ClientStreamState.HELD
        self.progress_at = clock()
        self._num_bytes = 0  # bytes received from the client since the time `progress_at`
        self._offer: Offer | None = None

    @property
    def state(self) -> ClientStreamState:
        """State of the client's stream."""
        return self._state

    def request(self) -> None:
        """Request the worker's model."""
        self._state = ClientStreamState.OFFERING
        self._client.refuse(pb.REASON_NO_MODEL, "this PS has no model yet; send one.")

    def refusal_of(self, body: str) -> str:
        """Return why a message is malformed whose body is not in `messages`."""
        expected = "offer" if self._state is ClientStreamState.OFFERING else "nothing"
        return f"a client sent {body}; expected {expected}"

    def on_frame(self, num_bytes: int) -> None:
        """Extend the worker's time limit each time it has sent MIN_CHUNK_BYTES more."""
        self._num_bytes += num_bytes
        if self._num_bytes >= MIN_CHUNK_BYTES:
            self._num_bytes, self.progress_at = 0, self._clock()

    def payload_limit(self, message: pb.ToServer) -> int:
        """Check the description of an offered model; return the payload's length in bytes.

        Raises:
            Malformed: The message is no offer, or the shard has not requested an offer.
            EndOfStream: The shard refuses the offer.
        """
        if self._state is not ClientStreamState.OFFERING or message.WhichOneof("body") != "offer":
            return super().payload_limit(message)
        try:
            self._offer, num_bytes = self._check(message.offer)
            return num_bytes
        except OfferRefused as error:
            self._refuse(self.stream, str(error))
        except OtherWeights as error:
            self._client.refuse(pb.REASON_STARTING, str(error))
        raise EndOfStream

    def payload_memory(self, num_bytes: int) -> NDArray[Any]:
        """Return the memory of an offer's payload, a [num_bytes] uint8 array.

        Raises:
            EndOfStream: There is too little memory, so that the shard refuses the offer.
        """
        try:
            return super().payload_memory(num_bytes)
        except MemoryError:
            self._refuse(self.stream, "this PS has too little memory for the model.")
            raise EndOfStream from None

    def end(self) -> None:
        """Note that the client's stream has ended."""
        self._forget(self.stream)

    def _take_offer(self, offer: pb.Offer, payload: memoryview) -> None:
        if self._offer is None:  # `payload_limit` accepts an offer in the state OFFERING only
            raise Malformed(self.refusal_of("offer"))
        received = ReceivedOffer(self._offer, payload, self.worker, self.stream, self._program)
        self._offer, self._state = None, ClientStreamState.OFFERED
        self._receive(received)

    messages: ClassVar[dict[str, Any]] = {"offer": _take_offer}


def checked_offer(
    announced: pb.Offer, run: Run, own: PsFlags, check_digest: Callable[[Offer], None]
) -> tuple[Offer, int]:
    """Check the message that describes an offered model and announces its payload.

    Args:
        announced: The worker's message, without its payload.
        run: Settings of the training run.
        own: Settings of this PS shard from its command-line flags.
        check_digest: Function that raises OtherWeights if the shard must not accept the weights.

    Returns:
        The description of the model, and the length of the payload in bytes.

    Raises:
        OfferRefused, OtherWeights: The document that describes the model, or the length of the
            payload, is invalid.
    """
    try:
        offer = read_offer(announced.document, own.max_model_bytes)
        expected = offered_bytes(run, own.id_ps, offer)
    except ConfigurationError as error:
        raise OfferRefused(str(error)) from error
    except Exception as error:
        raise OfferRefused(f"{type(error).__name__}: {error}") from error
    most = own.max_model_bytes
    if expected > most:
        raise OfferRefused(
            f"the offer has {expected:,} bytes of weights, statistics and slots for this PS; "
            f"expected at most {most:,} bytes. Give the PS a larger --max_model_bytes if this "
            "size is intended."
        )
    check_digest(offer)
    if announced.payload_bytes != expected:
        raise OfferRefused(
            f"the offer announces {announced.payload_bytes} bytes; expected {expected}, by the "
            "sizes of its variables. Install the same Thinwire on all nodes."
        )
    return offer, expected
