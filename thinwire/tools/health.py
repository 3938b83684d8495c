"""``thinwire health HOST:PORT``: queries the health of a PS, or of a worker of an all-reduce.

`thinwire health` writes the queried node's answer and exits with 0 for SERVING, 1 for NOT_SERVING,
2 for an invalid command line or unusable files, and 3 if the node does not answer. `thinwire
health` needs no token.

gRPC is imported after the command line is parsed, so that ``--help`` is fast.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from thinwire.tools.arguments import is_address

_ABOUT = """Queries the health of a PS or of a worker that accepts peers.

The command writes the answer and exits with 0 for SERVING, 1 for NOT_SERVING, 2 for an invalid
command line or unusable files, and 3 if the node does not answer. The command needs no token.
"""
_EXIT_NOT_SERVING = 1
_PATIENCE_SECONDS = 5.0


def main(arguments: Sequence[str] | None = None) -> int:
    """Query the health of the node that the command line names; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="thinwire health",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("address", help="Address of the PS, or of a worker that accepts peers. [host:port]")
    add(
        *("--seconds",),
        type=float,
        default=_PATIENCE_SECONDS,
        help="Longest wait for the node's answer. [seconds; default %(default)g]",
    )
    for name, text in (
        ("ca", "Certificate of the authority that signed the node's certificate, in PEM form."),
        ("cert", "This client's certificate, for a node that requires one."),
        ("key", "Private key of the certificate in --tls_cert."),
    ):
        default = "no TLS" if name == "ca" else "none"
        add(f"--tls_{name}", metavar="FILE", help=f"{text} [file; default {default}]")
    args = parser.parse_args(arguments)
    if (args.tls_cert is None) != (args.tls_key is None) or (args.tls_cert and not args.tls_ca):
        parser.error("give --tls_cert and --tls_key only together, and with --tls_ca")
    if not is_address(args.address):
        parser.error(f"{args.address} is no PS address; expected host:port, such as 127.0.0.1:2223")
    from thinwire.ops.types import ConfigurationError
    from thinwire.proto.grpc.health import HealthCheckFailed, probe
    from thinwire.proto.security import credentials as trust
    from thinwire.runtime.run.settings import EXIT_CONFIGURATION, EXIT_DONE, EXIT_UNREACHABLE

    files = trust.CredentialFiles(args.tls_cert, args.tls_key, args.tls_ca)
    try:
        credentials = trust.read(files, "", None, serves=False)
        status = probe(args.address, args.seconds, credentials)
    except ConfigurationError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_CONFIGURATION
    except HealthCheckFailed as error:
        sys.stderr.write(f"{args.address}: {error}\n")
        return EXIT_UNREACHABLE
    sys.stdout.write(f"{status}\n")
    return EXIT_DONE if status == "SERVING" else _EXIT_NOT_SERVING
