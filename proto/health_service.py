"""grpc.health.v1 for whoever can connect: a shard's word on whether it takes work.

grpcio-health-checking's own servicer sends while it holds the lock that gRPC's only completion
thread wants when a watcher leaves, and then neither goes on (grpc/grpc pull request 43403): a
stranger could stop a whole shard. Here nothing is sent under a lock.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_MOST_WATCHERS = 4  # at a time: each keeps one of the server's calls, and a thread
_Response = health_pb2.HealthCheckResponse


class HealthService(health_pb2_grpc.HealthServicer):
    """Tells everybody who can connect, but only a few of them for as long as they like.

    Args:
        services: Names that can be asked for; none of them serves until `set_serving`.
    """

    def __init__(self, services: Sequence[str]) -> None:
        self._services = frozenset(services)
        self._status = _Response.NOT_SERVING
        self._changed = threading.Condition()
        self._room = threading.Semaphore(_MOST_WATCHERS)

    def set_serving(self, serving: bool) -> None:
        """Say of all services whether they take work."""
        with self._changed:
            self._status = _Response.SERVING if serving else _Response.NOT_SERVING
            self._changed.notify_all()

    def Check(  # noqa: N802 - the name of the call
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        """Tell a service's health."""
        self._check_name(request, context)
        return _Response(status=self._status)

    def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> Iterator[health_pb2.HealthCheckResponse]:
        """Tell every change of a service's health; of those who ask, to those who fit in."""
        self._check_name(request, context)
        if not self._room.acquire(blocking=False):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "others watch; call Check instead")
        try:
            yield from self._tell(context)
        finally:
            self._room.release()

    def _tell(self, context: grpc.ServicerContext) -> Iterator[health_pb2.HealthCheckResponse]:
        told: int | None = None
        is_watched = context.add_callback(self._wake)  # False: it has left already
        while is_watched:
            with self._changed:
                while self._status == told and context.is_active():
                    self._changed.wait()
                told = self._status
            if not context.is_active():
                return
            yield _Response(status=told)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _check_name(
        self, request: health_pb2.HealthCheckRequest, context: grpc.ServicerContext
    ) -> None:
        if request.service not in self._services:
            context.abort(grpc.StatusCode.NOT_FOUND, f"no service {request.service!r:.80} here")
