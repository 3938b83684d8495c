"""A client's end of one stream to one shard."""

from __future__ import annotations

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

_CLOSE_GRACE_SECONDS = 1.0
_NO_SUCH_SERVICE = "UNIMPLEMENTED"
_LOOK_SECONDS = 0.2  # between two looks whether anybody still wants the connection
_ABANDON_SECONDS = 1.0  # for the reader of a call that was given up
#: How much later gRPC may learn why a stream has ended than its bulk connection ends.
_REASON_SECONDS = 2.0


class Unreachable(Exception):
    """No shard answers at the address."""


class StreamLost(Exception):
    """The stream has ended for ``reason``; open another one."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class NoProgress(Exception):
    """Nothing arrived in the time allowed; the stream still stands."""


class ClientStream:
    """A client's end of one stream to one shard, from `open` to `close`.

    A thread reads ahead, so `receive` can stop waiting without ending the stream: about 10 us of
    a 1 KB round trip of 200, against reading in the caller's thread. Once the stream has moved to
    its bulk connection it only waits for the end, and `receive` reads the connection itself.

    Attributes:
        chunks: How large pieces of payloads should be.
        arrived_at: When the frame arrived that `receive` returned last.

    Args:
        address: ``host:port``; of a shard that has moved, the one before.
        link: The worker's emulated uplink, shared by its streams to all shards.
        keepalive_seconds: A shard silent for twice as long is lost.
        service: Whose Session to open.
        dscp: Class of service of what is sent, 0..63; None: the system's own.
        credentials: Of this node.
        server_name: What the server's certificate must name; None: the host of `address`.
    """

    def __init__(
        self,
        address: str,
        link: EmulatedSender | None = None,
        keepalive_seconds: float = 20.0,
        service: str = SERVICE,
        dscp: int | None = None,
        credentials: Credentials = NO_CREDENTIALS,
        server_name: str | None = None,
    ) -> None:
        self.address = present_address(address)
        self._credentials, self._server_name = credentials, server_name
        self._nonce = trust.new_nonce()
        self._answer: dict[str, Any] = {}  # metadata
        self._service = service
        self._link = link
        self._options = [
            *channel_options(keepalive_seconds, dscp),
            # A fresh connection per stream: no back-off inherited from an earlier failure, and no
            # proxy between us and an address on this network.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.enable_http_proxy", 0),
            ("grpc.initial_reconnect_backoff_ms", 100),
            # For one attempt: it may wait among those whom the other end has not accepted yet.
            ("grpc.min_reconnect_backoff_ms", 3000),
            ("grpc.max_reconnect_backoff_ms", 300),
        ]
        self.chunks = ChunkPace()
        self._outgoing: queue.SimpleQueue[QueuedFrames | None] = queue.SimpleQueue()
        self._incoming: queue.SimpleQueue[tuple[bytes | StreamLost, float]] = queue.SimpleQueue()
        self.arrived_at = self._newest_at = time.monotonic()
        self._dscp = dscp
        self._bulk: bulk.BulkConnection | None = None
        self._receives_bulk = False  # the server has switched, too
        self._moving = threading.Lock()  # held while `_bulk` is set, and while `_over` is
        self._over = threading.Event()  # no connection is taken over any more
        self._moved = threading.Event()
        self._channel: grpc.Channel | None = None
        self._reader: threading.Thread | None = None
        self._settled = threading.Event()
        self._accepted = False
        self._send_error: Exception | None = None
        self._bytes_sent = 0
        self._bytes_received = 0
        self._send_seconds = 0.0

    @property
    def bytes_sent(self) -> int:
        """Training bytes sent, with framing and what an emulated link sent again."""
        return self._bytes_sent

    @property
    def bytes_received(self) -> int:
        """Bytes received, with framing."""
        return self._bytes_received + (self._bulk.num_received if self._bulk else 0)

    @property
    def newest_frame_at(self) -> float:
        """When the newest frame arrived, returned or not."""
        if self._receives_bulk and self._bulk is not None and self._bulk.readable:
            self._newest_at = time.monotonic()
        return self._newest_at

    @property
    def send_seconds(self) -> float:
        """Time from `send` to the last byte handed to gRPC, pacing included; sum of all sends."""
        return self._send_seconds

    @property
    def ended(self) -> bool:
        """Whether nothing more will arrive than has arrived already."""
        return self._reader is not None and not self._reader.is_alive()

    def open(self, timeout_seconds: float, given_up: Callable[[], bool] = lambda: False) -> None:
        """Connect and start the stream; to be called once.

        Args:
            timeout_seconds: For both.
            given_up: Whether nobody wants the connection any more; checked now and then.

        Raises:
            Unreachable: No shard accepted the stream in time.
            UntrustedPeer: One of the two does not accept the other's certificate, or the shard does
                not prove that it has the token.
        """
        deadline = time.monotonic() + timeout_seconds
        channel = self._connect(deadline, given_up)
        call = channel.stream_stream(
            self._method, request_serializer=None, response_deserializer=None
        )(self._requests(), metadata=self._metadata())
        self._channel = channel
        name = f"reader {self.address}"
        self._reader = threading.Thread(target=self._read, args=(call,), name=name, daemon=True)
        self._reader.start()
        while not (settled := self._settled.wait(_within(deadline))):
            if given_up() or time.monotonic() >= deadline or not call.is_active():
                break
        if settled and self._accepted:
            self._check_server()
            return
        is_over = not call.is_active()
        call.cancel()  # type: ignore[no-untyped-call]  # without annotations in grpc's stubs
        # gRPC may never deliver the metadata of a call whose server was stopped in between. The
        # reader, a daemon thread, then stays behind; it must not hold up the next attempt.
        self._reader.join(_ABANDON_SECONDS)
        channel.close()
        reason = f"no answer in {timeout_seconds:g} s"
        if is_over:
            reason = "it stopped in between"
            if not self._reader.is_alive():
                reason = str(self._incoming.get()[0])
        if _NO_SUCH_SERVICE in reason:
            reason += f" (no {self._service} there: another program, or another Thinwire?)"
        raise Unreachable(
            f"a process at {self.address} accepts connections but not this stream: {reason}"
        )

    def prove(self, claims: Sequence[str]) -> bytes:
        """Return the proof that this node has the token, if the shard requires one.

        Args:
            claims: What the first message claims.
        """
        theirs, token = self._answer.get(trust.NONCE, b""), self._credentials.token
        return trust.client_proof(token, self._nonce, theirs, claims) if token and theirs else b""

    def _metadata(self) -> tuple[tuple[str, bytes], ...]:
        nonce, token = (trust.NONCE, self._nonce), self._credentials.token
        return (nonce, (trust.PASS, trust.client_pass(token, self._nonce))) if token else (nonce,)

    @property
    def _method(self) -> str:
        return f"/{self._service}/{METHOD}"

    def _connect(self, deadline: float, given_up: Callable[[], bool]) -> grpc.Channel:
        """Return a channel that stands; raises as `open` does."""
        channel = trust.open_channel(
            self.address, self._credentials, self._options, self._server_name
        )
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
            raise trust.UntrustedPeer(
                f"{self.address} is not trusted: {trust.explain_distrust(reason)}"
            )
        hint = ""
        if trust.is_hung_up(reason):
            hint = " (something listens there, and hangs up: does it want TLS, or not want this "
            hint += "node's certificate? --tls_cert, --tls_key, --tls_ca)"
        raise Unreachable(
            f"nothing answers at {self.address}{hint}; is the parameter "
            "server running, and are --ip_PS and --port right?"
        )

    def _check_server(self) -> None:
        try:
            trust.check_server(self.address, self._credentials, self._nonce, self._answer)
        except trust.UntrustedPeer:
            self.close(0.0)
            raise

    def send(self, frames: Frames, counted: bool = True) -> None:
        """Queue frames, in order and without a break between them; never blocks.

        Args:
            frames: Or a function that makes them, run in the sending thread just before.
            counted: Whether they are training bytes.
        """
        self._outgoing.put((frames, counted, time.monotonic()))

    def switch(self, offered: pb.BulkSession, lease_seconds: float = 0.0) -> None:
        """Move to a bulk connection as soon as it can be had; returns immediately.

        The stream works over gRPC until then, so no heartbeat waits for a port that a firewall
        drops. `Switch` may stand between any two messages.

        Args:
            offered: By the shard's Welcome; to be called once.
            lease_seconds: Of the run; bounds one attempt. 0: not known.
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

    def wait_until_moved(self, seconds: float) -> bool:
        """Wait for the stream to send over its bulk connection; return whether it does."""
        return self._moved.wait(seconds)

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
        """Return the next frame, or what has come of one.

        Raises:
            NoProgress: Nothing arrived in time.
            StreamLost: The stream has ended.
            Malformed: What has come is no frame.
        """
        connection = self._bulk if self._receives_bulk else None
        if connection is None:
            data = self._receive(timeout_seconds)
            connection = self._bulk  # now: the stream may have moved during the wait
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
            self._incoming.put((received, arrived_at))  # for the next call
            raise received
        self.arrived_at = arrived_at
        return received

    def close(self, grace_seconds: float = _CLOSE_GRACE_SECONDS) -> None:
        """End the stream after what has been queued, or after the grace; may be called twice."""
        self._end_moving()
        self._outgoing.put(None)
        if self._reader is None:
            return
        self._reader.join(grace_seconds)
        if self._bulk is not None:
            self._bulk.abort()
        channel, self._channel = self._channel, None
        if channel is not None:  # gRPC: where a close was interrupted, another one never returns
            channel.close()  # cancels the call if it has not ended by itself
        self._reader.join()

    def _read(self, call: Any) -> None:  # grpc.Call and an iterator
        reason = "the shard ended the stream"
        try:
            self._answer = {name: value for name, value in call.initial_metadata() or ()}
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
            reason = f"making a message failed: {self._send_error!r}"
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
                        self._bytes_sent += bulk.wire_bytes(data) if counted else 0
                        connection.send(data)
                        continue
                    size = wire_bytes(len(data)) if link is None else next(sizes)
                    if counted:
                        self._bytes_sent += size
                    began = time.monotonic()
                    yield bytes(data)
                    self.chunks.record(len(data), time.monotonic() - began)
                    if data is CLIENT_SWITCHES:
                        connection = self._bulk
                        self.chunks.finish()
                        self._moved.set()
                self._send_seconds += time.monotonic() - sent_at
            if connection is not None:
                connection.finish()
        except OSError:  # the connection has ended: so does the stream
            return
        except Exception as error:  # gRPC ends the call; the reader reports the reason
            self._send_error = error
            raise


def _within(deadline: float) -> float:
    """Return how long to wait before the next look at whether to go on waiting."""
    return min(_LOOK_SECONDS, max(0.0, deadline - time.monotonic()))
