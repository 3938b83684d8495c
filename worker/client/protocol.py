"""State machine of the protocol between a worker and a shard, without sockets or clocks.

The class `ShardProtocol` decides which requests a worker sends, repeats or gives up. A driver (the
code that owns the socket) connects the protocol to a network: `thinwire.worker.client.shard_client`
uses threads and a socket, `thinwire.simulator.exchange` a virtual clock. The driver (the code that
owns the socket) reports to the protocol: received messages (`receive`), lost streams (`lost`) and
elapsed time (`tick`). Then the driver (the code that owns the socket) performs the actions that the
protocol returns, in order.

A worker has at most one open request to a shard, a pull or a push. A worker's request stays open
through lost streams, expulsion and quarantine until the shard has replied or has rejected it for
good. The protocol sends an unanswered request again on each new stream. A repeated push has the
same step and incarnation, by which the shard recognizes the retry. The table `TRANSITIONS` lists
the states of the protocol and the triggers that lead from one state to the next.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import ClassVar

from thinwire.proto import thinwire_pb2 as pb
from thinwire.worker.core.messages import PushRequest


class State(enum.Enum):
    """State of a worker's protocol with one shard."""

    CLOSED = "there is no stream; the next Hello needs a new stream"
    JOINING = "the Hello is sent, its answer has not arrived"
    READY = "the shard has sent a Welcome; no request is open"
    REQUESTING = "the shard has sent a Welcome; the open request is sent"
    QUARANTINED = "the shard rejects all messages of this worker until a known time"
    EXPELLED = "the worker has lost its membership; it can join again with a new stream"
    ENDED = "the run is over, or the shard has rejected a Hello or request for good"


class Trigger(enum.Enum):
    """Event that can change the state of a worker's protocol with one shard."""

    JOIN = "the driver opens a stream and sends a Hello"
    WELCOME = "the shard accepts the Hello"
    REQUEST = "the open request is sent"
    SETTLED = "the shard has replied to the request, or rejected it as not finite"
    QUARANTINE = "the shard has quarantined this worker"
    EXPEL = "the shard has ended this worker's membership"
    LOST = "the stream is lost, or a quarantine is over and the stream must be replaced"
    END = "the run is over, or the shard has rejected a Hello or request for good"


_ALWAYS = {Trigger.END: State.ENDED}
_ON_A_STREAM = _ALWAYS | {
    Trigger.LOST: State.CLOSED,
    Trigger.EXPEL: State.EXPELLED,
    Trigger.QUARANTINE: State.QUARANTINED,
}

#: Maps a state to a dict from a trigger to the next state. A trigger that a state does not list is
#: invalid in that state. An invalid trigger from the driver (the code that owns the socket) raises
#: ValueError; an invalid message from the shard is ignored.
TRANSITIONS: dict[State, dict[Trigger, State]] = {
    State.CLOSED: _ALWAYS | {Trigger.JOIN: State.JOINING, Trigger.LOST: State.CLOSED},
    State.JOINING: _ON_A_STREAM | {Trigger.WELCOME: State.READY, Trigger.SETTLED: State.JOINING},
    State.READY: _ON_A_STREAM | {Trigger.REQUEST: State.REQUESTING},
    State.REQUESTING: _ON_A_STREAM | {Trigger.SETTLED: State.READY},
    State.QUARANTINED: _ON_A_STREAM | {Trigger.SETTLED: State.QUARANTINED},
    State.EXPELLED: _ALWAYS
    | {
        Trigger.JOIN: State.JOINING,
        Trigger.SETTLED: State.EXPELLED,
        Trigger.LOST: State.EXPELLED,
        Trigger.EXPEL: State.EXPELLED,
    },
    State.ENDED: {Trigger.END: State.ENDED, Trigger.LOST: State.ENDED},
}


@dataclasses.dataclass(frozen=True)
class Send:
    """Action for the driver (socket code): send a request to the shard on the open stream."""

    request: pb.Pull | pb.Query | PushRequest
    incarnation: int  # incarnation (id of one process) of this worker
    epoch: int  # newest membership epoch that any shard has sent


