"""The health of a PS, or of a worker that accepts peers (grpc.health.v1): served and queried."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from thinwire.proto.security import credentials as trust
from thinwire.runtime.run.credentials import NO_CREDENTIALS, Credentials

_MOST_WATCHERS = 4  # at a time: each keeps one of the server's calls, and a thread
_Response = health_pb2.HealthCheckResponse


class HealthCheckFailed(Exception):
    """Nobody answered, for the reason in the message."""


def probe(address: str, timeout_seconds: float, credentials: Credentials = NO_CREDENTIALS) -> str:
    """Return SERVING or NOT_SERVING.

    Args:
        address: ``host:port``.
        timeout_seconds: Patience.
        credentials: Of the client; a PS with an authority answers nobody without a certificate.

    Raises:
        HealthCheckFailed: No answer came.
    """
    channel = trust.open_channel(address, credentials, [("grpc.enable_http_proxy", 0)])
    try:
        answer = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=timeout_seconds, wait_for_ready=False
        )
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
    except grpc.RpcError as error:
        raise HealthCheckFailed(_explain(error, address, timeout_seconds)) from error
    finally:
        channel.close()


def _explain(error: grpc.RpcError, address: str, timeout_seconds: float) -> str:
    """Return why there is no answer, and what to do."""
    code, reason = error.code(), str(error.details() or "")
    if trust.is_distrust(reason):
        return f"it is not trusted: {trust.explain_distrust(reason)}."
    if trust.is_hung_up(reason):
        return (
            "something listens there, and hangs up: does it want TLS, or a certificate of this "
            "client? Set --tls_ca, --tls_cert and --tls_key."
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"no answer within {timeout_seconds:g} s; set a longer --seconds, or look at the PS."
    if code in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND):
        return "what listens there is no node of Thinwire: it has no health service."
    return f"nothing answers at {address}; is the PS running, and is this its address?"


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # has no annotations
    """Reports health to everybody who can connect, and changes of it to a few watchers at a time.

    grpcio-health-checking's own servicer sends while it holds the lock that gRPC's only completion
    thread wants when a watcher leaves, and then neither goes on (grpc/grpc pull request 43403): a
    stranger could stop a whole shard. Here nothing is sent under a lock.

    Args:
        services: Names that can be queried; none of them serves until `set_serving`.
    """

    def __init__(self, services: Sequence[str]) -> None:
        self._services = frozenset(services)
        self._status = _Response.NOT_SERVING
        self._changed = threading.Condition()
        self._free_watchers = threading.Semaphore(_MOST_WATCHERS)

    def set_serving(self, serving: bool) -> None:
        """Set whether all services accept work."""
        with self._changed:
            self._status = _Response.SERVING if serving else _Response.NOT_SERVING
            self._changed.notify_all()

    def Check(  # noqa: N802 - the name of the call
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """Return a service's health."""
        self._check_name(request, context)
        return _Response(status=self._status)

    def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> Iterator[health_pb2.HealthCheckResponse]:
        """Yield a service's health and every change of it; reject further watchers."""
        self._check_name(request, context)
        if not self._free_watchers.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "others watch; call Check instead")
        try:
            yield from self._changes(context)
        finally:
            self._free_watchers.release()

    def _changes(self, context: grpc.ServicerContext) -> Iterator[health_pb2.HealthCheckResponse]:
        sent: int | None = None
        is_watched = context.add_callback(self._wake)  # False: it has left already
        while is_watched:
            with self._changed:
                while self._status == sent and context.is_active():
                    self._changed.wait()
                sent = self._status
            if not context.is_active():
                return
            yield _Response(status=sent)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _check_name(
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> None:
        if request.service not in self._services:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r:.80} here")
