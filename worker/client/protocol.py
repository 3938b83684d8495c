"""The conversation of one worker with one shard, without sockets, threads or clocks.

`ShardProtocol` decides what is sent, sent again and given up; `thinwire.worker.client.shard_client`
drives it with a thread and a socket, `thinwire.simulator.client` on a virtual clock. The driver
passes on what arrives (`receive`), that a stream is lost (`lost`) and that time has passed
(`tick`), and carries out, in order, the actions that each call returns.

A worker has at most one request, a pull or a push, open at a time. It stays open through lost
streams, expulsion and quarantine until the shard has replied to it or refused it for good, and is
sent again on each new stream, a push with the same step and incarnation: the shard recognises a
retry by them. The states and what leads from one to the next stand in `TRANSITIONS`.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable
from typing import ClassVar

from thinwire.proto import thinwire_pb2 as pb
from thinwire.worker.core.messages import PushRequest


class State(enum.Enum):
    """Where the conversation stands."""

    CLOSED = "no stream; a Hello on another one opens it"
    JOINING = "a Hello is under way"
    READY = "welcome; nothing is requested"
    REQUESTING = "welcome; the open request has been sent"
    QUARANTINED = "the shard accepts nothing of this worker until a certain time"
    EXPELLED = "no member any more: the stream is useless, a Hello on another one helps"
    ENDED = "the run is over, or the shard has refused for good"


class Trigger(enum.Enum):
    """What may lead to another state."""

    JOIN = "the driver opens a stream and sends a Hello"
    WELCOME = "the shard accepts the Hello"
    REQUEST = "the open request is sent"
    SETTLED = "the shard has replied to the request, or refused it for good"
    QUARANTINE = "the shard has quarantined this worker"
    EXPEL = "the shard does not count this worker as a member any more"
    LOST = "the stream is lost, or of no use after a quarantine"
    END = "nothing more can come of this conversation"


_ALWAYS = {Trigger.END: State.ENDED}
_ON_A_STREAM = _ALWAYS | {
    Trigger.LOST: State.CLOSED,
    Trigger.EXPEL: State.EXPELLED,
    Trigger.QUARANTINE: State.QUARANTINED,
}

#: State -> trigger -> next state. Whatever a state does not list is out of place in it: a mistake
#: where the driver does it, ignored where it comes from the shard.
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
    """Send a request on the present stream."""

    request: pb.Pull | pb.Query | PushRequest
    incarnation: int  # of this worker, for the message
    epoch: int  # newest membership epoch that is known


@dataclasses.dataclass(frozen=True)
class Replied:
    """The open pull or push is settled: by the message just received, if there is a reply."""

    reply: pb.Reply | None  # None: the push was refused because it is not finite
    is_outlier: bool = False  # the push was refused for its size; this is the model without it


@dataclasses.dataclass(frozen=True)
class Answered:
    """The open query is settled."""

    answer: pb.Answer | None  # None: the state server is away


@dataclasses.dataclass(frozen=True)
class Rejoin:
    """Drop the stream, and send a Hello on another one."""

    after: Trigger  # LOST, EXPEL or QUARANTINE


@dataclasses.dataclass(frozen=True)
class WaitUntil:
    """Call `tick` at this time."""

    when: float  # seconds, by the driver's clock


@dataclasses.dataclass(frozen=True)
class Ended:
    """Nothing more can come of this conversation."""

    cause: str  # why the run ended, or what was refused
    refusal: pb.Refusal | None = None  # None: the run has ended


Action = Send | Replied | Answered | Rejoin | WaitUntil | Ended

#: A Hello refused for these reasons may be accepted a little later.
_TRANSIENT = (pb.REASON_STARTING, pb.REASON_FULL, pb.REASON_QUARANTINED)
_RETRY_SECONDS = 1.0  # where such a refusal names no time


class NewestEpoch:
    """The newest membership epoch that a worker knows of, from whichever shard."""

    def __init__(self) -> None:
        self.number = 0

    def record(self, epoch: int) -> None:
        """Take note of an epoch that a shard has named; older ones change nothing."""
        self.number = max(self.number, epoch)


class ShardProtocol:
    """One worker's conversation with one shard.

    Attributes:
        state: Where it stands.
        incarnation: Of this worker; 0 until the first Welcome names it.
        has_joined: Whether the shard has welcomed this incarnation.
        is_expelled: Whether the shard has ended this worker's membership since its last Welcome.
        halt_cause: Why the run has ended, by shard 0; empty while it goes on.
        step: Of the newest request: that of the push; 0 of a pull.

    Args:
        shard: Its number; only shard 0 declares the end of the run.
        epochs: Shared by all conversations of the worker.
        incarnation: If it is known already.
    """

    def __init__(self, shard: int, epochs: NewestEpoch, incarnation: int = 0) -> None:
        self._shard, self._epochs = shard, epochs
        self.state = State.CLOSED
        self.incarnation = incarnation
        self.has_joined = self.is_expelled = False
        self.halt_cause = ""
        self.step = 0
        self._request: pb.Pull | PushRequest | None = None
        self._is_outlier = False  # the newest push was refused for its size
        self._query: pb.Query | None = None  # that waits for its answer
        self._unread: pb.Answer | None = None  # "push", to a query that was given up
        self._quarantined_until = 0.0
        self._ending = Ended("")

    @property
    def is_requesting(self) -> bool:
        """Whether a pull or a push is open, sent or not."""
        return self._request is not None

    # -- what the driver does -----------------------------------------------------------------

    def join(self) -> None:
        """Note that a stream is being opened, with a Hello as its first message."""
        self._move(Trigger.JOIN)

    def pull(self, pull: pb.Pull | None = None) -> list[Action]:
        """Open a request for the shard's part of the model."""
        return self._open(pull or pb.Pull(), 0)

    def push(self, request: PushRequest) -> list[Action]:
        """Open a request that hands in the shard's part of an exchange."""
        return self._open(request, request.step)

    def abandon_push(self) -> list[Action]:
        """Give up a push: other shards have settled their parts of it. A pull takes its place."""
        return self._pull_instead() if isinstance(self._request, PushRequest) else []

    def query(self, query: pb.Query) -> list[Action]:
        """Query the state server whether to push; it answers only where steps have been done."""
        self._query = query if query.local_steps else None
        if self.state not in (State.READY, State.REQUESTING):
            return self._settle_query(None)
        actions: list[Action] = [self._sending(query)]
        if self._query is not None and self._unread and self._unread.step == query.step:
            actions += self._settle_query(self._unread)
        return actions

    def cancel_query(self) -> None:
        """Wait no longer for an answer; one that comes later still counts if it is "push"."""
        self._query = None

    def lost(self) -> list[Action]:
        """Take note that the stream is gone, or could not be opened."""
        actions = self._settle_query(None)
        if self.halt_cause:
            return [*actions, *self._end(Ended(self.halt_cause))]
        self._move(Trigger.EXPEL if self.is_expelled else Trigger.LOST)
        if self._request is not None:
            actions.append(Rejoin(Trigger.LOST))
        return actions

    def tick(self, now: float) -> list[Action]:
        """Do what time has made due."""
        if self.state is not State.QUARANTINED or now < self._quarantined_until:
            return []
        self._move(Trigger.LOST)
        return [Rejoin(Trigger.QUARANTINE)]

    # -- what the shard sends -----------------------------------------------------------------

    def receive(self, message: pb.ToClient, now: float) -> list[Action]:
        """Take in a message; one that does not belong here changes nothing."""
        handler = self._handlers.get(message.WhichOneof("body") or "")
        if handler is None or self.state in (State.CLOSED, State.ENDED):
            return []
        return handler(self, message, now)

    def _on_welcome(self, message: pb.ToClient, now: float) -> list[Action]:
        del now
        if self.state is not State.JOINING:
            return []
        self.incarnation = self.incarnation or message.welcome.incarnation
        self._epochs.record(message.welcome.epoch)
        self.has_joined, self.is_expelled = True, False
        self._move(Trigger.WELCOME)
        return self._send_request()

    def _on_reply(self, message: pb.ToClient, now: float) -> list[Action]:
        del now
        reply = message.reply
        if self._request is None or reply.step != self.step:
            return []
        self._epochs.record(reply.epoch)
        return self._settle(Replied(reply, self._is_outlier))

    def _on_answer(self, message: pb.ToClient, now: float) -> list[Action]:
        del now
        answer, query = message.answer, self._query
        if query is not None and answer.step == query.step:
            settles = answer.ready or answer.local_steps == query.local_steps
            return self._settle_query(answer) if settles else []
        if answer.ready:
            self._unread = answer
        return []

    def _on_halt(self, message: pb.ToClient, now: float) -> list[Action]:
        del now
        if self._shard == 0:
            self.halt_cause = message.halt.cause
        if self.halt_cause and self.state is State.QUARANTINED:
            return self._end(Ended(self.halt_cause))
        return []  # an open request is still replied to

    def _on_refusal(self, message: pb.ToClient, now: float) -> list[Action]:
        refusal = message.refusal
        if self.state is State.JOINING and not refusal.step:
            return self._on_refused_hello(refusal, now)
        if self._request is not None and refusal.step not in (self.step, 0):
            return []  # of an earlier push
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
        if refusal.retry_after_seconds > 0:  # also of an id whose holder may turn out to be dead
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
        if refusal.step != self.step:  # of no request: the shard ends the stream by itself
            return []
        return self._end(Ended(refusal.message, refusal))

    _handlers: ClassVar[dict[str, Callable[[ShardProtocol, pb.ToClient, float], list[Action]]]] = {
        "welcome": _on_welcome,
        "reply": _on_reply,
        "answer": _on_answer,
        "halt": _on_halt,
        "refusal": _on_refusal,
    }

    # -- parts of these -----------------------------------------------------------------------

    def _move(self, trigger: Trigger) -> None:
        """Go to the next state.

        Raises:
            ValueError: There is none; only a driver that is wrong can bring this about.
        """
        following = TRANSITIONS[self.state].get(trigger)
        if following is None:
            raise ValueError(f"{trigger.name} has no place in state {self.state.name}")
        self.state = following

    def _open(self, request: pb.Pull | PushRequest, step: int) -> list[Action]:
        if self._request is not None:
            raise ValueError(f"step {step} before the request of step {self.step} is settled")
        if self.state is State.ENDED:
            return [self._ending]
        self._request, self.step, self._is_outlier = request, step, False
        if self.state is State.QUARANTINED:
            return [WaitUntil(self._quarantined_until)]
        if self.state in (State.CLOSED, State.EXPELLED):
            return [Rejoin(Trigger.LOST)]
        return self._send_request()

    def _send_request(self) -> list[Action]:
        """Send the open request if it can be sent now; else the next Welcome does."""
        if self._request is None or self.state not in (State.READY, State.REQUESTING):
            return []
        if self.state is State.READY:
            self._move(Trigger.REQUEST)
        return [self._sending(self._request)]

    def _sending(self, request: pb.Pull | pb.Query | PushRequest) -> Send:
        return Send(request, self.incarnation, self._epochs.number)

    def _pull_instead(self) -> list[Action]:
        """Go on with the shard's model where it does not want the push."""
        self._request, self.step = pb.Pull(), 0
        return self._send_request()

    def _settle(self, replied: Replied) -> list[Action]:
        self._move(Trigger.SETTLED)
        self._request = None
        return [replied]

    def _settle_query(self, answer: pb.Answer | None) -> list[Action]:
        """Answer the open query, if there is one."""
        if self._query is None:
            return []
        self._query = None
        return [Answered(answer)]

    def _end(self, ended: Ended) -> list[Action]:
        self._move(Trigger.END)
        self._request, self._ending = None, ended
        return [ended]
