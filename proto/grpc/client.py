"""The client's end of one gRPC stream to one shard."""

from __future__ import annotations

import os
import queue
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc

from thinwire.proto import bulk
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.bulk import switching
from thinwire.proto.emulation.link import EmulatedSender
from thinwire.proto.framing import Arriving
from thinwire.proto.grpc.common import (
    CLIENT_SWITCHES,
    METHOD,
    SERVER_SWITCHES,
    SERVICE,
    ChunkPace,
    Frames,
    QueuedFrames,
    channel_options,
    wire_bytes,
)
from thinwire.proto.moved import present_address
from thinwire.proto.security import credentials as trust
from thinwire.runtime.run.credentials import NO_CREDENTIALS, Credentials

# A forked child of a script, for example a process of a torch DataLoader, uses no gRPC. With gRPC's
# support for forks, the child starts gRPC's threads again; beside a busy stream, a quarter of the
# children crashed. gRPC reads the variable when the process makes its first channel.
os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "false")
#: gRPC keepalive time, in seconds. A shard that is silent for twice this time counts as lost.
_KEEPALIVE_SECONDS = 20.0
_OWN_OPTIONS = (
    # Each stream opens its own connection, so a stream inherits no reconnect backoff from an
    # earlier failure. Shards are on the local network: an HTTP proxy is not used.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    # Minimum time of one connection attempt, which may wait in the server's accept queue.
    ("grpc.min_reconnect_backoff_ms", 3000),
    ("grpc.max_reconnect_backoff_ms", 300),
)
_CLOSE_GRACE_SECONDS = 1.0
_NO_SUCH_SERVICE = "UNIMPLEMENTED"
_LOOK_SECONDS = 0.2  # seconds between two calls of `given_up` while `open` waits
_ABANDON_SECONDS = 1.0  # time limit in seconds to join the reader thread of a canceled call
#: Seconds for which `receive` waits for gRPC's reason after a bulk connection has ended. gRPC may
#: get the reason later than the bulk connection closes.
_REASON_SECONDS = 2.0


class Unreachable(Exception):
    """Error: no shard accepts a gRPC stream at the given address."""


