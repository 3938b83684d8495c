"""``thinwire health HOST:PORT``: queries a PS, or a worker that accepts peers, for its health.

It writes the answer and exits with 0 for SERVING, 1 for NOT_SERVING, 2 for a command line or files
that are of no use, and 3 where nobody answers. A token is not needed.

gRPC is imported when it is used, so that ``--help`` is instant.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from thinwire.tools.arguments import is_address

_ABOUT = """Queries a PS, or a worker that accepts peers, for its health.

It writes the answer and exits with 0 for SERVING, 1 for NOT_SERVING, 2 for a command line or files
that are of no use, and 3 where nobody answers. A token is not needed.
"""
_EXIT_NOT_SERVING = 1
_PATIENCE_SECONDS = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Query the node that the command line names; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="thinwire health",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("address", help="Where the node listens. [host:port]")
    add(
        *("--seconds",),
        type=float,
        default=_PATIENCE_SECONDS,
        help="Time to wait for an answer. [seconds; default %(default)g]",
    )
    for name, what in (
        ("ca", "Certificate of the authority that signed the node's, in PEM form."),
        ("cert", "Own certificate, for a node that wants one."),
        ("key", "Its private key."),
    ):
        default = "no TLS" if name == "ca" else "none"
        add(f"--tls_{name}", metavar="FILE", help=f"{what} [file; default {default}]")
    given = parser.parse_args(arguments)
    if (given.tls_cert is None) != (given.tls_key is None) or (given.tls_cert and not given.tls_ca):
        parser.error("--tls_cert and --tls_key go together, and with --tls_ca")
    if not is_address(given.address):
        parser.error(f"{given.address} is not host:port; give for example 127.0.0.1:2223")
    from thinwire.ops.types import ConfigurationError
    from thinwire.proto.grpc.health import HealthCheckFailed, probe
    from thinwire.proto.security import credentials as trust
    from thinwire.runtime.run.settings import EXIT_CONFIGURATION, EXIT_DONE, EXIT_UNREACHABLE

    files = trust.CredentialFiles(given.tls_cert, given.tls_key, given.tls_ca)
    try:
        credentials = trust.read(files, "", None, serves=False)
        status = probe(given.address, given.seconds, credentials)
    except ConfigurationError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_CONFIGURATION
    except HealthCheckFailed as error:
        sys.stderr.write(f"{given.address}: {error}\n")
        return EXIT_UNREACHABLE
    sys.stdout.write(f"{status}\n")
    return EXIT_DONE if status == "SERVING" else _EXIT_NOT_SERVING
