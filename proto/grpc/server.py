"""The shard's gRPC server, which passes each client's stream to a handler as a `ServerStream`.

`GrpcServer` admits streams through a `ConnectionGuard` and also serves grpc.health.v1. The server
has one reader thread and one sending thread for each stream. The threads that read and send on a
stream are daemon threads, which end with the process (`DaemonThreads`).
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent import futures
from typing import Any, cast

import grpc
from absl import logging
from grpc_health.v1 import health_pb2_grpc

from thinwire.ops.types import ConfigurationError, Link
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.bulk import BulkConnection, BulkListener
from thinwire.proto.bulk import wire_bytes as bulk_bytes
from thinwire.proto.bulk.switching import PathState, ServerPath
from thinwire.proto.emulation.link import EmulatedSender, LinkModel
from thinwire.proto.framing import Arriving
from thinwire.proto.grpc.common import (
    CLIENT_SWITCHES,
    METHOD,
    SERVER_SWITCHES,
    SERVICE,
    ChunkPace,
    Frames,
    channel_options,
    host_and_port,
    wire_bytes,
)
from thinwire.proto.grpc.health import HealthService
from thinwire.proto.grpc.send_queue import SendQueue
from thinwire.proto.security import credentials as trust
from thinwire.proto.security.connection_guard import ConnectionGuard
from thinwire.proto.security.connection_sweeper import ConnectionSweeper, most_connections
from thinwire.proto.security.credentials import PeerEvidence


class ServerStream:
    """The shard's end of one client's gRPC stream.

    Only one thread may call ``incoming`` of a stream, and only the gRPC server's own thread calls
    `responses`; all other methods are thread-safe.

    Attributes:
        bytes_sent: Number of training bytes sent, including framing and an emulated link's
            retransmissions.
        chunks: Adaptive size of the pieces in which a large payload is sent.
        evidence: Certificate names and random numbers of the client, known before its Hello.
        peer: The client's address in gRPC's form, for example ipv4:10.0.0.3:4711.
    """

    def __init__(
        self,
        requests: Iterator[bytes],
        context: grpc.ServicerContext,
        evidence: PeerEvidence,
        on_unread: Callable[[str, str, str], None] = lambda reason, peer, text: None,
        listener: BulkListener | None = None,
    ) -> None:
        self._listener = listener
        self._path = ServerPath()
        self._requests, self._context, self._on_unread = requests, context, on_unread
        self.evidence = evidence
        self.chunks = ChunkPace()
        self._outgoing = SendQueue()
        self._sender: EmulatedSender | None = None
        self._lost = threading.Event()
        self.bytes_sent = 0
        self._bytes_received = 0
        self.peer: str = context.peer()
        if not context.add_callback(self._on_end):
            self._on_end()

    @property
    def bytes_received(self) -> int:
        """Number of bytes received from the client, including framing."""
        bulk = self._path.connection
        return self._bytes_received + (bulk.num_received if bulk else 0)

    @property
    def lost(self) -> bool:
        """True if the client's stream has ended; frames sent to an ended stream are discarded."""
        return self._lost.is_set()

    @property
    def num_replies(self) -> int:
        """Number of replies queued for the client since its stream began, sent or not."""
        return self._outgoing.num_replies

    @property
    def num_waiting(self) -> int:
        """Number of queued replies to the client that the sending thread has not built yet."""
        return self._outgoing.num_waiting

    def incoming(self) -> Iterator[bytes | Arriving]:
        """Yield the client's frames until the client stops sending, or the stream ends.

        Raises:
            Malformed: The bytes received from a bulk connection are not a frame.
        """
        with contextlib.suppress(grpc.RpcError):
            for data in self._requests:
                self._bytes_received += wire_bytes(len(data))
                if data == CLIENT_SWITCHES and (bulk := self._path.switch()) is not None:
                    break
                yield data
            else:
                return
            self._withdraw()
            self.send((SERVER_SWITCHES,), counted=False)
            while (arrived := bulk.receive()) is not None:
                yield arrived

    def offer_bulk(self) -> pb.BulkSession | None:
        """Return an offer of a bulk connection; None if no bulk connection is possible.

        A client over an emulated link gets no offer of a bulk connection, because its frames must
        pass the emulated link.
        """
        if self._listener is None or self._sender is not None or not self._path.offer():
            return None
        offered = self._listener.offer(self)
        # The client's stream may have ended before the listener had the offer. The method `_on_end`
        # then withdrew nothing, and the offer of a bulk connection would remain.
        if self.lost:
            self._withdraw()
        return offered

    def attach(self, connection: BulkConnection) -> None:
        """Register the client's bulk connection; the stream uses it after the client's Switch
        message.
        """
        self._path.attach(connection)

    def send(self, frames: Frames, counted: bool = True) -> None:
        """Queue frames for the client, which are sent without other frames in between; never block.

        A client that leaves too many bytes of control messages unread loses its stream.

        Args:
            frames: Frames to send, or a function that the sending thread calls just before it sends
                the returned frames.
            counted: True to count the bytes of the frames as training traffic. The reply to an
                evaluation pull is not counted.
        """
        if self._lost.is_set() or self._outgoing.put(frames, counted):
            return
        self._lost.set()
        text = f"the client left {self._outgoing.num_bytes} bytes of messages unread"
        self._on_unread("unread", self.peer, text)
        self._context.cancel()  # type: ignore[no-untyped-call]  # without annotations in grpc's stubs

    def send_report(self, message: bytes) -> int:
        """Queue a status report to the client, which may miss some reports; the method never
        blocks.

        Returns:
            Number of older reports that were dropped, because the client does not read them.
        """
        return 0 if self._lost.is_set() else self._outgoing.put_report(message)

    def pace(self, link: Link, share: float, seed: int) -> None:
        """Send all later frames to the client over an emulated link, or without emulation.

        Args:
            link: The worker's emulated link. An inactive link ends the emulation.
            share: Fraction of the link's rate that this shard may use, in (0, 1].
            seed: Seed of the link's random losses.
        """
        if not link.active:
            self._sender = None
            return
        shared = Link(link.mbps * share, link.delay_ms, link.loss)
        # The emulated link sleeps by waiting for the event `_lost`, so a send ends when the client
        # disconnects.
        self._sender = EmulatedSender(LinkModel(shared, seed), sleep=self._lost.wait)

    def close(self) -> None:
        """End the client's stream without an error, after the queued frames."""
        self._outgoing.end()

    def _on_end(self) -> None:
        self._lost.set()
        self._outgoing.end()
        self._path.end()
        self._withdraw()

    def _withdraw(self) -> None:
        if self._listener is not None:
            self._listener.withdraw(self)

    def responses(self) -> Iterator[bytes]:
        """Yield frames for gRPC until the client's Switch; then send frames over the bulk
        connection.

        Only the server's sending thread may call `responses`.
        """
        try:
            yield from self._responses()
        except OSError as error:
            logging.info("bulk connection (TCP) of client %s ended: %s", self.peer, error)
        finally:
            bulk = self._path.connection
            if bulk is not None and self._path.state is PathState.MOVED:
                bulk.end(_LAST_WORDS_SECONDS)
            self._path.end()

    def _responses(self) -> Iterator[bytes]:
        bulk: BulkConnection | None = None
        while (outgoing := self._outgoing.get()) is not None:
            frames, counted, ready_at = outgoing
            if callable(frames):
                frames, ready_at = frames(), time.monotonic()
            for data in frames:
                if bulk is not None:
                    self.bytes_sent += bulk_bytes(data) if counted else 0
                    bulk.send(data)
                    continue
                size = wire_bytes(len(data))
                if self._sender is not None:
                    size = self._sender.carry(size, ready_at)
                if self._lost.is_set():
                    return
                if counted:
                    self.bytes_sent += size
                began = time.monotonic()
                yield bytes(data)
                self.chunks.record(len(data), time.monotonic() - began)
                if data is SERVER_SWITCHES:
                    bulk = self._path.connection
                    self.chunks.finish()