@dataclasses.dataclass(frozen=True)
class Replied:
    """Action for the driver (socket code): deliver the result of the open pull or push."""

    reply: pb.Reply | None  # reply of the shard; None if the shard rejected the push as not finite
    # True if the push was rejected as too large; `reply` then holds the model without it
    is_outlier: bool = False


@dataclasses.dataclass(frozen=True)
class Answered:
    """Action for the driver (socket code): deliver the state server's answer to the query."""

    answer: pb.Answer | None  # answer of the state server; None if the state server is unreachable


@dataclasses.dataclass(frozen=True)
class Rejoin:
    """Action for the driver (socket code): drop the stream, send a Hello on a new stream."""

    after: Trigger  # trigger that made the worker rejoin the shard: LOST, EXPEL or QUARANTINE


@dataclasses.dataclass(frozen=True)
class WaitUntil:
    """Action for the driver (socket code): call the protocol's `tick` at a given time."""

    when: float  # time at which `tick` must be called, in seconds by the driver's clock


@dataclasses.dataclass(frozen=True)
class Ended:
    """Action for the driver (socket code): stop, as the run is over or a request was rejected."""

    cause: str  # reason why the run ended, or text with which the shard refused the worker
    refusal: pb.Refusal | None = None  # refusal by the shard; None if the run has ended


Action = Send | Replied | Answered | Rejoin | WaitUntil | Ended

#: Reasons for which a shard rejects a Hello only for a time, so that the worker sends the Hello
#: again.
_TRANSIENT = (pb.REASON_STARTING, pb.REASON_FULL, pb.REASON_QUARANTINED)
_RETRY_SECONDS = 1.0  # seconds before the next Hello message if the shard's refusal names no delay


@dataclasses.dataclass
class NewestEpoch:
    """Newest membership epoch that any shard has sent to this worker."""

    number: int = 0

    def record(self, epoch: int) -> None:
        """Store a membership epoch from a shard if it is newer than the stored epoch."""
        self.number = max(self.number, epoch)


