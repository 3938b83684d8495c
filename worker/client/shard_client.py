"""A worker's client of one shard: waits for replies, queries, and reconnects.

The training thread opens a request and waits for the reply, reconnecting if the stream is lost.
While no request is open, the heartbeat thread services the stream to the shard.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from absl import logging

from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.grpc import StreamLost, Unreachable
from thinwire.proto.grpc.session import RequestRejected, jitter
from thinwire.worker.client.protocol import Replied, State
from thinwire.worker.client.shard_connection import ShardConnection

#: Longest time, in seconds, that a query to the state server waits for the stream's lock while the
#: heartbeat thread reconnects the stream.
_QUERY_TURN_SECONDS = 0.05
#: Length, in seconds, of one wait for a shard's reply. The worker services the other shards'
#: requests between two waits.
_POLL_SECONDS = 0.1


class PushRefused(Exception):
    """Raised if a shard rejected a push or pull for good; the stream to the shard stays open."""

    def __init__(self, refusal: pb.Refusal) -> None:
        super().__init__(refusal.message)
        self.reason: int = refusal.reason


class ShardGone(Exception):
    """Raised if the run has ended and the shard has closed its stream to this worker."""


class ShardClient(ShardConnection):
    """Waits for a shard's replies and answers, with automatic reconnection."""

    @property
    def is_member(self) -> bool:
        """True if this worker is a member, whose queries the shard accepts, as far as it knows."""
        return self.protocol.state in (State.READY, State.REQUESTING)

    @property
    def halt_cause(self) -> str:
        """Reason why the run ended, from this shard; an empty text while the run continues."""
        return self.protocol.halt_cause

    # -- requests (training thread) -----------------------------------------------------------

    def wait_for_reply(
        self, meanwhile: Callable[[], None] | None = None
    ) -> tuple[Replied, memoryview]:
        """Wait for the reply to the open request; reconnect if the stream is lost.

        Args:
            meanwhile: Function that is called about every 0.1 s during the wait, to service the
                requests to other shards.

        Returns:
            The result of the push or pull, and the payload of the shard's reply.

        Raises:
            PushRefused: The shard rejected the pull or push for good.
            Unreachable, RequestRejected: The shard stayed unreachable, or rejected this worker.
            ShardGone: The run has ended, and the shard has closed its stream to this worker.
        """
        try:
            while self._replied is None:
                self.poll(math.inf if meanwhile is None else _POLL_SECONDS)
                if meanwhile is not None:
                    meanwhile()
            return self._replied, self._payload
        finally:
            self._in_use, self._replied = False, None

    def poll(self, seconds: float = 0.0) -> None:
        """Receive and process at most one message of the shard; wait at most `seconds` for it.

        A shard's message may require an action of this worker, for example a repeated push. Other
        workers may wait for this worker's repeated push at one shard while this worker waits for
        another shard.

        Raises:
            PushRefused, Unreachable, RequestRejected, ShardGone: The shard rejected the request,
                stayed unreachable, rejected this worker, or closed the stream after the run's end.
        """
        if self._replied is not None or not self._in_use:
            return
        self._raise_if_ended()
        if self._abandons:
            self._abandon()
        try:
            if self._session is None:
                raise self._lost_by or StreamLost("not connected")
            received = self._session.listen_for(seconds)
        except StreamLost as error:
            self._reconnect(error)
            return
        if received is not None:
            self._receive(*received)
        self._perform(self.protocol.tick(time.monotonic()))
        self._raise_if_ended()

    def abandon_push(self) -> None:
        """Make the training thread replace the unanswered push by a pull (from any thread)."""
        self._abandons = self.protocol.is_requesting and self.protocol.step > 0

    def _abandon(self) -> None:
        self._abandons = False
        logging.warning(
            "expelled during an exchange: the worker abandons its push; shard %s may lack a part",
            self.address,
        )
        self._perform(self.protocol.abandon_push())

    # -- queries (training thread) ------------------------------------------------------------

    def notify(self, query: pb.Query) -> None:
        """Send a query to the state server (in shard 0) without waiting for an answer."""
        self.send(pb.ToServer(query=query), counted=True)

    def query(self, query: pb.Query, patience_seconds: float | None) -> pb.Answer | None:
        """Send a query to the state server and wait for the answer.

        Args:
            query: Query to the state server whether this worker must push in the current round.
            patience_seconds: Longest time to wait for the answer, in seconds; None waits while the
                shard is alive.

        Returns:
            The answer, or an earlier answer "push" of this round. None if no answer arrived in time
            or the stream is lost; the heartbeat thread or the next push reconnects a lost stream.
        """
        if not self._turn.acquire(
            timeout=_QUERY_TURN_SECONDS
        ):  # the heartbeat thread holds the stream's lock while it reconnects
            return None
        self._in_use, self._answered = True, None
        try:
            self._perform(self.protocol.query(query))
        finally:
            self._turn.release()
        try:
            self._wait_for_answer(patience_seconds)
            return self._answered.answer if self._answered is not None else None
        finally:
            self.protocol.cancel_query()
            self._in_use = False

    def _wait_for_answer(self, patience_seconds: float | None) -> None:
        """Receive the shard's messages until the query is answered or the time limit has passed."""
        waited_from = time.monotonic()
        while self._answered is None and (session := self._session) is not None:
            try:
                received = (
                    session.listen()
                    if patience_seconds is None
                    else session.poll(waited_from + patience_seconds - time.monotonic())
                )
            except StreamLost as error:
                logging.warning(
                    "stream to shard %s lost (%s); continuing local steps", self.address, error
                )
                self._lose(error)
                return
            if received is None:
                return
            self._receive(*received)

    def _raise_if_ended(self) -> None:
        if self._ended is None:
            return
        if self._ended.refusal is not None:
            raise PushRefused(self._ended.refusal)
        raise ShardGone(self._ended.cause)

    # -- the stream -------------------------------------------------------------------------

    def connect(self) -> pb.Welcome:
        """Try to connect to the shard until it sends a Welcome message.

        Raises:
            Unreachable: The shard did not answer within the time limit for reconnecting.
            RequestRejected: The shard rejected this worker for good.
        """
        return self._join(lambda: self._dialler.dial(self.patience_seconds))

    def ensure_connected(self) -> None:
        """Reconnect if the shard has sent nothing recently; send the open request again.

        Raises:
            Unreachable, RequestRejected: The shard stayed unreachable, or rejected this worker.
            ShardGone: The run has ended, and the shard has closed its stream to this worker.
        """
        if not self.alive:
            self._reconnect(StreamLost("the shard sends no heartbeats"))

    def attend(self, may_rejoin: Callable[[], bool] = lambda: True) -> None:
        """Service the shard's stream while no request is open (called in the heartbeat thread).

        A worker may compute for a long time, or wait long for another shard. While the worker
        computes or waits for another shard, the method `attend` notices that the shard has expelled
        the worker or that the stream is lost, and reconnects before the worker's lease ends or soon
        after.

        Args:
            may_rejoin: Function that returns True if an expelled worker may send a Hello message
                now.
        """
        if not self._turn.acquire(blocking=False):
            return
        try:
            if self._in_use or self.closing.is_set() or self.halt_cause:
                return
            self._receive_unrequested()
            # The message with the run's end has just arrived, after which the shard closes the
            # stream.
            if self.protocol.halt_cause:
                return
            lost = self._session is None and time.monotonic() >= self._try_again_at
            if lost and (not self.protocol.is_expelled or may_rejoin()):
                self._revive()
        finally:
            self._turn.release()

    def _receive_unrequested(self) -> None:
        """Process the shard's arrived messages; drop the stream if it is lost or silent."""
        try:
            while self._session is not None and (received := self._session.poll(0.0)) is not None:
                self._receive(*received)
            if self._session is not None and self._session.silent:
                self._arrivals.record_alarm()
                raise StreamLost(f"{self.address} sent nothing for too long")
        except StreamLost as error:
            logging.warning("lost the gRPC stream to PS shard %s (%s)", self.address, error)
            self._pauses.num_pauses, self._try_again_at = 0, 0.0
            self._lose(error)
        self._perform(self.protocol.tick(time.monotonic()))

    def _revive(self) -> None:
        """Try once to reconnect to the shard; after a failure, the next request tries again."""
        try:
            self._join(self._dialler.attempt)
        except (Unreachable, StreamLost, RequestRejected):
            self._try_again_at = time.monotonic() + self._pauses.next_seconds(jitter())

    def _reconnect(self, error: StreamLost) -> None:
        with self._turn:
            self._lose(error)
            self._raise_if_ended()
            if self.closing.is_set():
                raise Unreachable(f"stopped while waiting for {self.address}") from error
            logging.warning("stream to shard %s lost (%s); reconnecting", self.address, error)
            if self.protocol.is_expelled:
                self.before_rejoining()
            if self._abandons:
                self._abandon()
            self.connect()
