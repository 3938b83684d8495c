"""The shard's end: a gRPC server that hands each Session to a function as a `ServerStream`.

`serve` listens; it admits streams through a `ConnectionGuard` and serves grpc.health.v1 beside
them. A stream has one thread that reads and one that sends, and these end with the process
(`DaemonThreads`).
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
    """The shard's end of one client's stream.

    ``incoming`` is for one thread; everything else may be called from any thread.

    Attributes:
        chunks: How large pieces of payloads should be.
        evidence: What is known of the client before its first message.
        peer: The client's address, as gRPC gives it.
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
        bulk = self._path.connection
        return self._bytes_received + (bulk.num_received if bulk else 0)

    @property
    def lost(self) -> bool:
        """Whether the stream has ended; what is sent now goes nowhere."""
        return self._lost.is_set()

    @property
    def num_replies(self) -> int:
        """How many replies the client has been, or is to be, sent."""
        return self._outgoing.num_replies

    @property
    def num_waiting(self) -> int:
        """How many replies are still to be made, because the client does not take more."""
        return self._outgoing.num_waiting

    @property
    def num_waiting_bytes(self) -> int:
        """Bytes of messages that the client has not taken."""
        return self._outgoing.num_bytes

    def incoming(self) -> Iterator[bytes | Arriving]:
        """Yield frames until the client closes its half, or the stream ends in any way.

        Raises:
            Malformed: What comes over a bulk connection is no frame.
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
        """Return what the client may connect to; None: nothing, as frames take an emulated link."""
        if self._listener is None or self._sender is not None or not self._path.offer():
            return None
        offered = self._listener.offer(self)
        if self.lost:
            self._withdraw()
        return offered

    def attach(self, connection: BulkConnection) -> None:
        """Take a connection over, for when the client switches to it."""
        self._path.attach(connection)

    def send(self, frames: Frames, counted: bool = True) -> None:
        """Queue frames, in order and without a break between them; never blocks.

        Args:
            frames: Or a function that makes them, run in the sending thread just before.
            counted: Whether they are training bytes; an evaluation pull's reply is not.
        """
        if self._lost.is_set() or self._outgoing.put(frames, counted):
            return
        self._lost.set()
        text = f"{self.num_waiting_bytes} bytes of messages wait to be taken"
        self._on_unread("unread", self.peer, text)
        self._context.cancel()  # type: ignore[no-untyped-call]  # without annotations in grpc's stubs

    def send_report(self, message: bytes) -> int:
        """Queue a frame that may be missed; never blocks.

        Returns:
            How many older ones were dropped, because the client does not take them.
        """
        return 0 if self._lost.is_set() else self._outgoing.put_report(message)

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
        # Waiting on the event, a send to a client that has gone ends immediately.
        self._sender = EmulatedSender(LinkModel(shared, seed), sleep=self._wait)

    def close(self) -> None:
        """End the stream in good order, after what has been queued."""
        self._outgoing.end()

    def _wait(self, seconds: float) -> None:
        self._lost.wait(seconds)

    def _on_end(self) -> None:
        self._lost.set()
        self._outgoing.end()
        self._path.end()
        self._withdraw()

    def _withdraw(self) -> None:
        if self._listener is not None:
            self._listener.withdraw(self)

    def responses(self) -> Iterator[bytes]:
        """Yield what is to be sent over gRPC, and send the rest; for the server's own thread."""
        try:
            yield from self._responses()
        except OSError as error:
            logging.info("%s: the bulk connection has ended: %s", self.peer, error)
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
                    self._bytes_sent += bulk_bytes(data) if counted else 0
                    bulk.send(data)
                    continue
                size = wire_bytes(len(data))
                if self._sender is not None:
                    size = self._sender.carry(size, ready_at)
                if self._lost.is_set():
                    return
                if counted:
                    self._bytes_sent += size
                began = time.monotonic()
                yield bytes(data)
                self.chunks.record(len(data), time.monotonic() - began)
                if data is SERVER_SWITCHES:
                    bulk = self._path.connection
                    self.chunks.finish()


