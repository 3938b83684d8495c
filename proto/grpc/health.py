"""Queries a PS, or a worker that accepts peers, for its health (grpc.health.v1).

``thinwire health HOST:PORT [--tls_ca CA [--tls_cert CERT --tls_key KEY]]``
writes the answer and exits with 0 for SERVING, 1 for NOT_SERVING, and 3 where nobody answers. A
token is not needed.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import threading
from collections.abc import Iterator, Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from thinwire.ops.run.credentials import NO_CREDENTIALS, Credentials
from thinwire.ops.run.settings import EXIT_DONE, EXIT_UNREACHABLE
from thinwire.proto.security.credentials import open_channel

_EXIT_NOT_SERVING = 1
_PATIENCE_SECONDS = 5.0
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
    channel = open_channel(address, credentials, [("grpc.enable_http_proxy", 0)])
    try:
        answer = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=timeout_seconds, wait_for_ready=False
        )
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
    except grpc.RpcError as error:
        raise HealthCheckFailed(f"{error.code().name}: {error.details()}") from error
    finally:
        channel.close()


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


def main(arguments: Sequence[str] | None = None) -> int:
    """Query the node that the command line names; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="thinwire health",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("address", help="host:port of a PS")
    add("--seconds", type=float, default=_PATIENCE_SECONDS, help="patience")
    for name, what in (("ca", "authority of the PS"), ("cert", "own"), ("key", "its key")):
        add(f"--tls_{name}", type=pathlib.Path, help=f"certificate in PEM form: {what}")
    given = parser.parse_args(arguments)
    if (given.tls_cert is None) != (given.tls_key is None) or (given.tls_cert and not given.tls_ca):
        parser.error("--tls_cert and --tls_key go together, and with --tls_ca")
    files = (given.tls_cert, given.tls_key, given.tls_ca)
    try:
        credentials = Credentials(*(b"" if path is None else path.read_bytes() for path in files))
        status = probe(given.address, given.seconds, credentials)
    except (HealthCheckFailed, OSError) as error:
        sys.stderr.write(f"{given.address}: {error}\n")
        return EXIT_UNREACHABLE
    sys.stdout.write(f"{status}\n")
    return EXIT_DONE if status == "SERVING" else _EXIT_NOT_SERVING


if __name__ == "__main__":
    sys.exit(main())
