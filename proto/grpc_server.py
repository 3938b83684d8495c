"""The shard's end: a gRPC server that hands each Session to a function as a ServerStream."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from absl import logging
from grpc_health.v1 import health_pb2_grpc

from ops.types import ConfigurationError
from proto import credentials as trust
from proto.daemon_threads import DaemonThreads
from proto.door import Door
from proto.grpc_common import METHOD, SERVICE, channel_options, host_and_port
from proto.health_service import HealthService
from proto.server_stream import ServerStream

_SPARE_CALLS = 8  # health checks, and streams that are told that there is no room
#: Connections that nobody speaks on keep a descriptor: until one has become HTTP/2, and while it
#: has no stream.
_HANDSHAKE_MS, _IDLE_MS = 30_000, 60_000


class PortInUse(ConfigurationError):
    """The address cannot be listened on."""


class Server:
    """A listening shard; made by `serve`."""

    def __init__(self, server: grpc.Server, port: int, health: HealthService) -> None:
        self._server, self._health = server, health
        self.port = port

    def set_serving(self, serving: bool) -> None:
        """Say through grpc.health.v1 whether the shard takes work."""
        self._health.set_serving(serving)

    def stop(self, grace_seconds: float = 0.0) -> None:
        """Take no new streams, give the open ones so long to end, then cut them."""
        self._health.set_serving(False)
        self._server.stop(grace_seconds).wait()


class _Sessions:
    """Runs the handler of each Session and bounds their number."""

    def __init__(
        self, handler: Callable[[ServerStream], None], max_streams: int, door: Door
    ) -> None:
        self._handler, self._door = handler, door
        self._room = threading.Semaphore(max_streams)
        self._max_streams = max_streams

    def __call__(self, requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        peer = context.peer()
        refusal = self._take_room(peer)
        if refusal is not None:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, refusal)
        try:
            yield from self._converse(requests, context)
        finally:
            self._door.leave(peer)
            self._room.release()

    def _take_room(self, peer: str) -> str | None:
        """Count a stream in; return why it cannot be."""
        if not self._room.acquire(blocking=False):
            full = f"all {self._max_streams} streams of this shard are taken"
            self._door.note("no_room", peer, full)
            return full
        refusal = self._door.enter(peer)
        if refusal is not None:
            self._room.release()
        return refusal

    def _converse(
        self, requests: Iterator[bytes], context: grpc.ServicerContext
    ) -> Iterator[bytes]:
        evidence, answer = trust.meet(context, self._door.credentials)
        stream = ServerStream(requests, context, evidence)
        context.send_initial_metadata(answer)  # tells the client that the stream stands
        name = f"reader {stream.peer}"
        threading.Thread(target=self._read, args=(stream,), name=name, daemon=True).start()
        self._door.await_hello(stream)
        try:
            yield from stream.responses()
        finally:
            self._door.introduced(stream)

    def _read(self, stream: ServerStream) -> None:
        try:
            self._handler(stream)
        except Exception:  # noqa: BLE001 - one client's trouble must not end the shard
            logging.exception("the stream of %s is closed after an error", stream.peer)
        finally:
            stream.close()


def serve(
    address: str,
    port: int,
    handler: Callable[[ServerStream], None],
    max_streams: int,
    keepalive_seconds: float = 20.0,
    service: str = SERVICE,
    dscp: int | None = None,
    door: Door | None = None,
) -> Server:
    """Listen, and run ``handler`` in a thread of its own for each stream.

    The stream ends in good order when the handler returns. The health service says NOT_SERVING
    until `Server.set_serving`.

    Args:
        address: To bind; see `check_bind`.
        port: 0 takes a free one.
        handler: Called with each new stream; reads it to its end.
        max_streams: Further ones are refused with RESOURCE_EXHAUSTED.
        keepalive_seconds: A client silent for twice as long is lost.
        service: Whose Session is served.
        dscp: Class of service of what is sent, 0..63; None: the system's own.
        door: Who is let in; None: everybody.

    Raises:
        PortInUse: Another process has the port, or the address is not of this machine.
    """
    options = [
        *channel_options(keepalive_seconds, dscp),
        ("grpc.so_reuseport", 0),
        ("grpc.server_handshake_timeout_ms", _HANDSHAKE_MS),
        ("grpc.max_connection_idle_ms", _IDLE_MS),
    ]
    executor: Any = DaemonThreads()
    server = grpc.server(
        executor, options=options, maximum_concurrent_rpcs=max_streams + _SPARE_CALLS
    )
    door = door or Door()
    session = grpc.stream_stream_rpc_method_handler(_Sessions(handler, max_streams, door))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {METHOD: session}),)
    )
    health = HealthService(("", service))
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    try:
        bound = trust.add_port(server, host_and_port(address, port), door.credentials)
    except RuntimeError as error:
        raise PortInUse(_why_not_bound(address, port)) from error
    server.start()
    return Server(server, bound, health)


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
