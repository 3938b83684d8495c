"""``thinwire stop RUN``: ends a run gracefully, and waits until it has ended.

The launcher is interrupted where it runs on this host, as Ctrl-C does; else shard 0 is contacted,
which ends the run for all its nodes; else each process that lives on this host is interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import signal
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from thinwire.tools.arguments import find, make_parser

if TYPE_CHECKING:
    from thinwire.tools.recorded import NodeProcess, RecordedRun

_ABOUT = """Ends a run as Ctrl-C does, and waits until it has ended; it can be resumed.

Exits with 0 when nothing of the run lives any more, or nothing did before; 2 where there is no such
run; 3 where it cannot be reached, or something still lives after the time limit; 4 where its PS
rejects this command.
"""
_PATIENCE_SECONDS = 60.0
_CONTACT_SECONDS = 10.0
_POLL_SECONDS = 0.1
_CAUSE = "interrupted"


def main(arguments: Sequence[str] | None = None) -> int:
    """End the run that the command line names; return the exit code."""
    given = parser().parse_args(arguments)
    from thinwire.ops.types import ConfigurationError
    from thinwire.proto.grpc import Unreachable
    from thinwire.proto.grpc.session import RequestRejected
    from thinwire.runtime.run.settings import EXIT_CONFIGURATION, EXIT_REFUSED, EXIT_UNREACHABLE

    try:
        found = find(given.run)
        if isinstance(found, str):
            return _end_remote(given, found)
        return _end_directory(given, found)
    except ConfigurationError as error:
        code, text = EXIT_CONFIGURATION, str(error)
    except RequestRejected as error:
        code, text = EXIT_REFUSED, str(error)
    except Unreachable as error:
        code, text = EXIT_UNREACHABLE, str(error)
    sys.stderr.write(f"{text}\n")
    return code


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    return make_parser("stop", _ABOUT, _PATIENCE_SECONDS, "the run to end")


def _report(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _end_remote(given: argparse.Namespace, address: str) -> int:
    """End the run of a shard 0 of which only the address is known."""
    from thinwire.tools import observer

    contact = observer.Contact(address, observer.credentials_of(given, {}), given.seconds)
    ended = observer.end_run(contact, _CAUSE)
    began = "" if ended.had_model else ", before a worker had offered the model"
    _report(f"{address}: the run has ended ({ended.cause}{began})")
    return 0


def _end_directory(given: argparse.Namespace, found: RecordedRun) -> int:
    """End the run of a run directory."""
    if not found.alive:
        _report(f"{given.run}: nothing of this run lives")
        return 0
    deadline = time.monotonic() + given.seconds
    _report(f"{given.run}: {_request_end(given, found)}")
    return _wait(given.run, found.directory, deadline)


def _request_end(given: argparse.Namespace, found: RecordedRun) -> str:
    """Let the run end by the gentlest means there is; return what was done.

    Raises:
        ConfigurationError, Unreachable, RequestRejected: There is none that works.
    """
    from thinwire.proto.grpc import Unreachable
    from thinwire.tools import observer

    launchers = [each for each in found.alive if each.is_launcher and each.is_here]
    if launchers and (interrupted := _interrupt(launchers)):
        return interrupted
    here = [each for each in found.alive if each.is_here]
    address = found.address
    if address is not None:
        credentials = observer.credentials_of(given, found.flags)
        contact = observer.Contact(address, credentials, min(_CONTACT_SECONDS, given.seconds))
        try:
            ended = observer.end_run(contact, _CAUSE)
        except Unreachable:
            if not here:
                raise
        else:
            if not ended.had_model:  # nobody but this shard learns of it
                _interrupt([each for each in here if each.node != "ps-0"])
            return f"shard 0 at {address} ends the run ({ended.cause})"
    if interrupted := _interrupt(here):
        return interrupted
    where = ", ".join(map(str, found.alive))
    raise Unreachable(f"{given.run}: {where} cannot be reached from here; stop it there.")


def _interrupt(processes: Sequence[NodeProcess]) -> str:
    """Send SIGINT to processes of this host; return what was done, empty if nothing."""
    done = []
    for each in processes:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # ended, another user's
            if each.owner is not None:
                os.kill(each.owner.pid, signal.SIGINT)
                done.append(f"interrupted {each}")
    return "; ".join(done)


def _wait(name: str, directory: pathlib.Path, deadline: float) -> int:
    """Wait until nothing of the run lives; return the exit code."""
    from thinwire.runtime.run.settings import EXIT_UNREACHABLE
    from thinwire.tools.recorded import RecordedRun

    began = time.monotonic()
    while True:
        found = RecordedRun(directory)
        alive = found.alive
        if not alive:
            _report(f"{name}: has ended, after {time.monotonic() - began:.1f} s")
            return 0
        if time.monotonic() >= deadline:
            left = "; ".join(map(str, alive))
            sys.stderr.write(
                f"{name}: still lives: {left}. Repeat the command to wait on, or end it there by "
                "`kill -9`; a killed run can be resumed too.\n"
            )
            return EXIT_UNREACHABLE
        time.sleep(_POLL_SECONDS)
