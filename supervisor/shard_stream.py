"""The gRPC streams to the shards of a client that trains no model, such as the Supervisor."""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections.abc import Callable, Iterable

from absl import logging

from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.grpc import StreamLost
from thinwire.proto.grpc.session import ClientSession, Dialler, RequestRejected, rhythm
from thinwire.runtime.run.settings import Run
from thinwire.runtime.telemetry import run_status

#: Queue of batches of measured rounds from the shard: (worker id, packed rounds).
Batches = queue.SimpleQueue[tuple[int, str]]


def dialler_of(
    run: Run, shard: int, hello: Callable[[], pb.Hello], most_bytes: int, closing: threading.Event
) -> Dialler:
    """Return the object that connects a client, which trains no model, to a shard of a run.

    Args:
        run: Settings of the training run.
        shard: Number of the shard, from 0.
        hello: Function that returns the client's first message of a new stream.
        most_bytes: Limit of the payload of a message from the shard, in bytes.
        closing: Event that is set when the client must stop.
    """
    leader, address, arrivals = run.addresses[0], run.addresses[shard], rhythm()

    def make() -> ClientSession:
        credentials = run.credentials
        return ClientSession(
            address, hello(), most_bytes, credentials=credentials, arrivals=arrivals
        )

    return Dialler(f"the PS at {address}", make, closing, (pb.REASON_STARTING,), leader)


class ShardStream:
    """The Supervisor's stream to one shard, read by a separate thread.

    Args:
        session: Session with the shard, which the shard has accepted.
        rounds: Queue that receives the batches of the workers' measured training rounds.

    Attributes:
        evaluated: Queue of evaluations that the evaluator or a script reported, as they arrive.
        validates: True if a worker's script has begun a call of fit with validation data.
        replies: Queue of the shard's answers to pulls, as (reply, payload). None means that the
            shard rejected a pull or that the stream ended.
        status: Newest status of the run; None before the first status.
        halt_cause: Reason why the run ended; empty while the run continues.
        lost: Event that is set after the stream from the shard has ended.
    """

    def __init__(self, session: ClientSession, rounds: Batches) -> None:
        self.session, self._rounds = session, rounds
        self.evaluated: queue.SimpleQueue[pb.Evaluated] = queue.SimpleQueue()
        self.validates = False
        # Rejection by the shard; None if the shard did not reject the client.
        self.refusal: pb.Refusal | None = None
        self.replies: queue.SimpleQueue[tuple[pb.Reply, memoryview] | None] = queue.SimpleQueue()
        self.status: run_status.RunStatus | None = None
        self.halt_cause = ""
        self.lost = threading.Event()
        threading.Thread(target=self._read, name="observer", daemon=True).start()

    def _read(self) -> None:
        try:
            while True:
                message, payload = self.session.listen()
                body = message.WhichOneof("body")
                if body == "reply":
                    self.replies.put((message.reply, payload))
                elif body == "report" and message.report.rounds:
                    self._rounds.put((message.report.worker, message.report.rounds))
                elif body == "report":
                    self.status = run_status.RunStatus.from_json(message.report.document)
                elif body == "fit_begun":
                    self.validates |= message.fit_begun.validates
                elif body == "evaluated":
                    self.evaluated.put(message.evaluated)
                elif body == "halt":
                    self.halt_cause = message.halt.cause
                elif body == "refusal":
                    self.refusal = message.refusal
                    self.replies.put(None)
        except StreamLost as error:
            if not self.halt_cause:  # normal end: the shard closes the stream after a Halt
                logging.info("the Supervisor lost its stream to the PS: %s", error)
        except ValueError as error:
            logging.error("PS shard %s sent an unreadable status: %s", self.session.address, error)
        self.lost.set()
        self.replies.put(None)


class ShardStreams:
    """A client's streams to all shards of a run.

    Args:
        run: Settings of the training run.
        hello: Function of a shard's number that returns the client's first message of a new stream.
        limits: For every shard, the limit of the payload of a message from the shard, in bytes.
        closing: Event that is set when the client must stop.

    Attributes:
        shards: Streams of the newest connection, shard 0 first; empty before the first connection.
        rounds: Queue that receives the batches of the workers' measured training rounds.
    """

    def __init__(
        self,
        run: Run,
        hello: Callable[[int], pb.Hello],
        limits: Iterable[int],
        closing: threading.Event,
    ) -> None:
        self._patience_seconds = run.reconnect_timeout_seconds
        self._diallers = [
            dialler_of(run, number, functools.partial(hello, number), limit, closing)
            for number, limit in enumerate(limits)
        ]
        self.shards: list[ShardStream] = []
        self.rounds: Batches = queue.SimpleQueue()

    @property
    def is_lost(self) -> bool:
        """True after a stream of the newest connection has ended."""
        return any(shard.lost.is_set() for shard in self.shards)

    def connect(self, on_welcome: Callable[[pb.Welcome], None] = lambda welcome: None) -> None:
        """Connect to every shard in order; close the streams of an earlier connection first.

        Args:
            on_welcome: Function called with each shard's Welcome message, before the connection to
                the next shard.

        Raises:
            Unreachable: A shard did not answer within the reconnect timeout; all streams are
                closed.
            RequestRejected: A shard rejects this client; all streams are closed.
        """
        for shard in self.shards:
            shard.session.close(0.0)
        # If a later shard rejects this client, the streams to earlier shards must be closed.
        # Otherwise each failed attempt would occupy one more client's place on the earlier shards.
        with contextlib.ExitStack() as opened:
            streams = []
            for dialler in self._diallers:
                session, welcome = dialler.dial(self._patience_seconds)
                opened.callback(session.close, 0.0)
                on_welcome(welcome)
                streams.append(ShardStream(session, self.rounds))
            opened.pop_all()
        self.shards = streams

    def check(self) -> None:
        """Raise RequestRejected if a shard has rejected this client since the connection."""
        for shard in self.shards:
            if shard.refusal is not None:
                raise RequestRejected(shard.refusal)

    def leave(self) -> None:
        """Send Leave messages, and end the streams to all shards; a second call does nothing."""
        for shard in self.shards:
            shard.session.send_control(pb.ToServer(leave=pb.Leave(cause="done")))
            shard.session.close()
        self.shards = []
