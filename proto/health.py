"""Asks a PS, or a worker that listens to others, whether it takes work (grpc.health.v1).

``python -m proto.health HOST:PORT [--tls_ca CA [--tls_cert CERT --tls_key KEY]]`` writes the answer
and exits with 0 for SERVING, 1 for NOT_SERVING, and 3 where nobody answers. A token is not needed.
"""

from __future__ import annotations

import argparse
import pathlib
import sys
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ops.credentials import NO_CREDENTIALS, Credentials
from ops.run import EXIT_DONE, EXIT_UNREACHABLE
from proto.credentials import open_channel

_EXIT_NOT_SERVING = 1
_PATIENCE_SECONDS = 5.0


class NoAnswer(Exception):
    """Nobody tells; the message says why."""


def probe(address: str, timeout_seconds: float, credentials: Credentials = NO_CREDENTIALS) -> str:
    """Return SERVING or NOT_SERVING.

    Args:
        address: ``host:port``.
        timeout_seconds: Patience.
        credentials: Of whoever asks; a PS with an authority tells nothing without.

    Raises:
        NoAnswer: None came.
    """
    channel = open_channel(address, credentials, [("grpc.enable_http_proxy", 0)])
    try:
        answer = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(), timeout=timeout_seconds, wait_for_ready=False
        )
        return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
    except grpc.RpcError as error:
        raise NoAnswer(f"{error.code().name}: {error.details()}") from error
    finally:
        channel.close()


def main(arguments: Sequence[str] | None = None) -> int:
    """Ask whom the command line names; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m proto.health",
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
    except (NoAnswer, OSError) as error:
        sys.stderr.write(f"{given.address}: {error}\n")
        return EXIT_UNREACHABLE
    sys.stdout.write(f"{status}\n")
    return EXIT_DONE if status == "SERVING" else _EXIT_NOT_SERVING


if __name__ == "__main__":
    sys.exit(main())