class StreamLost(Exception):
    """Error: the gRPC stream to a shard has ended for ``reason``; the client must open a new
    stream.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class NoProgress(Exception):
    """Error: no frame arrived from the shard within the time limit; the stream is still open."""


class _Peer:
    """The shard at the other end of a stream: connects to it, and proves both identities.

    Attributes:
        answer: Initial metadata of the gRPC call from the server; empty before the server answers.

    Args:
        address: ``host:port`` of the shard.
        credentials: This node's certificate, key and token.
        server_name: Name that the server's certificate must contain. None: the host of `address`.
        method: Full name of the gRPC method.
    """

    def __init__(
        self, address: str, credentials: Credentials, server_name: str | None, method: str
    ) -> None:
        self._address, self._credentials, self._server_name = address, credentials, server_name
        self._method, self._nonce = method, trust.new_nonce()
        self.answer: dict[str, Any] = {}

    def prove(self, claims: Sequence[str]) -> bytes:
        """Return the proof that this node has the token; empty if no token is in use."""
        answer, token = self.answer.get(trust.NONCE, b""), self._credentials.token
        return trust.client_proof(token, self._nonce, answer, claims) if token and answer else b""

    def metadata(self) -> tuple[tuple[str, bytes], ...]:
        """Return the metadata with which this node opens the gRPC call."""
        nonce, token = (trust.NONCE, self._nonce), self._credentials.token
        return (nonce, (trust.PASS, trust.client_pass(token, self._nonce))) if token else (nonce,)

    def check(self) -> None:
        """Raise UntrustedPeer if the server does not prove that it has the token."""
        trust.check_server(self._address, self._credentials, self._nonce, self.answer)

    def connect(
        self, dscp: int | None, deadline: float, given_up: Callable[[], bool]
    ) -> grpc.Channel:
        """Return a connected gRPC channel, or raise an exception of `ClientStream.open`."""
        address = self._address
        options = [*channel_options(_KEEPALIVE_SECONDS, dscp), *_OWN_OPTIONS]
        channel = trust.open_channel(address, self._credentials, options, self._server_name)
        ready = grpc.channel_ready_future(channel)
        while True:
            try:
                ready.result(timeout=_within(deadline))
                return channel
            except grpc.FutureTimeoutError:
                if given_up() or time.monotonic() >= deadline:
                    break
        ready.cancel()
        reason = trust.why_unreachable(channel, self._method)
        channel.close()
        if trust.is_distrust(reason):
            raise trust.UntrustedPeer(f"{address} is not trusted: {trust.explain_distrust(reason)}")
        hint = ""
        if trust.is_hung_up(reason):
            hint = " (a server listens there and closes the connection: does it require TLS, or "
            hint += "reject this node's certificate? Check --tls_cert, --tls_key, --tls_ca)"
        raise Unreachable(
            f"nothing answers at {address}{hint}; is the parameter "
            "server running, and are --ip_PS and --port right?"
        )


class ClientStream:
    """The client's end of one gRPC stream to one shard, from `open` to `close`.

    A reader thread reads frames from the gRPC stream ahead, so that `receive` can time out without
    ending the stream. The reader thread of a gRPC stream adds about 10 us to a round trip of 1 KB,
    which takes 200 us. After the stream has moved to its bulk (TCP) connection, the reader thread
    only waits for the end of the gRPC call, and `receive` reads the bulk connection in the caller's
    thread.

    Attributes:
        chunks: Adaptive size of the pieces in which the client sends a large payload.
        arrived_at: Monotonic time in seconds at which the last frame that `receive` returned had
            arrived.
        bytes_sent: Number of training bytes sent, including framing and an emulated link's
            retransmissions.
        peer: Shard at the other end of the stream.
        moved: Event that is set once the stream sends over its bulk (TCP) connection.
        send_seconds: Sum of the seconds from each call of `send` until gRPC has all its bytes,
            including pacing.

    Args:
        address: ``host:port`` of the shard. The old address of a shard that has moved is replaced
            by its present address.
        link: The worker's emulated uplink, shared by its streams to all shards; None: no emulated
            link.
        service: Name of the gRPC service with the Session method.
        dscp: DSCP class of service of outgoing packets, 0..63. None: the system's default.
        credentials: This node's certificate, key and token.
        server_name: Name that the server's certificate must contain. None: the host of `address`.
    """

    def __init__(
        self,
        address: str,
        link: EmulatedSender | None = None,
        service: str = SERVICE,
        dscp: int | None = None,
        credentials: Credentials = NO_CREDENTIALS,
        server_name: str | None = None,
    ) -> None:
        self.address = present_address(address)
        self._credentials, self._server_name = credentials, server_name
        self._service, self._method = service, f"/{service}/{METHOD}"
        self._link, self._dscp = link, dscp
        self.peer = _Peer(self.address, credentials, server_name, self._method)
        self.chunks = ChunkPace()
        self._outgoing: queue.SimpleQueue[QueuedFrames | None] = queue.SimpleQueue()
        self._incoming: queue.SimpleQueue[tuple[bytes | StreamLost, float]] = queue.SimpleQueue()
        self.arrived_at = self._newest_at = time.monotonic()
        self._bulk: bulk.BulkConnection | None = None
        self._receives_bulk = False  # True if the server sends over the bulk connection now
        # The lock `_moving` makes the check of `_over` and the assignment of `_bulk` one atomic
        # step. Otherwise the switching thread could set `_bulk` after `close` has run, and the
        # connection would leak.
        self._moving = threading.Lock()
        # Event set at the stream's end, after which no bulk connection is accepted.
        self._over = threading.Event()
        self.moved = threading.Event()
        self._channel: grpc.Channel | None = None
        self._reader: threading.Thread | None = None
        self._settled, self._accepted = threading.Event(), False
        self._send_error: Exception | None = None
        self.bytes_sent = self._bytes_received = 0
        self.send_seconds = 0.0

    @property
    def bytes_received(self) -> int:
        """Number of bytes received from the shard, including framing."""
        return self._bytes_received + (self._bulk.num_received if self._bulk else 0)

    @property
    def newest_frame_at(self) -> float:
        """Monotonic time in seconds at which the newest frame arrived, read or unread."""
        if self._receives_bulk and self._bulk and self._bulk.readable:
            self._newest_at = time.monotonic()
        return self._newest_at

    @property
    def ended(self) -> bool:
        """True if the stream's gRPC call has ended, so that no frame will arrive from the shard."""
        return self._reader is not None and not self._reader.is_alive()

    def open(self, timeout_seconds: float, given_up: Callable[[], bool] = lambda: False) -> None:
        """Connect to the shard and start the gRPC stream; call this once per stream.

        Args:
            timeout_seconds: Time limit for connecting and starting together, in seconds.
            given_up: Function, called every 0.2 s, that returns True if the caller no longer wants
                the connection.

        Raises:
            Unreachable: No shard accepted the stream in time.
            UntrustedPeer: The client or the shard rejects the peer's certificate, or the shard
                does not prove that it has the token.
        """
        deadline = time.monotonic() + timeout_seconds
        channel = self.peer.connect(self._dscp, deadline, given_up)
        call = channel.stream_stream(
            self._method, request_serializer=None, response_deserializer=None
        )(self._requests(), metadata=self.peer.metadata())
        self._channel = channel
        name = f"reader {self.address}"
        self._reader = threading.Thread(target=self._read, args=(call,), name=name, daemon=True)
        self._reader.start()
        while not (settled := self._settled.wait(_within(deadline))):
            if given_up() or time.monotonic() >= deadline or not call.is_active():
                break
        if settled and self._accepted:
            try:
                self.peer.check()
            except trust.UntrustedPeer:
                self.close(0.0)
                raise
            return
        is_over = not call.is_active()
        call.cancel()  # type: ignore[no-untyped-call]  # without annotations in grpc's stubs
        # If a server stops before it answers a call, gRPC may never deliver the call's initial
        # metadata. The reader thread would then block forever. The wait for the thread has a time
        # limit, so that the blocked daemon thread does not delay the next attempt.
        self._reader.join(_ABANDON_SECONDS)
        channel.close()
        reason = f"no answer in {timeout_seconds:g} s"
        if is_over:
            reason = "it stopped while the stream was being opened"
            if not self._reader.is_alive():
                reason = str(self._incoming.get()[0])
        if _NO_SUCH_SERVICE in reason:
            reason += f" (it has no service {self._service}: another program, or another Thinwire?)"
        raise Unreachable(
            f"a process at {self.address} accepts connections but not this stream: {reason}"
        )

    def send(self, frames: Frames, counted: bool = True) -> None:
        """Queue frames for the shard, which are sent without other frames in between; never block.

        Args:
            frames: Frames to send, or a function that the sending thread calls just before it sends
                the returned frames.
            counted: True to count the bytes of the frames as training traffic.
        """
        self._outgoing.put((frames, counted, time.monotonic()))

    def switch(self, offered: pb.BulkSession, lease_seconds: float = 0.0) -> None:
        """Start a thread that moves the stream to a bulk connection; call this at most once.

        The stream uses gRPC until the bulk connection is open, so no heartbeat waits for a port
        that a firewall drops. The client may send the `Switch` message between any two messages.

        Args:
            offered: Offer of a bulk (TCP) connection in the shard's Welcome.
            lease_seconds: Lease of the run in seconds, which bounds the time of one connection
                attempt; 0 if it is not known.
        """
        host = self.address.rpartition(":")[0].strip("[]")
        credentials, name = self._credentials, self._server_name
        seconds = switching.most_seconds(lease_seconds)

        def dial(attempt: int) -> bulk.BulkConnection:
            return bulk.connect(host, offered, credentials, name, self._dscp, seconds, attempt)

        port, draw = offered.port, random.SystemRandom().random
        threading.Thread(
            target=switching.run_attempts,
            args=(
                *(self.address, port, dial, self._take_over),
                *(self._over, draw, switching.UNREACHABLE),
            ),
            name=f"switch {self.address}",
            daemon=True,
        ).start()

    def _take_over(self, connection: bulk.BulkConnection) -> None:
        with self._moving:
            if self._over.is_set():
                connection.abort()
                return
            self._bulk = connection
            self.send((CLIENT_SWITCHES,), counted=False)

    def _end_moving(self) -> None:
        with self._moving:
            self._over.set()

    def receive(self, timeout_seconds: float) -> bytes | Arriving:
        """Return the next frame from the shard, or the received part of a payload frame.

        Raises:
            NoProgress: No byte arrived from the shard within the time limit.
            StreamLost: The gRPC stream to the shard has ended.
            Malformed: The bytes received from the shard are not a frame.
        """
        connection = self._bulk if self._receives_bulk else None
        if connection is None:
            data = self._receive(timeout_seconds)
            # Read the attribute after the wait, during which the stream may have moved.
            connection = self._bulk
            if connection is None or data != SERVER_SWITCHES:
                return data
            self._receives_bulk = True
        try:
            arrived = connection.receive(timeout_seconds)
        except TimeoutError:
            raise NoProgress(f"{self.address} sent nothing for {timeout_seconds:.3g} s") from None
        if arrived is None:
            connection.abort()
            try:
                return self._receive(_REASON_SECONDS)
            except NoProgress:
                raise StreamLost(f"{self.address}: the bulk connection has ended") from None
        self.arrived_at = self._newest_at = time.monotonic()
        return arrived

    def _receive(self, timeout_seconds: float) -> bytes:
        try:
            received, arrived_at = self._incoming.get(timeout=max(0.0, timeout_seconds))
        except queue.Empty:
            raise NoProgress(f"{self.address} sent nothing for {timeout_seconds:.3g} s") from None
        if isinstance(received, StreamLost):
            # Every later call of `receive` raises StreamLost, too.
            self._incoming.put((received, arrived_at))
            raise received
        self.arrived_at = arrived_at
        return received

    def close(self, grace_seconds: float = _CLOSE_GRACE_SECONDS) -> None:
        """Send the queued frames, then end the stream; cancel the stream after the grace time.

        A second call of `close` has no effect.
        """
        self._end_moving()
        self._outgoing.put(None)
        if self._reader is None:
            return
        self._reader.join(grace_seconds)
        if self._bulk is not None:
            self._bulk.abort()
        # gRPC: if an exception interrupts `channel.close`, a second `channel.close` never returns.
        # The attribute `_channel` is therefore None before the first call, and each channel is
        # closed only once.
        channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()  # the function cancels the gRPC call if the call has not ended
        self._reader.join()

    def _read(self, call: Any) -> None:  # a grpc.Call that is also an iterator of responses
        reason = "the shard ended the stream"
        try:
            self.peer.answer = {name: value for name, value in call.initial_metadata() or ()}
            self._accepted = call.is_active()
            self._settled.set()
            for data in call:
                self._bytes_received += wire_bytes(len(data))
                self._newest_at = time.monotonic()
                self._incoming.put((data, self._newest_at))
        except grpc.RpcError as error:
            reason = f"{error.code().name}: {error.details()}"
            self._end_moving()
            if self._bulk is not None:
                self._bulk.abort()
        if self._send_error is not None:
            reason = f"building a message failed: {self._send_error!r}"
        self._end_moving()
        self._incoming.put((StreamLost(f"{self.address}: {reason}"), time.monotonic()))
        self._outgoing.put(None)

    def _requests(self) -> Iterator[bytes]:
        link = self._link
        connection: bulk.BulkConnection | None = None
        try:
            while (outgoing := self._outgoing.get()) is not None:
                frames, counted, sent_at = outgoing
                ready_at = sent_at
                if callable(frames):
                    frames, ready_at = frames(), time.monotonic()
                if link is not None:
                    frames = list(frames)
                    sizes = link.carry_all([wire_bytes(len(data)) for data in frames], ready_at)
                for data in frames:
                    if connection is not None:
                        self.bytes_sent += bulk.wire_bytes(data) if counted else 0
                        connection.send(data)
                        continue
                    size = wire_bytes(len(data)) if link is None else next(sizes)
                    if counted:
                        self.bytes_sent += size
                    began = time.monotonic()
                    yield bytes(data)
                    self.chunks.record(len(data), time.monotonic() - began)
                    if data is CLIENT_SWITCHES:
                        connection = self._bulk
                        self.chunks.finish()
                        self.moved.set()
                self.send_seconds += time.monotonic() - sent_at
            if connection is not None:
                connection.finish()
        except OSError:  # the bulk connection has ended, so the gRPC call ends too
            return
        except Exception as error:  # gRPC ends the call, and `_read` reports `_send_error`
            self._send_error = error
            raise


def _within(deadline: float) -> float:
    """Return the seconds to wait before `given_up` and the deadline are checked again."""
    return min(_LOOK_SECONDS, max(0.0, deadline - time.monotonic()))