class DaemonThreads(futures.Executor):
    """Executor with one daemon thread per call. A client's stream occupies a thread until the
    stream ends.

    Python's standard thread pool joins its threads at exit, so a process that fails without
    stopping its gRPC server would never end. Daemon threads end when the main thread ends.
    """

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a function in a new daemon thread; return the future of its result."""
        future: futures.Future[Any] = futures.Future()

        def run() -> None:
            try:
                future.set_result(function(*args, **kwargs))
            except Exception as error:  # noqa: BLE001 - the future raises the exception
                future.set_exception(error)

        threading.Thread(target=run, name="grpc-call", daemon=True).start()
        return future


#: Seconds for which a client can read the last frames of a bulk connection when its stream ends.
_LAST_WORDS_SECONDS = 2.0
#: Number of gRPC calls in addition to the stream limit, for health checks and for streams that the
#: guard rejects.
_SPARE_CALLS = 8
#: Time limits of the HTTP/2 handshake and of a connection without a stream, as an idle connection
#: occupies a descriptor.
_HANDSHAKE_MS, _IDLE_MS = 10_000, 20_000


class PortInUse(ConfigurationError):
    """Error: the gRPC server cannot listen at its address."""


class GrpcServer(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # not at runtime
    """A listening gRPC server that runs a handler in a new thread for each client's stream.

    A client's stream ends without an error when the server's handler returns. The server's health
    service reports NOT_SERVING until `set_serving` is called.

    Attributes:
        handler: Function called with each new client stream, which reads the stream to its end.
            After an assignment, open streams keep their present handler.
        port: TCP port at which the server listens.

    Args:
        address: IP address or host name to listen on, which `check_bind` should have accepted.
        port: TCP port to listen on; 0 for any free port.
        handler: Function called with each new client stream, which reads the stream to its end.
        keepalive_seconds: gRPC keepalive time, in seconds. A client that is silent for twice this
            time counts as lost.
        service: Name of the gRPC service with the Session method.
        dscp: DSCP class of service of outgoing packets, 0..63. None: the system's default.
        guard: Object that admits and authenticates clients; None to admit every client. A stream
            that the guard does not admit is rejected with RESOURCE_EXHAUSTED.

    Raises:
        PortInUse: Another process uses the port, or this machine does not have the address.
    """

    def __init__(
        self,
        address: str,
        port: int,
        handler: Callable[[ServerStream], None],
        keepalive_seconds: float = 20.0,
        service: str = SERVICE,
        dscp: int | None = None,
        guard: ConnectionGuard | None = None,
    ) -> None:
        self.handler, self._guard = handler, guard or ConnectionGuard()
        self._path = f"/{service}/{METHOD}"
        self._method = grpc.stream_stream_rpc_method_handler(self._run)
        credentials, most = self._guard.credentials, self._guard.most_streams
        options = [
            *channel_options(keepalive_seconds, dscp),
            ("grpc.so_reuseport", 0),
            ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
            ("grpc.max_connection_idle_ms", _IDLE_MS),
            ("grpc.max_allowed_incoming_connections", most_connections(most)),
        ]
        executor: Any = DaemonThreads()
        self._server = grpc.server(
            executor,
            handlers=[self],
            options=options,
            maximum_concurrent_rpcs=None if most is None else most + _SPARE_CALLS,
        )
        self._listener = BulkListener(address, credentials, dscp)
        self._health = HealthService(("", service))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        try:
            bound = trust.add_port(self._server, host_and_port(address, port), credentials)
        except RuntimeError as error:
            raise PortInUse(_why_not_bound(address, port)) from error
        self._server.start()
        self.port, self._sweeper = bound, ConnectionSweeper(bound, self._guard)

    def set_serving(self, serving: bool) -> None:
        """Set this server's health: SERVING if `serving` is True, else NOT_SERVING."""
        self._health.set_serving(serving)

    def stop(self, grace_seconds: float = 0.0) -> None:
        """Reject new streams, wait up to the grace time for open streams to end, then cancel
        them.
        """
        self._health.set_serving(False)
        self._listener.stop()
        self._server.stop(grace_seconds).wait()
        self._sweeper.stop()

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:  # type: ignore[type-arg]  # not at runtime
        """Return the handler of a gRPC call; None to reject the call without a new thread.

        gRPC uses one thread for the search of all calls' handlers, so the search must be fast.
        """
        if call.method != self._path:
            return None
        metadata = cast("Iterable[tuple[str, bytes]]", call.invocation_metadata)
        return self._method if self._guard.is_heeded(metadata) else None

    def _run(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        """Run the handler for a client's stream if the connection guard admits the stream."""
        evidence, answer = trust.begin_handshake(context, self._guard.credentials)
        stream = ServerStream(
            requests, context, evidence, self._guard.record_refusal, self._listener
        )
        refusal = self._guard.admit(stream)
        if refusal is not None:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, refusal)
        try:
            # The client waits for the initial metadata, which show that the stream is open.
            context.send_initial_metadata(answer)
            name = f"reader {stream.peer}"
            threading.Thread(target=self._read, args=(stream,), name=name, daemon=True).start()
            yield from stream.responses()
        finally:
            self._guard.release(stream)

    def _read(self, stream: ServerStream) -> None:
        try:
            self.handler(stream)
        except Exception:  # noqa: BLE001 - an error of one client must not end the shard
            logging.exception("%s: closing the stream after an error", stream.peer)
        finally:
            stream.close()


def _why_not_bound(address: str, port: int) -> str:
    reason = "the address cannot be bound"
    try:
        family, kind, _, _, name = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(name)
    except OSError as error:
        reason = error.strerror or str(error)
    return (
        f"cannot listen on {host_and_port(address, port)}: {reason}; "
        "stop the process that uses it, or choose another --port or --ip_PS"
    )
