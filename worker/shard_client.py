"""A worker's dealings with one shard: one question at a time, asked until it is answered."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

from absl import logging

from ops.credentials import NO_CREDENTIALS, Credentials
from proto import thinwire_pb2 as pb
from proto.channel_emulated import EmulatedSender
from proto.channel_grpc import ClientStream, StreamLost, Unreachable
from proto.credentials import NotTrusted
from proto.session import Refused, Session
from worker.datagram_leg import DatagramLeg
from worker.push_messages import Spoken

_DIAL_SECONDS = 2.0  # of one attempt, so that a wish to stop is heard
_FIRST_BACKOFF_SECONDS = 0.2
_LAST_BACKOFF_SECONDS = 5.0
#: A Hello refused for these reasons may be accepted a little later.
_TRANSIENT = (pb.REASON_STARTING, pb.REASON_FULL, pb.REASON_QUARANTINED)


class PushRefused(Exception):
    """A push was judged and not applied; `reason` says why. The stream stands."""

    def __init__(self, refusal: pb.Refusal) -> None:
        super().__init__(refusal.message)
        self.reason: int = refusal.reason


class Halted(Exception):
    """The run has ended and the shard is gone."""


class ShardClient:
    """One shard as a worker sees it; reconnects by itself, repeats what was not answered."""

    def __init__(
        self,
        address: str,
        hello: pb.Hello,
        max_payload_bytes: int,
        link: EmulatedSender | None,
        reconnect_timeout_seconds: float,
        closing: threading.Event,
        leg: DatagramLeg | None = None,
        dscp: int | None = None,
        credentials: Credentials = NO_CREDENTIALS,
    ) -> None:
        """Nothing is dialled yet.

        Args:
            address: ``host:port``.
            hello: This worker's introduction to this shard; gets run id and incarnation.
            max_payload_bytes: Larger replies are refused.
            link: The worker's emulated up-link.
            reconnect_timeout_seconds: After this long without an answer, Unreachable.
            closing: Set when the worker is asked to stop.
            leg: What goes in datagrams, if the method sends any.
            dscp: Class of service that the stream's packets ask for.
            credentials: Of this worker.
        """
        self.address, self.hello, self._link = address, hello, link
        self.leg, self._dscp, self._credentials = leg, dscp, credentials
        self._max_payload_bytes = max_payload_bytes
        self._patience_seconds = reconnect_timeout_seconds
        self._closing = closing
        self._progress_seconds = 30.0
        self._session: Session | None = None
        self._make: Callable[[], list[Spoken]] = list  # makes what is asked
        self._asked: list[Spoken] = []
        self._bytes_before = 0
        self._received_before = 0
        self._send_seconds_before = 0.0
        self.welcome = pb.Welcome()
        self.halt_cause = ""
        self._back_at: float | None = None  # put out until then; the stream stands

    @property
    def bytes_sent(self) -> int:
        """Training bytes over all streams to this shard."""
        session = self._session
        open_bytes = session.stream.bytes_sent if session else 0
        beside = self.leg.bytes_sent if self.leg is not None else 0
        return self._bytes_before + open_bytes + beside

    @property
    def bytes_received(self) -> int:
        """Bytes received over all streams from this shard."""
        session = self._session
        return self._received_before + (session.stream.bytes_received if session else 0)

    @property
    def send_seconds(self) -> float:
        """Seconds from `ask` to the last byte out, over all streams."""
        session = self._session
        open_seconds = session.stream.send_seconds if session else 0.0
        return self._send_seconds_before + open_seconds

    def connect(self) -> pb.Welcome:
        """Dial until welcomed.

        Raises:
            Unreachable: Nobody answered for the whole patience.
            Refused: The shard said no for good.
        """
        deadline = time.monotonic() + self._patience_seconds
        backoff = _FIRST_BACKOFF_SECONDS
        while True:
            session = Session(
                self.address, self.hello, self._max_payload_bytes, self._link, self._dscp,
                self._credentials,
            )  # fmt: skip
            try:
                remaining = max(0.5, deadline - time.monotonic())
                self.welcome = session.open(min(_DIAL_SECONDS, remaining))
                break
            except (Unreachable, StreamLost, Refused) as error:
                if isinstance(error, Refused) and error.reason not in _TRANSIENT:
                    raise
                session.close(0.0)
                if isinstance(error, Refused) and error.retry_after_seconds > 0:
                    logging.warning("%s", error)
                    self._closing.wait(error.retry_after_seconds)
                    deadline = time.monotonic() + self._patience_seconds
                if self._closing.is_set() or time.monotonic() + backoff >= deadline:
                    raise Unreachable(str(error)) from error
                if backoff == _FIRST_BACKOFF_SECONDS:
                    logging.info(
                        "looking for the PS at %s, for up to %g s", self.address,
                        self._patience_seconds,
                    )  # fmt: skip
            self._closing.wait(backoff * random.uniform(0.5, 1.0))
            backoff = min(2 * backoff, _LAST_BACKOFF_SECONDS)
        self._session = session
        self._progress_seconds = max(10.0, 3 * self.welcome.lease_seconds)
        self.hello.run_id = self.welcome.run_id
        self.hello.incarnation = self.welcome.incarnation
        if self.leg is not None:
            self.leg.opened(self.address, self.welcome)
        return self.welcome

    def say(self, message: pb.ToServer) -> None:
        """Queue a message that needs no answer, if the stream stands."""
        session = self._session  # another thread may drop it
        if session is not None:
            session.say(message)

    def ask(self, make: Callable[[], list[Spoken]]) -> None:
        """Queue a pull or a push.

        Args:
            make: Makes the messages, again after a reconnection; the pieces of their payloads must
                not change until they are answered.
        """
        self._make = make
        self._asked = make()
        self._send()

    def answer(self) -> tuple[pb.Reply, memoryview]:
        """Wait for the answer, through reconnections.

        Raises:
            PushRefused: The shard judged the push and did not apply it.
            Unreachable, Refused: The shard is gone for good.
            Halted: It is gone because the run has ended.
        """
        while True:
            try:
                answer = self._receive()
            except StreamLost as error:
                self._reconnect(error)
                continue
            if answer is not None:
                self._asked = []
                return answer

    @property
    def connected(self) -> bool:
        """Whether the stream stands, as far as is known."""
        return self._session is not None

    def tell(self, query: pb.Query) -> None:
        """Send the state server a query that is not answered."""
        session = self._session
        if session is not None:
            session.say(pb.ToServer(query=query), counted=True)

    def query(self, query: pb.Query, patience_seconds: float | None) -> pb.Answer | None:
        """Ask the state server.

        Args:
            query: The question.
            patience_seconds: How long to wait for its answer; None: as long as the shard lives.

        Returns:
            The answer, or an earlier one of this round that says "push"; None where neither came,
            or the stream is lost: the next push will open it again.
        """
        self.tell(query)
        waited_from = time.monotonic()
        try:
            while (session := self._session) is not None:
                received = (
                    session.receive(self._progress_seconds)
                    if patience_seconds is None
                    else session.poll(waited_from + patience_seconds - time.monotonic())
                )
                if received is None:
                    return None
                answer = self._answer_to(query, received[0])
                if answer is not None:
                    return answer
        except StreamLost as error:
            logging.warning("stream to %s lost (%s); training on", self.address, error)
            self._drop()
        return None

    def _answer_to(self, query: pb.Query, message: pb.ToClient) -> pb.Answer | None:
        """Return the answer in a message, if it settles this query."""
        body = message.WhichOneof("body")
        if body == "halt" and self.hello.shard == 0:
            self.halt_cause = message.halt.cause
        if body == "refusal" and message.refusal.reason == pb.REASON_NOT_MEMBER:
            raise StreamLost(message.refusal.message)
        if body != "answer" or message.answer.step != query.step:
            return None
        settles = message.answer.ready or message.answer.local_steps == query.local_steps
        return message.answer if settles else None

    def close(self) -> None:
        """End the stream after what has been queued."""
        if self._session is not None:
            self._session.close()
        if self.leg is not None:
            self.leg.close()

    @property
    def _asked_step(self) -> int:
        """The step of the push in question; 0 of a pull, which no push has."""
        return self._asked[-1][0].push.step if self._asked else 0

    def answers(self, timeout_seconds: float) -> bool:
        """Return whether anything listens at the shard's address."""
        probe = ClientStream(self.address, credentials=self._credentials)
        try:
            probe.open(timeout_seconds)
        except (Unreachable, NotTrusted):
            return False
        probe.close(0.0)
        return True

    def _send(self) -> None:
        if self._session is None:
            return
        leg = self.leg if self._asked_step else None
        for datagrams in leg.before() if leg is not None else ():
            self._session.say(datagrams, counted=True)
        for message, pieces in self._asked:
            if message.WhichOneof("body") == "push":
                self._session.send(message, pieces)
            else:
                self._session.say(message, counted=True)
        for datagrams in leg.after() if leg is not None else ():
            self._session.say(datagrams, counted=True)

    def _receive(self) -> tuple[pb.Reply, memoryview] | None:
        if self._session is None:
            raise StreamLost("not connected")
        message, payload = self._session.receive(self._progress_seconds)
        body = message.WhichOneof("body")
        if body == "reply" and message.reply.step == self._asked_step:
            return message.reply, payload
        if body == "halt" and self.hello.shard == 0:  # the end of the run is shard 0's to declare
            self.halt_cause = message.halt.cause
        if self._back_at is not None:
            self._stay_out(self._back_at)
        if body == "refusal" and message.refusal.step == self._asked_step:
            if message.refusal.reason == pb.REASON_QUARANTINED:
                logging.warning("%s", message.refusal.message)
                self._back_at = time.monotonic() + message.refusal.retry_after_seconds
                return None
            if message.refusal.reason == pb.REASON_NOT_MEMBER:
                raise StreamLost(message.refusal.message)
            if message.refusal.reason == pb.REASON_STALE_EPOCH:
                for asked, _ in self._asked:
                    asked.push.epoch = message.refusal.epoch
                self._send()
                return None
            raise PushRefused(message.refusal)
        return None

    def _stay_out(self, until: float) -> None:
        """Say Hello again when the term is over; hear of the run's end before."""
        if self.halt_cause:
            raise Halted(self.halt_cause)
        if time.monotonic() >= until:
            raise StreamLost("the time that this worker was put out for is over")

    def _reconnect(self, error: StreamLost) -> None:
        self._drop()
        if self.halt_cause:
            raise Halted(self.halt_cause) from error
        if self._closing.is_set():
            raise Unreachable(f"stopped while waiting for {self.address}") from error
        logging.warning("stream to %s lost (%s); reconnecting", self.address, error)
        self.connect()
        self._asked = self._make()  # what seals datagrams may be another
        self._send()

    def _drop(self) -> None:
        self._back_at = None
        if self._session is None:
            return
        self._bytes_before += self._session.stream.bytes_sent
        self._received_before += self._session.stream.bytes_received
        self._send_seconds_before += self._session.stream.send_seconds
        self._session.close(0.0)
        self._session = None
