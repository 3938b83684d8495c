"""``thinwire doctor``: whether this machine, its hosts and a PS are fit for a run, in 20 s."""

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

_ABOUT = """Whether this machine, and the hosts and shards that are named, are fit for a run.

A line for each thing that was examined: ok, warning or problem, what was found, what to do. Exits
with 0 if all is well, 1 with warnings, 2 with problems; 2 also where a file cannot be read.
"""
_SECONDS = 20.0
_PORT = 2223


def main(arguments: Sequence[str] | None = None) -> int:
    """Examine what the command line names; return the exit code."""
    given = parser().parse_args(arguments)
    from thinwire.ops.types import ConfigurationError
    from thinwire.runtime.run.settings import EXIT_CONFIGURATION
    from thinwire.tools.findings import worst_code

    try:
        found = []
        for finding in examine(given):
            found.append(finding)
            if not given.json:
                sys.stdout.write(f"{finding}\n")
                sys.stdout.flush()
    except ConfigurationError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_CONFIGURATION
    if given.json:
        text = json.dumps([dataclasses.asdict(each) for each in found], indent=2)
        sys.stdout.write(f"{text}\n")
    return worst_code(found)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="thinwire doctor",
        description=_ABOUT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = made.add_argument
    add(
        *("--run_dir",),
        metavar="DIR",
        type=pathlib.Path,
        default=pathlib.Path("runs"),
        help="Where runs will write. [folder; default %(default)s]",
    )
    add(
        *("--port",),
        type=int,
        default=_PORT,
        help="Where shard 0 will listen; 0: any free one. [port; default %(default)s]",
    )
    add(
        *("--ps_hosts",),
        metavar="LIST",
        default="",
        help="Shards to reach, with commas. [host:port; default none]",
    )
    add(
        *("--hosts_file",),
        metavar="FILE",
        type=pathlib.Path,
        help="Hosts of a run by ssh, as a Cluster takes it. [file; default none]",
    )
    add(
        *("--ssh_options",),
        metavar="TEXT",
        default="",
        help="More options for ssh. [options; default none]",
    )
    add(
        *("--remote_python",),
        metavar="PATH",
        help="Python of the hosts. [path or name; default the path of this one]",
    )
    add(
        *("--seconds",),
        type=float,
        default=_SECONDS,
        help="Patience with TensorFlow. [seconds; default %(default)g]",
    )
    add("--json", action="store_true", help="Write one JSON list. [switch; default text]")
    add_credential_flags(made, "none")
    return made


def examine(given: argparse.Namespace) -> Iterator[Finding]:
    """Yield all findings, in order; those that wait for others run side by side.

    Raises:
        ConfigurationError: A hosts file, or credentials, that cannot be read.
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
        there = start(
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
        for each in shards:
            yield from each()
        yield from there()  # before the step below, which wants the processors alone
        yield from machine.tensorflow(given.seconds)
