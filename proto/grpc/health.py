"""Server and client of the service grpc.health.v1, for the health of a PS or of a worker."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from thinwire.proto.security import credentials as trust
from thinwire.runtime.run.credentials import NO_CREDENTIALS, Credentials

# Largest number of simultaneous Watch calls, each of which occupies a server call and a thread.
_MOST_WATCHERS = 4
_Response = health_pb2.HealthCheckResponse


class HealthCheckFailed(Exception):
    """Error: the node did not answer a health check; the message states the reason."""


def probe(address: str, timeout_seconds: float, credentials: Credentials = NO_CREDENTIALS) -> str:
    """Query a node's health over gRPC; return SERVING or NOT_SERVING.

    Args:
        address: ``host:port`` of the node.
        timeout_seconds: Time limit for the answer, in seconds.
        credentials: Certificate, key and token of the client. A PS with a certificate authority
            rejects every client without a certificate.

    Raises:
        HealthCheckFailed: The node did not answer the health check.
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
    """Return a text with the reason for a failed health check, and the remedy."""
    code, reason = error.code(), str(error.details() or "")
    if trust.is_distrust(reason):
        return f"the node is not trusted: {trust.explain_distrust(reason)}."
    if trust.is_hung_up(reason):
        return (
            "a server listens there and closes the connection: does it require TLS, or a "
            "certificate of this client? Set --tls_ca, --tls_cert and --tls_key."
        )
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return f"no answer within {timeout_seconds:g} s; set a longer --seconds, or check the PS."
    if code in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.NOT_FOUND):
        return "the server there is not a Thinwire node: it has no health service."
    return f"nothing answers at {address}; check that the PS is running and the address is right"


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # has no annotations
    """gRPC health service: any client may check a node's health; up to 4 clients may watch it.

    The servicer of grpcio-health-checking sends while it holds a lock. gRPC's only completion
    thread takes the same lock when a watcher leaves, which can deadlock (grpc/grpc pull request
    43403), so a stranger could stop a whole shard. The class `HealthService` sends nothing while it
    holds a lock.

    Args:
        services: Names of the gRPC services whose health clients can query. All services are
            NOT_SERVING until `set_serving` is called.
    """

    def __init__(self, services: Sequence[str]) -> None:
        self._services = frozenset(services)
        self._status = _Response.NOT_SERVING
        self._changed = threading.Condition()
        self._free_watchers = threading.Semaphore(_MOST_WATCHERS)

    def set_serving(self, serving: bool) -> None:
        """Set the health of all services: SERVING if `serving` is True, else NOT_SERVING."""
        with self._changed:
            self._status = _Response.SERVING if serving else _Response.NOT_SERVING
            self._changed.notify_all()

    def Check(  # noqa: N802 - the name in grpc.health.v1
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """Return the health (SERVING or not) of the gRPC service that a client names."""
        self._check_name(request, context)
        return _Response(status=self._status)

    def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> Iterator[health_pb2.HealthCheckResponse]:
        """Yield a service's health now and at each change; reject a client if 4 clients already
        watch.
        """
        self._check_name(request, context)
        if not self._free_watchers.acquire(blocking=False):
            context.abort(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                "the health service has too many streams of Watch; call Check instead",
            )
        try:
            yield from self._changes(context)
        finally:
            self._free_watchers.release()

    def _changes(self, context: grpc.ServicerContext) -> Iterator[health_pb2.HealthCheckResponse]:
        sent: int | None = None
        is_watched = context.add_callback(self._wake)  # False if the watching client has left
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
            context.abort(grpc.StatusCode.NOT_FOUND, f"unknown service {request.service!r:.80}")
