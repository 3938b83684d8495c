"""Parses the argument RUN of `thinwire status` and `stop`, and the flags of credentials."""

from __future__ import annotations

import argparse
import pathlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thinwire.tools.recorded import RecordedRun

#: Flag of a command's credentials, named like the flag of a node -> help text.
CREDENTIAL_FLAGS = {
    "tls_cert": "Certificate of a Supervisor of the run, in PEM form.",
    "tls_key": "Private key of the certificate in --tls_cert.",
    "tls_ca": "Certificate of the authority that signed the PS's certificate.",
    "token_file": "File with the run's token.",
}


def make_parser(command: str, about: str, seconds: float, purpose: str) -> argparse.ArgumentParser:
    """Return a parser of the argument RUN, the credential flags and a time limit in seconds."""
    parser = argparse.ArgumentParser(
        prog=f"thinwire {command}",
        description=about,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", help="Run directory, or host:port of shard 0.")
    add_credential_flags(parser, "the run's flag")
    parser.add_argument(
        "--seconds",
        type=float,
        default=seconds,
        help=f"Time for {purpose}. [seconds; default %(default)g]",
    )
    return parser


def add_credential_flags(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the flags of credentials to a parser; ``default`` is their default in the help text."""
    for name, text in CREDENTIAL_FLAGS.items():
        parser.add_argument(f"--{name}", metavar="FILE", help=f"{text} [file; default {default}]")


def is_address(text: str) -> bool:
    """Return True if a text has the form ``host:port`` with a valid port."""
    host, _, port = text.rpartition(":")
    return bool(host) and port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16


def find(run: str) -> RecordedRun | str:
    """Return the run directory, or PS shard 0's address, that the user's argument RUN names.

    Raises:
        ConfigurationError: The argument RUN is neither a run directory nor ``host:port``.
    """
    from thinwire.ops.types import ConfigurationError
    from thinwire.tools.recorded import RecordedRun

    if pathlib.Path(run).is_dir():
        recorded = RecordedRun(pathlib.Path(run))
        if recorded.is_run:
            return recorded
        raise ConfigurationError(
            f"the folder {run} contains no run: it has no locks, flags, summary.json or "
            "metrics.jsonl; give the --run_dir of a run, or host:port of its shard 0."
        )
    if is_address(run):
        return run
    raise ConfigurationError(
        f"the run {run} is neither a folder nor host:port; give the --run_dir of a run, or the "
        "address of its shard 0, for example 127.0.0.1:2223."
    )
