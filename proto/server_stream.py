"""One client's stream at the shard's end: what comes in, what waits to go out, and their bytes."""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator

import grpc

from ops.types import Link
from proto.channel_emulated import EmulatedSender, LinkModel
from proto.credentials import Evidence
from proto.grpc_common import Frames, Outgoing, wire_bytes
from proto.pace import ChunkPace


class ServerStream:
    """One client's conversation, as the shard sees it.

    ``incoming`` is for one thread; everything else may be called from any thread. ``chunks`` says
    how large pieces of payloads should be.
    """

    def __init__(
        self,
        requests: Iterator[bytes],
        context: grpc.ServicerContext,
        evidence: Evidence,
    ) -> None:
        self._requests = requests
        self.evidence = evidence
        self.introduced = False  # whether it has said Hello, or has ended
        self._num_made = self._num_to_make = 0
        self.chunks = ChunkPace()
        self._outgoing: queue.SimpleQueue[Outgoing | None] = queue.SimpleQueue()
        self._sender: EmulatedSender | None = None
        self._lost = threading.Event()
        self._bytes_sent = 0
        self._bytes_received = 0
        self.peer: str = context.peer()
        if not context.add_callback(self._on_end):
            self._on_end()

    @property
    def bytes_sent(self) -> int:
        """Training bytes sent, with framing and what an emulated link sent again."""
        return self._bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes received, with framing."""
        return self._bytes_received

    @property
    def lost(self) -> bool:
        """Whether the stream has ended; what is sent now goes nowhere."""
        return self._lost.is_set()

    @property
    def num_waiting(self) -> int:
        """How many messages are still to be made, because the client does not take more."""
        return self._num_to_make - self._num_made

    def incoming(self) -> Iterator[bytes]:
        """Yield frames until the client closes its half, or the stream ends in any way."""
        with contextlib.suppress(grpc.RpcError):
            for data in self._requests:
                self._bytes_received += wire_bytes(len(data))
                yield data

    def send(self, frames: Frames, counted: bool = True) -> None:
        """Queue frames, in order and without a break between them; never blocks.

        Args:
            frames: Or a function that makes them, run in the sending thread just before.
            counted: Whether they are training bytes; an evaluation pull's reply is not.
        """
        if not self._lost.is_set():
            if callable(frames):  # by one thread alone, so that this counts
                self._num_to_make += 1
            self._outgoing.put((frames, counted, time.monotonic()))

    def pace(self, link: Link, share: float, seed: int) -> None:
        """Send over an emulated link from now on.

        Args:
            link: The worker's link.
            share: This shard's part of its rate, in (0, 1].
            seed: Seeds the losses.
        """
        if not link.active:
            self._sender = None
            return
        shared = Link(link.mbps * share, link.delay_ms, link.loss)
        # Waiting on the event, a send to a client that has gone ends at once.
        self._sender = EmulatedSender(LinkModel(shared, seed), sleep=self._wait)

    def close(self) -> None:
        """End the stream in good order, after what has been queued."""
        self._outgoing.put(None)

    def _wait(self, seconds: float) -> None:
        self._lost.wait(seconds)

    def _on_end(self) -> None:
        self._lost.set()
        self._outgoing.put(None)

    def responses(self) -> Iterator[bytes]:
        """Yield what is to be sent; for the server's own thread."""
        while (outgoing := self._outgoing.get()) is not None:
            frames, counted, ready_at = outgoing
            if callable(frames):
                self._num_made += 1
                frames, ready_at = frames(), time.monotonic()
            for data in frames:
                size = wire_bytes(len(data))
                if self._sender is not None:
                    size = self._sender.carry(size, ready_at)
                if self._lost.is_set():
                    return
                if counted:
                    self._bytes_sent += size
                began = time.monotonic()
                yield data
                self.chunks.note(len(data), time.monotonic() - began)
