"""The argument RUN of `status` and `stop`, and the flags that open its PS."""

from __future__ import annotations

import argparse
import pathlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thinwire.tools.recorded import RecordedRun

#: As nodes have them.
CREDENTIAL_FLAGS = {
    "tls_cert": "Certificate of a Supervisor of the run, in PEM form.",
    "tls_key": "Its private key.",
    "tls_ca": "Certificate of the authority that signed the PS's.",
    "token_file": "File with the run's token.",
}


def make_parser(command: str, about: str, seconds: float, purpose: str) -> argparse.ArgumentParser:
    """Return a parser of RUN, of the credentials, and of a time limit with this default."""
    parser = argparse.ArgumentParser(
        prog=f"thinwire {command}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", help="Run directory, or host:port of shard 0.")
    add_credential_flags(parser, "that of the run's flags")
    parser.add_argument(
        "--seconds",
        type=float,
        default=seconds,
        help=f"Time for {purpose}. [seconds; default %(default)g]",
    )
    return parser


def add_credential_flags(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the flags of certificates and token, with what holds where they are not given."""
    for name, what in CREDENTIAL_FLAGS.items():
        parser.add_argument(f"--{name}", metavar="FILE", help=f"{what} [file; default {default}]")


def is_address(text: str) -> bool:
    """Whether a text is ``host:port``, which a client can dial."""
    host, _, port = text.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16


def find(run: str) -> RecordedRun | str:
    """Return the run directory that a user names, or the address.

    Raises:
        ConfigurationError: It is neither.
    """
    from thinwire.ops.types import ConfigurationError
    from thinwire.tools.recorded import RecordedRun

    if pathlib.Path(run).is_dir():
        found = RecordedRun(pathlib.Path(run))
        if found.is_run:
            return found
        raise ConfigurationError(
            f"{run} is a folder without a run: it has no locks, flags, summary.json or "
            "metrics.jsonl; name a run's --run_dir, or host:port of its shard 0."
        )
    if is_address(run):
        return run
    raise ConfigurationError(
        f"{run} is neither a folder nor host:port; name a run's --run_dir, or the address of its "
        "shard 0, such as 127.0.0.1:2223."
    )