class DaemonThreads(futures.Executor):
    """One daemon thread per call: a stream holds its thread for life, and none outlives main.

    The standard pool joins its threads at exit, so a process that fails without stopping its
    server would never end.
    """

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a call in a thread of its own; see futures.Executor."""
        future: futures.Future[Any] = futures.Future()

        def run() -> None:
            try:
                future.set_result(function(*args, **kwargs))
            except Exception as error:  # noqa: BLE001 - handed to whoever holds the future
                future.set_exception(error)

        threading.Thread(target=run, name="grpc-call", daemon=True).start()
        return future


#: How long a client of a bulk connection has to read what is under way when its stream ends.
_LAST_WORDS_SECONDS = 2.0
_SPARE_CALLS = 8  # health checks, and streams beyond the limit, which are rejected with a reason
#: Idle connections keep a descriptor: the time until one has become HTTP/2, and the time it may
#: have no stream.
_HANDSHAKE_MS, _IDLE_MS = 10_000, 20_000


class PortInUse(ConfigurationError):
    """The address cannot be listened on."""


class GrpcServer:
    """A listening shard; made by `serve`."""

    def __init__(
        self,
        server: grpc.Server,
        health: HealthService,
        sessions: _SessionHandler,
        sweeper: ConnectionSweeper,
        listener: BulkListener,
    ) -> None:
        self._server, self._health, self._sessions = server, health, sessions
        self._listener = listener
        self._sweeper, self.port = sweeper, sweeper.port

    def hand_over(self, handler: Callable[[ServerStream], None]) -> None:
        """Run another handler for the streams that come from now on."""
        self._sessions.handler = handler

    def set_serving(self, serving: bool) -> None:
        """Publish through grpc.health.v1 whether the shard accepts work."""
        self._health.set_serving(serving)

    def stop(self, grace_seconds: float = 0.0) -> None:
        """Accept no new streams, give the open ones this long to end, then cut them."""
        self._health.set_serving(False)
        self._listener.stop()
        self._server.stop(grace_seconds).wait()
        self._sweeper.stop()


class _CallFinder(grpc.GenericRpcHandler):  # type: ignore[type-arg]  # not at runtime
    """Finds the handler of a call, in gRPC's one thread for all calls: it must be quick."""

    def __init__(self, service: str, handler: _SessionHandler, guard: ConnectionGuard) -> None:
        self._path, self._guard = f"/{service}/{METHOD}", guard
        self._method = grpc.stream_stream_rpc_method_handler(handler)

    def service(self, call: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler | None:  # type: ignore[type-arg]  # as above
        """Return the handler; None refuses the call without another thread."""
        if call.method != self._path:
            return None
        metadata = cast("Iterable[tuple[str, bytes]]", call.invocation_metadata)
        return self._method if self._guard.is_heeded(metadata) else None


class _SessionHandler:
    """Runs the handler of each Session that the guard admits."""

    def __init__(
        self,
        handler: Callable[[ServerStream], None],
        guard: ConnectionGuard,
        listener: BulkListener,
    ) -> None:
        self.handler, self._guard, self._listener = handler, guard, listener

    def __call__(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        evidence, answer = trust.begin_handshake(context, self._guard.credentials)
        stream = ServerStream(
            requests, context, evidence, self._guard.record_refusal, self._listener
        )
        refusal = self._guard.admit(stream)
        if refusal is not None:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, refusal)
        try:
            context.send_initial_metadata(answer)  # shows the client that the stream is open
            name = f"reader {stream.peer}"
            threading.Thread(target=self._read, args=(stream,), name=name, daemon=True).start()
            yield from stream.responses()
        finally:
            self._guard.release(stream)

    def _read(self, stream: ServerStream) -> None:
        try:
            self.handler(stream)
        except Exception:  # noqa: BLE001 - one client's trouble must not end the shard
            logging.exception("the stream of %s is closed after an error", stream.peer)
        finally:
            stream.close()


def serve(
    address: str,
    port: int,
    handler: Callable[[ServerStream], None],
    keepalive_seconds: float = 20.0,
    service: str = SERVICE,
    dscp: int | None = None,
    guard: ConnectionGuard | None = None,
) -> GrpcServer:
    """Listen, and run ``handler`` in a thread of its own for each stream.

    The stream ends in good order when the handler returns. The health service reports NOT_SERVING
    until `GrpcServer.set_serving`.

    Args:
        address: To bind; see `check_bind`.
        port: 0 takes a free one.
        handler: Called with each new stream; reads it to its end.
        keepalive_seconds: A client silent for twice as long is lost.
        service: Whose Session is served.
        dscp: Class of service of what is sent, 0..63; None: the system's own.
        guard: Admits and authenticates clients; None: admits everybody. Streams beyond its limit
            are refused with RESOURCE_EXHAUSTED.

    Raises:
        PortInUse: Another process has the port, or the address is not of this machine.
    """
    guard = guard or ConnectionGuard()
    most = guard.most_streams
    options = [
        *channel_options(keepalive_seconds, dscp),
        ("grpc.so_reuseport", 0),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        ("grpc.max_connection_idle_ms", _IDLE_MS),
        ("grpc.max_allowed_incoming_connections", most_connections(most)),
    ]
    executor: Any = DaemonThreads()
    server = grpc.server(
        executor,
        options=options,
        maximum_concurrent_rpcs=None if most is None else most + _SPARE_CALLS,
    )
    listener = BulkListener(address, guard.credentials, dscp)
    sessions = _SessionHandler(handler, guard, listener)
    server.add_generic_rpc_handlers((_CallFinder(service, sessions, guard),))
    health = HealthService(("", service))
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    try:
        bound = trust.add_port(server, host_and_port(address, port), guard.credentials)
    except RuntimeError as error:
        raise PortInUse(_why_not_bound(address, port)) from error
    server.start()
    return GrpcServer(server, health, sessions, ConnectionSweeper(bound, guard), listener)


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
        "stop the process that has it, or choose another --port or --ip_PS"
    )