class ShardProtocol:
    """State machine of the messages between one worker and one shard.

    Attributes:
        state: Present state of the protocol with the shard.
        incarnation: Incarnation (id of one process) of this worker; 0 before the first Welcome
            message.
        has_joined: True if the shard has sent a Welcome message to this incarnation of the worker.
        is_expelled: True if the shard has ended this worker's membership since its last Welcome
            message.
        halt_cause: Reason why the run ended, from shard 0; empty while the run continues.
        step: Number of the exchange of the newest push; 0 if the newest request is a pull.

    Args:
        shard: Number of the shard; only shard 0 announces the end of the run.
        epochs: Newest membership epoch from any shard; the worker's protocols with all shards share
            this object.
        incarnation: Incarnation (id of one process) of this worker; 0 if the shard must assign one.
    """

    def __init__(self, shard: int, epochs: NewestEpoch, incarnation: int = 0) -> None:
        self._shard, self._epochs = shard, epochs
        self.state = State.CLOSED
        self.incarnation = incarnation
        self.has_joined = self.is_expelled = False
        self.halt_cause = ""
        self.step = 0
        self._request: pb.Pull | PushRequest | None = None
        self._is_outlier = False  # True if the shard rejected the newest push as too large
        # Query to the state server that waits for an answer; None if no query is open.
        self._query: pb.Query | None = None
        # Late answer "push" to a canceled query; None if there is none.
        self._unread: pb.Answer | None = None
        self._quarantined_until = 0.0
        self._ending = Ended("")

    @property
    def is_requesting(self) -> bool:
        """True if a pull or push waits for a reply, even if it could not be sent yet."""
        return self._request is not None

    # -- calls of the driver ------------------------------------------------------------------

    def join(self) -> None:
        """Record that the worker opens a stream to the shard and sends a Hello message."""
        self._move(Trigger.JOIN)

    def pull(self, pull: pb.Pull | None = None) -> list[Action]:
        """Request the shard's part of the model; the request stays open until the shard replies."""
        return self._open(pull or pb.Pull(), 0)

    def push(self, request: PushRequest) -> list[Action]:
        """Push the shard's part of an exchange; the request stays open until the shard replies."""
        return self._open(request, request.head.step)

    def abandon_push(self) -> list[Action]:
        """Replace the unanswered push by a pull, because other shards have answered their parts."""
        return self._pull_instead() if isinstance(self._request, PushRequest) else []

    def query(self, query: pb.Query) -> list[Action]:
        """Query the state server whether to push; a query with 0 local steps gets no answer."""
        self._query = query if query.local_steps else None
        if self.state not in (State.READY, State.REQUESTING):
            return self._settle_query(None)
        actions: list[Action] = [self._sending(query)]
        if self._query is not None and self._unread and self._unread.step == query.step:
            actions += self._settle_query(self._unread)
        return actions

    def cancel_query(self) -> None:
        """Await no answer of the state server; a late "push" then counts for the next query."""
        self._query = None

    def lost(self) -> list[Action]:
        """Record that the stream to the shard is lost, or could not be opened."""
        actions = self._settle_query(None)
        if self.halt_cause:
            return [*actions, *self._end(Ended(self.halt_cause))]
        self._move(Trigger.EXPEL if self.is_expelled else Trigger.LOST)
        if self._request is not None:
            actions.append(Rejoin(Trigger.LOST))
        return actions

    def tick(self, now: float) -> list[Action]:
        """Make this worker rejoin the shard if its quarantine is over at time `now`."""
        if self.state is not State.QUARANTINED or now < self._quarantined_until:
            return []
        self._move(Trigger.LOST)
        return [Rejoin(Trigger.QUARANTINE)]

    # -- messages of the shard ----------------------------------------------------------------

    def receive(self, message: pb.ToClient, now: float) -> list[Action]:
        """Process a shard's message; a message that is invalid in the present state is ignored."""
        handler = self._handlers.get(message.WhichOneof("body") or "")
        if handler is None or self.state in (State.CLOSED, State.ENDED):
            return []
        return handler(self, message, now)

    def _on_welcome(self, message: pb.ToClient, now: float) -> list[Action]:
        if self.state is not State.JOINING:
            return []
        self.incarnation = self.incarnation or message.welcome.incarnation
        self._epochs.record(message.welcome.epoch)
        self.has_joined, self.is_expelled = True, False
        self._move(Trigger.WELCOME)
        return self._send_request()

    def _on_reply(self, message: pb.ToClient, now: float) -> list[Action]:
        reply = message.reply
        if self._request is None or reply.step != self.step:
            return []
        self._epochs.record(reply.epoch)
        return self._settle(Replied(reply, self._is_outlier))

    def _on_answer(self, message: pb.ToClient, now: float) -> list[Action]:
        answer, query = message.answer, self._query
        if query is not None and answer.step == query.step:
            settles = answer.ready or answer.local_steps == query.local_steps
            return self._settle_query(answer) if settles else []
        if answer.ready:
            self._unread = answer
        return []

    def _on_halt(self, message: pb.ToClient, now: float) -> list[Action]:
        if self._shard == 0:
            self.halt_cause = message.halt.cause
        if self.halt_cause and self.state is State.QUARANTINED:
            return self._end(Ended(self.halt_cause))
        return []  # the stream stays open, because the shard still replies to an open request

    def _on_refusal(self, message: pb.ToClient, now: float) -> list[Action]:
        refusal = message.refusal
        if self.state is State.JOINING and not refusal.step:
            return self._on_refused_hello(refusal, now)
        if self._request is not None and refusal.step not in (self.step, 0):
            return []  # the refusal belongs to an earlier push, not to the open push
        if refusal.reason == pb.REASON_NOT_MEMBER:
            return self._on_expulsion()
        if refusal.reason == pb.REASON_QUARANTINED:
            return self._on_quarantine(now + refusal.retry_after_seconds)
        if self._request is None:
            return []
        return self._on_refused_request(refusal)

    def _on_refused_hello(self, refusal: pb.Refusal, now: float) -> list[Action]:
        if refusal.reason == pb.REASON_NOT_MEMBER:
            return self._on_expulsion()
        # A refusal with any reason may name a retry time. With the reason "id in use", the process
        # that holds the id may be dead. The id is free again when the lease of that process ends.
        if refusal.retry_after_seconds > 0:
            return self._on_quarantine(now + refusal.retry_after_seconds)
        if refusal.reason in _TRANSIENT:
            return self._on_quarantine(now + _RETRY_SECONDS)
        return self._end(Ended(refusal.message, refusal))

    def _on_expulsion(self) -> list[Action]:
        if self.state is State.EXPELLED:
            return []
        self.is_expelled = True
        self._move(Trigger.EXPEL)
        return [Rejoin(Trigger.EXPEL), *self._settle_query(None)]

    def _on_quarantine(self, until: float) -> list[Action]:
        if Trigger.QUARANTINE not in TRANSITIONS[self.state]:
            return []
        self._quarantined_until = until
        self._move(Trigger.QUARANTINE)
        return [WaitUntil(until), *self._settle_query(None)]

    def _on_refused_request(self, refusal: pb.Refusal) -> list[Action]:
        reason = refusal.reason
        if reason == pb.REASON_STALE_EPOCH:
            self._epochs.record(refusal.epoch)
            return self._send_request()
        if reason in (pb.REASON_STALE_GENERATION, pb.REASON_OUTLIER):
            self._is_outlier = reason == pb.REASON_OUTLIER
            return self._pull_instead()
        if reason == pb.REASON_NON_FINITE:
            return self._settle(Replied(None))
        # The shard refuses the stream, not a request, and then closes the stream.
        if refusal.step != self.step:
            return []
        return self._end(Ended(refusal.message, refusal))

    _handlers: ClassVar[dict[str, Callable[[ShardProtocol, pb.ToClient, float], list[Action]]]] = {
        "welcome": _on_welcome,
        "reply": _on_reply,
        "answer": _on_answer,
        "halt": _on_halt,
        "refusal": _on_refusal,
    }

    # -- helpers ------------------------------------------------------------------------------

    def _move(self, trigger: Trigger) -> None:
        """Change the protocol to the state to which a trigger leads from the present state.

        Raises:
            ValueError: The present state does not allow the trigger, which shows a bug in the
                driver.
        """
        following = TRANSITIONS[self.state].get(trigger)
        if following is None:
            raise ValueError(f"trigger {trigger.name} is invalid in state {self.state.name}")
        self.state = following

    def _open(self, request: pb.Pull | PushRequest, step: int) -> list[Action]:
        if self._request is not None:
            raise ValueError(
                f"request of step {step} began before request of step {self.step} was answered"
            )
        if self.state is State.ENDED:
            return [self._ending]
        self._request, self.step, self._is_outlier = request, step, False
        if self.state is State.QUARANTINED:
            return [WaitUntil(self._quarantined_until)]
        if self.state in (State.CLOSED, State.EXPELLED):
            return [Rejoin(Trigger.LOST)]
        return self._send_request()

    def _send_request(self) -> list[Action]:
        """Send the open request if a stream is ready; else send it after the next Welcome."""
        if self._request is None or self.state not in (State.READY, State.REQUESTING):
            return []
        if self.state is State.READY:
            self._move(Trigger.REQUEST)
        return [self._sending(self._request)]

    def _sending(self, request: pb.Pull | pb.Query | PushRequest) -> Send:
        return Send(request, self.incarnation, self._epochs.number)

    def _pull_instead(self) -> list[Action]:
        """Replace the unanswered push by a pull, to continue from the shard's model."""
        self._request, self.step = pb.Pull(), 0
        return self._send_request()

    def _settle(self, replied: Replied) -> list[Action]:
        self._move(Trigger.SETTLED)
        self._request = None
        return [replied]

    def _settle_query(self, answer: pb.Answer | None) -> list[Action]:
        """Close the open query to the state server with an answer, if a query is open."""
        if self._query is None:
            return []
        self._query = None
        return [Answered(answer)]

    def _end(self, ended: Ended) -> list[Action]:
        self._move(Trigger.END)
        self._request, self._ending = None, ended
        return [ended]
