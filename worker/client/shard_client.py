"""A worker's dealings with one shard: one question at a time, asked until it is answered."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from absl import logging

from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.grpc import StreamLost, Unreachable
from thinwire.worker.client.messages import Spoken
from thinwire.worker.client.shard_line import ShardLine

#: How long a question whose answer is not waited for waits for its turn.
_QUERY_TURN_SECONDS = 0.05
#: How long to listen to one shard before a look at the others.
_GLANCE_SECONDS = 0.1


class PushRefused(Exception):
    """A push was judged and not applied; `reason` says why. The stream stands."""

    def __init__(self, refusal: pb.Refusal) -> None:
        super().__init__(refusal.message)
        self.reason: int = refusal.reason


class ShardGone(Exception):
    """The run has ended and the shard is gone."""


class ShardClient(ShardLine):
    """One shard as a worker sees it; reconnects by itself, repeats what was not answered.

    See ShardLine for the arguments.

    Attributes:
        before_rejoining: Called when this worker was let go, before it says Hello again.
        on_welcome: Called with the Welcome of each stream.
    """

    def __init__(self, *line: Any, **choices: Any) -> None:
        """Nothing is dialled yet."""
        super().__init__(*line, **choices)
        self._make: Callable[[], list[Spoken]] = list  # makes what is asked
        self._asked: list[Spoken] = []
        self._outcome: tuple[pb.Reply, memoryview] | PushRefused | None = None
        self._gives_up = False
        self._back_at: float | None = None  # put out until then; the stream stands
        self.before_rejoining: Callable[[], None] = lambda: None
        self.on_welcome: Callable[[pb.Welcome], None] = lambda welcome: None

    def ask(self, make: Callable[[], list[Spoken]]) -> None:
        """Queue a pull or a push.

        Args:
            make: Makes the messages, again after a reconnection; the pieces of their payloads must
                not change until they are answered.
        """
        with self._turn:
            self._asking, self._outcome, self._gives_up = True, None, False
            self._make = make
            self._asked = make()
            self._send()

    def answer(self, meanwhile: Callable[[], None] | None = None) -> tuple[pb.Reply, memoryview]:
        """Wait for the answer, through reconnections.

        Args:
            meanwhile: Called now and then; looks after what is asked elsewhere.

        Raises:
            PushRefused: The shard judged the push and did not apply it.
            Unreachable, Refused: The shard is gone for good.
            Halted: It is gone because the run has ended.
        """
        try:
            while self._outcome is None:
                self.glance(math.inf if meanwhile is None else _GLANCE_SECONDS)
                if meanwhile is not None:
                    meanwhile()
            outcome = self._outcome
        finally:
            self._asking, self._asked, self._outcome = False, [], None
        if isinstance(outcome, PushRefused):
            raise outcome
        return outcome

    def glance(self, seconds: float = 0.0) -> None:
        """Take in one message of the shard, if one comes in this time.

        Answers may need the worker to do something, such as to send a push again: others may be
        waiting for it at this shard while the worker waits at another one.

        Raises:
            Unreachable, Refused, Halted: As `answer` does.
        """
        if self._outcome is not None or not self._asking:
            return
        if self._gives_up:
            self._outcome = PushRefused(pb.Refusal(reason=pb.REASON_NOT_MEMBER))
            return
        try:
            self._outcome = self._receive(seconds)
        except PushRefused as refusal:
            self._outcome = refusal
        except StreamLost as error:
            self._reconnect(error)

    def give_up_push(self) -> None:
        """Wait no longer for what becomes of the push in question (any thread)."""
        self._gives_up = self._asking and self._asked_step > 0

    def reach(self) -> None:
        """Open the stream again if the shard is not heard; what was asked is asked again.

        Raises:
            Unreachable, Refused: The shard is gone for good.
        """
        if not self.alive:
            self._reconnect(StreamLost("not heard"))

    def tell(self, query: pb.Query) -> None:
        """Send the state server a query that is not answered."""
        self.say(pb.ToServer(query=query), counted=True)

    def query(self, query: pb.Query, patience_seconds: float | None) -> pb.Answer | None:
        """Ask the state server.

        Args:
            query: The question.
            patience_seconds: How long to wait for its answer; None: as long as the shard lives.

        Returns:
            The answer, or an earlier one of this round that says "push"; None where neither came,
            or the stream is lost: it is opened again meanwhile, or by the next push.
        """
        if not self._turn.acquire(timeout=_QUERY_TURN_SECONDS):  # it is being dialled again
            return None
        self._asking = True
        self._turn.release()
        try:
            self.tell(query)
            return self._answer_within(query, patience_seconds)
        except StreamLost as error:
            logging.warning("stream to %s lost (%s); training on", self.address, error)
            self._drop()
            return None
        finally:
            self._asking = False

    def _answer_within(self, query: pb.Query, patience_seconds: float | None) -> pb.Answer | None:
        waited_from = time.monotonic()
        while (session := self._session) is not None:
            received = (
                session.listen()
                if patience_seconds is None
                else session.poll(waited_from + patience_seconds - time.monotonic())
            )
            if received is None:
                return None
            answer = self._answer_to(query, received[0])
            if answer is not None:
                return answer
        return None

    def _answer_to(self, query: pb.Query, message: pb.ToClient) -> pb.Answer | None:
        """Return the answer in a message, if it settles this query."""
        self._note(message)
        if message.WhichOneof("body") != "answer" or message.answer.step != query.step:
            return None
        settles = message.answer.ready or message.answer.local_steps == query.local_steps
        return message.answer if settles else None

    @property
    def _asked_step(self) -> int:
        """The step of the push in question; 0 of a pull, which no push has."""
        return self._asked[-1][0].push.step if self._asked else 0

    def _adopt(self, *found: Any) -> pb.Welcome:
        welcome = super()._adopt(*found)
        self.on_welcome(welcome)
        return welcome

    def _send(self) -> None:
        if self._session is None:
            return
        leg = self.leg if self._asked_step else None
        for datagrams in leg.before() if leg is not None else ():
            self._session.send_control(datagrams, counted=True)
        for message, pieces in self._asked:
            if message.WhichOneof("body") == "push":
                self._session.send(message, pieces)
            else:
                self._session.send_control(message, counted=True)
        for datagrams in leg.after() if leg is not None else ():
            self._session.send_control(datagrams, counted=True)

    def _receive(self, seconds: float) -> tuple[pb.Reply, memoryview] | None:
        if self._session is None:
            raise StreamLost("not connected")
        if (heard := self._session.listen_for(seconds)) is None:
            return None
        message, payload = heard
        body = message.WhichOneof("body")
        if body == "reply" and message.reply.step == self._asked_step:
            return message.reply, payload
        is_refusal = body == "refusal" and message.refusal.step == self._asked_step
        if is_refusal or body == "halt":
            self._note(message)
        if self._back_at is not None:
            self._stay_out(self._back_at)
        if is_refusal:
            self._judge(message.refusal)
        return None

    def _judge(self, refusal: pb.Refusal) -> None:
        """Do what a refusal of what was asked wants.

        Raises:
            PushRefused: Nothing can be done here.
        """
        if refusal.reason == pb.REASON_QUARANTINED:
            logging.warning("%s", refusal.message)
            self._back_at = time.monotonic() + refusal.retry_after_seconds
        elif refusal.reason == pb.REASON_STALE_EPOCH:
            for asked, _ in self._asked:
                asked.push.epoch = refusal.epoch
            self._send()
        else:
            raise PushRefused(refusal)

    def _stay_out(self, until: float) -> None:
        """Say Hello again when the term is over; hear of the run's end before."""
        if self.halt_cause:
            raise ShardGone(self.halt_cause)
        if time.monotonic() >= until:
            raise StreamLost("the time that this worker was put out for is over")

    def _reconnect(self, error: StreamLost) -> None:
        with self._turn:
            self._drop()
            if self.halt_cause:
                raise ShardGone(self.halt_cause) from error
            if self._closing.is_set():
                raise Unreachable(f"stopped while waiting for {self.address}") from error
            logging.warning("stream to %s lost (%s); reconnecting", self.address, error)
            if self.is_expelled:
                self.before_rejoining()
            self.connect()
            if self._asked and not self._gives_up:
                self._asked = self._make()  # what seals datagrams may be another
                self._send()

    def _drop(self) -> None:
        self._back_at = None
        super()._drop()
