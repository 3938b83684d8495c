"""A Supervisor's stream to one shard."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable

from absl import logging

from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.grpc import StreamLost
from thinwire.proto.grpc.session import ClientSession, Dialler
from thinwire.runtime.telemetry import run_status

#: Batches of rounds as they arrive: worker, document.
Batches = queue.SimpleQueue[tuple[int, str]]


def open_streams(
    diallers: Iterable[Dialler],
    patience_seconds: float,
    rounds: Batches,
    on_welcome: Callable[[pb.Welcome], None] = lambda welcome: None,
) -> list[ShardStream]:
    """Join every shard, patiently, one after the other.

    Args:
        diallers: Of all shards.
        patience_seconds: For each.
        rounds: Where batches of rounds go.
        on_welcome: Called with each shard's, before the next one is dialled.

    Raises:
        Unreachable, RequestRejected: A shard does not answer, or rejects this client; no stream is
            left open.
    """
    with contextlib.ExitStack() as opened:
        streams = []
        for dialler in diallers:
            session, welcome = dialler.dial(patience_seconds)
            opened.callback(session.close, 0.0)
            on_welcome(welcome)
            streams.append(ShardStream(session, rounds))
        opened.pop_all()
    return streams


class ShardStream:
    """A Supervisor's stream to one shard, read by a thread of its own; rounds go to `rounds`.

    Attributes:
        evaluated: What the evaluator of the scripts has found, as it comes.
        validates: Whether a script has begun a fit with validation data.
    """

    def __init__(self, session: ClientSession, rounds: Batches) -> None:
        self.session, self._rounds = session, rounds
        self.evaluated: queue.SimpleQueue[pb.Evaluated] = queue.SimpleQueue()
        self.validates = False
        self.refusal: pb.Refusal | None = None  # why the shard wants no more of this Supervisor
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
            if not self.halt_cause:  # else that is how a run ends
                logging.info("lost the stream: %s", error)
        except ValueError as error:
            logging.error("%s sent a status that cannot be read: %s", self.session.address, error)
        self.lost.set()
        self.replies.put(None)
