"""``thinwire doctor``: checks in 20 s if this machine, hosts and PS shards are fit for training."""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import json
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from thinwire.tools.arguments import add_credential_flags

if TYPE_CHECKING:
    from thinwire.tools.findings import Finding

_ABOUT = """Checks if this machine, and the named hosts and shards, are fit for a run.

Writes a line for each check: ok, warning or problem, then the finding and what to do. Exits with 0
if every check is ok, 1 with warnings, 2 with problems or if a file cannot be read.
"""
_SECONDS = 20.0
_PORT = 2223


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks of `thinwire doctor` that the command line selects; return the exit code."""
    options = parser().parse_args(arguments)
    from thinwire.ops.types import ConfigurationError
    from thinwire.runtime.run.settings import EXIT_CONFIGURATION
    from thinwire.tools.findings import worst_code

    try:
        findings = []
        for finding in examine(options):
            findings.append(finding)
            if not options.json:
                sys.stdout.write(f"{finding}\n")
                sys.stdout.flush()
    except ConfigurationError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_CONFIGURATION
    if options.json:
        text = json.dumps([dataclasses.asdict(item) for item in findings], indent=2)
        sys.stdout.write(f"{text}\n")
    return worst_code(findings)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line of `thinwire doctor`."""
    argument_parser = argparse.ArgumentParser(
        prog="thinwire doctor",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = argument_parser.add_argument
    add(
        *("--run_dir",),
        metavar="DIR",
        type=pathlib.Path,
        default=pathlib.Path("runs"),
        help="Directory of runs, whose disk is checked. [folder; default %(default)s]",
    )
    add(
        *("--port",),
        type=int,
        default=_PORT,
        help="Port of shard 0; 0: any free port. [port; default %(default)s]",
    )
    add(
        *("--ps_hosts",),
        metavar="LIST",
        default="",
        help="Addresses of PS shards to check, separated by commas. [host:port; default none]",
    )
    add(
        *("--hosts_file",),
        metavar="FILE",
        type=pathlib.Path,
        help="Hosts file of a Cluster over ssh. [file; default none]",
    )
    add(
        *("--ssh_options",),
        metavar="TEXT",
        default="",
        help="Additional options for ssh. [options; default none]",
    )
    add(
        *("--remote_python",),
        metavar="PATH",
        help="Python interpreter on the hosts. [path or name; default the path of this Python]",
    )
    add(
        *("--seconds",),
        type=float,
        default=_SECONDS,
        help="Time limit for the check of Keras' backend. [seconds; default %(default)g]",
    )
    add("--json", action="store_true", help="Write one JSON list. [switch; default text]")
    add_credential_flags(argument_parser, "none")
    return argument_parser


def examine(given: argparse.Namespace) -> Iterator[Finding]:
    """Yield the results of all checks in order; PS shards and hosts are checked in parallel.

    Args:
        given: Parsed command line of `thinwire doctor`.

    Raises:
        ConfigurationError: The hosts file, or the credentials, cannot be read.
    """
    from thinwire.tools import machine, network, observer

    addresses = [word for word in given.ps_hosts.split(",") if word]
    credentials = observer.credentials_of(given, {})
    with concurrent.futures.ThreadPoolExecutor() as pool:

        def start(examination: Callable[[], Iterable[Finding]]) -> Callable[[], list[Finding]]:
            return pool.submit(lambda: list(examination())).result

        shards = [
            start(lambda address=address: network.shard(address, credentials))  # type: ignore[misc]
            for address in addresses
        ]
        host_findings = start(
            lambda: (
                network.hosts(
                    given.hosts_file,
                    given.ssh_options,
                    given.remote_python or sys.executable,
                    given.port,
                )
                if given.hosts_file
                else ()
            )
        )
        yield machine.python()
        yield from machine.packages()
        yield machine.processors()
        yield machine.memory()
        yield machine.open_files()
        yield from machine.run_directory(given.run_dir)
        if not (given.hosts_file or addresses):
            yield machine.port(given.port)
        for shard_findings in shards:
            yield from shard_findings()
        # The backend's check measures the time of a training step, so the threads of the shard and
        # host checks must have ended.
        yield from host_findings()
        yield from machine.backend(given.seconds)
