"""A simulated worker's dealings with one shard: one question at a time, until it is answered."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from absl import logging

from thinwire.ops.types import Link
from thinwire.ops.wire.blocks import IndexChooser
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import frame
from thinwire.ps.core import events
from thinwire.simulator.clock import Clock
from thinwire.simulator.links import ClassPipe, Pipe, SimulatedConnection, sizes_on_wire
from thinwire.simulator.messages import ReplyInFlight
from thinwire.simulator.shard import Port, SimulatedShard
from thinwire.simulator.wording import EncodedMessage, PushEncoder
from thinwire.worker.core.messages import PushRequest, ShardReply

if TYPE_CHECKING:
    from thinwire.simulator.streams import Streams

_ENTROPY = 73  # of the pauses between attempts to reach a shard
_PULL_SIZES = sizes_on_wire([frame(pb.ToServer(pull=pb.Pull()))])


class SimulatedClient:
    """What `thinwire.worker.client.shard_client.ShardClient` is to a real worker, without waiting.

    Attributes:
        connection: The stream to the shard.
        step: Of the newest push in question; 0: a pull.

    Args:
        streams: Whose part this is.
        shard: Which shard.
        wording: Of pushes to it.
        up: The worker's way up.
        down: What comes from this shard.
        seed: Of what befalls on the link.
        clock: Virtual time.
    """

    def __init__(
        self,
        streams: Streams,
        shard: SimulatedShard,
        wording: PushEncoder,
        up: Pipe | ClassPipe,
        down: Link,
        seed: int,
        clock: Clock,
    ) -> None:
        self._streams, self._shard, self._clock = streams, shard, clock
        self._wording, self._leg = wording, wording.leg
        rng = np.random.default_rng([_ENTROPY, seed, shard.number])
        self.connection = SimulatedConnection(
            streams.number, shard, up, clock, down.delay_ms / 1e3, rng
        )
        pipe = Pipe(down, seed + 1 + shard.number)
        self._port = Port(self._ear, pipe, wording.chunk_bytes, self.connection)
        shard.ports[streams.number] = self._port
        self.step = 0

    def begin_life(self) -> None:
        """Belong to another life of the worker: nothing is open or asked."""
        self._make: Callable[[], list[EncodedMessage]] | None = None  # makes the open question
        self._is_outlier = False  # the newest push was refused for its size
        self._wording.begin_life()
        self._port.chooser = IndexChooser()
        self.connection.begin()

    @property
    def is_asking(self) -> bool:
        """Whether a question is open."""
        return self._make is not None

    @property
    def bytes_down(self) -> int:
        """Training bytes that the shard has sent here."""
        return self._port.down.num_bytes

    # -- what is asked ----------------------------------------------------------------------

    def hello(self, reconnects: bool = False) -> None:
        """Introduce the worker on another stream, as soon as one can be opened."""
        streams, number = self._streams, self._shard.number
        join = events.Join(streams.number, streams.incarnation, reconnects, "a simulated worker")
        say = functools.partial(streams.tell, number, join, [], False)
        self.connection.dial(say, streams.give_up, streams.patience_seconds)

    def pull(self) -> None:
        """Ask for the shard's part of the model."""
        pull = events.Pull(self._streams.number, self._streams.incarnation, None, 0)
        self._ask(0, lambda: [(pull, _PULL_SIZES)])

    def push(self, outgoing: PushRequest) -> None:
        """Hand in the shard's part of an exchange."""
        self._is_outlier = False
        self._ask(outgoing.step, functools.partial(self._push, outgoing))

    def _push(self, outgoing: PushRequest) -> list[EncodedMessage]:
        return self._wording.push(outgoing, self._streams.incarnation, self._streams.epoch)

    def _ask(self, step: int, make: Callable[[], list[EncodedMessage]]) -> None:
        """Put a question that stays open until it is answered.

        Args:
            step: Of the push; 0 of a pull.
            make: Makes the messages, anew whenever they are sent.
        """
        self._make, self.step = make, step
        tell, number = self._streams.tell, self._shard.number
        for event, sizes in make():
            tell(number, event, sizes, counted=True)
        for event, sizes in self._wording.behind() if step else ():
            tell(number, event, sizes, counted=True)

    def _ask_again(self) -> None:
        if self._make is not None:
            self._ask(self.step, self._make)

    # -- what is heard ----------------------------------------------------------------------

    def _ear(self, stream: int, message: Any) -> Callable[[], None]:
        """Return what lets the worker hear a message on a stream; on no later one it does."""
        return functools.partial(self._hear, stream, message)

    def _hear(self, stream: int, message: Any) -> None:
        again = functools.partial(self._hear, stream, message)
        if not self.connection.hears(stream, again):
            return
        if self._clock.now < self._streams.asleep_until:
            self._clock.at(self._streams.asleep_until, again)
            return
        self._handlers[type(message)](self, message)

    def _welcome(self, welcome: events.Welcome) -> None:
        self._streams.note_epoch(welcome.epoch)
        if self._leg is not None:
            incarnation = self._streams.incarnation
            self._leg.opened("", self._shard.introduction(self._streams.number, incarnation))
        self._ask_again()  # where this Hello was said in the middle of a question
        self._streams.welcomed(self._shard.number, welcome.last_step)

    def _answer(self, answer: events.Answer) -> None:
        self._streams.listener.answered(answer)

    def _reply(self, replied: ReplyInFlight) -> None:
        if self.is_asking and replied.step == self.step:
            self._streams.note_epoch(replied.epoch)
            reply = self._with_losses(replied)
            self._settle(dataclasses.replace(reply, refused=self._is_outlier))

    def _with_losses(self, replied: ReplyInFlight) -> ShardReply:
        if self._leg is None or not replied.step:
            return replied.reply
        lost = self._leg.heard(replied.reception or pb.DatagramOutcome())
        return dataclasses.replace(replied.reply, lost=lost)

    def _settle(self, reply: ShardReply | None) -> None:
        self._make = None
        self._streams.settle(self._shard.number, reply)

    # -- what is refused --------------------------------------------------------------------

    def _refusal(self, refusal: events.Reject) -> None:
        if self.is_asking and refusal.step not in (self.step, 0):
            return
        streams, remedy = self._streams, self._remedies.get(refusal.reason)
        if remedy is None:
            logging.error("worker %d is refused: %s", streams.number, refusal.message)
            streams.listener.refused()
        elif self.is_asking or refusal.reason == "QUARANTINED":
            remedy(self, refusal)
        elif refusal.reason == "NOT_MEMBER":  # to a query: nothing else is open then
            self.hello(reconnects=True)
            streams.listener.answered(None)

    def _send_with_epoch(self, refusal: events.Reject) -> None:
        self._streams.note_epoch(refusal.epoch)
        self._ask_again()

    def _hello_again(self, refusal: events.Reject) -> None:
        del refusal
        self.hello(reconnects=True)

    def _pull_again(self, refusal: events.Reject) -> None:
        del refusal
        self.pull()

    def _pull_for_outlier(self, refusal: events.Reject) -> None:
        del refusal
        self._is_outlier = True
        self.pull()

    def _come_back(self, refusal: events.Reject) -> None:
        """Say Hello again when the term is over, if this life lasts so long."""
        life = self._streams.incarnation

        def come_back() -> None:
            if self._streams.lives(life):
                self.hello(reconnects=True)

        self._clock.at(self._clock.now + refusal.retry_after_seconds, come_back)

    def _do_without(self, refusal: events.Reject) -> None:
        del refusal
        self._settle(None)

    _handlers: ClassVar[dict[type, Any]] = {
        events.Welcome: _welcome,
        events.Reject: _refusal,
        events.Answer: _answer,
        ReplyInFlight: _reply,
    }
    _remedies: ClassVar[dict[str, Any]] = {
        "STALE_EPOCH": _send_with_epoch,
        "NOT_MEMBER": _hello_again,
        "STALE_GENERATION": _pull_again,
        "NON_FINITE": _do_without,
        "OUTLIER": _pull_for_outlier,
        "QUARANTINED": _come_back,
    }
