"""``thinwire stop RUN``: ends a run gracefully, and waits until the run has ended.

If the launcher runs on this host, `thinwire stop` sends SIGINT to the launcher, as Ctrl-C does. If
no launcher runs on this host, `thinwire stop` contacts PS shard 0, which ends the run for all
nodes. If PS shard 0 does not answer, `thinwire stop` sends SIGINT to each process of the run on
this host.
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

_ABOUT = """Ends a run as Ctrl-C does, and waits until it has ended; the run can be resumed.

Exits with 0 if no process of the run is running; 2 if the run does not exist; 3 if the run cannot
be reached, or a process is still running after the time limit; 4 if the run's PS rejects this
command.
"""
_PATIENCE_SECONDS = 60.0
_CONTACT_SECONDS = 10.0
_POLL_SECONDS = 0.1
_CAUSE = "interrupted"


def main(arguments: Sequence[str] | None = None) -> int:
    """End the run that the command line names; return the exit code."""
    options = parser().parse_args(arguments)
    from thinwire.ops.types import ConfigurationError
    from thinwire.proto.grpc import Unreachable
    from thinwire.proto.grpc.session import RequestRejected
    from thinwire.runtime.run.settings import EXIT_CONFIGURATION, EXIT_REFUSED, EXIT_UNREACHABLE

    try:
        recorded = find(options.run)
        if isinstance(recorded, str):
            return _end_remote(options, recorded)
        return _end_directory(options, recorded)
    except ConfigurationError as error:
        code, text = EXIT_CONFIGURATION, str(error)
    except RequestRejected as error:
        code, text = EXIT_REFUSED, str(error)
    except Unreachable as error:
        code, text = EXIT_UNREACHABLE, str(error)
    sys.stderr.write(f"{text}\n")
    return code


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line of `thinwire stop`."""
    return make_parser("stop", _ABOUT, _PATIENCE_SECONDS, "the run to end")


def _report(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _end_remote(given: argparse.Namespace, address: str) -> int:
    """End a run by the address of PS shard 0, without a run directory."""
    from thinwire.tools import observer

    contact = observer.Contact(address, observer.credentials_of(given, {}), given.seconds)
    ended = observer.end_run(contact, _CAUSE)
    began = "" if ended.had_model else ", before a worker had offered the model"
    _report(f"{address}: the run has ended ({ended.cause}{began})")
    return 0


def _end_directory(given: argparse.Namespace, found: RecordedRun) -> int:
    """End the run that a run directory describes."""
    if not found.alive:
        _report(f"{given.run}: no process of this run is running")
        return 0
    deadline = time.monotonic() + given.seconds
    _report(f"{given.run}: {_request_end(given, found)}")
    return _wait(given.run, found.directory, deadline)


def _request_end(given: argparse.Namespace, found: RecordedRun) -> str:
    """Request the run's end by the gentlest possible means; return a text that names the means.

    Raises:
        ConfigurationError: The credential files cannot be read.
        Unreachable: No process of the run can be reached.
        RequestRejected: PS shard 0 rejects the connection of `thinwire stop`.
    """
    from thinwire.proto.grpc import Unreachable
    from thinwire.tools import observer

    launchers = [process for process in found.alive if process.is_launcher and process.is_here]
    if launchers and (interrupted := _interrupt(launchers)):
        return interrupted
    local_processes = [process for process in found.alive if process.is_here]
    address = found.address
    if address is not None:
        credentials = observer.credentials_of(given, found.flags)
        contact = observer.Contact(address, credentials, min(_CONTACT_SECONDS, given.seconds))
        try:
            ended = observer.end_run(contact, _CAUSE)
        except Unreachable:
            if not local_processes:
                raise
        else:
            # Without a model, PS shard 0 ends alone, because the workers are not connected and
            # would continue to look for a PS.
            if not ended.had_model:
                _interrupt([process for process in local_processes if process.node != "ps-0"])
            return f"shard 0 at {address} ends the run ({ended.cause})"
    if interrupted := _interrupt(local_processes):
        return interrupted
    where = ", ".join(map(str, found.alive))
    raise Unreachable(f"{given.run}: {where} cannot be reached from this host; stop it there.")


def _interrupt(processes: Sequence[NodeProcess]) -> str:
    """Send SIGINT to processes on this host; return a text that lists the processes or ""."""
    done = []
    for process in processes:
        # Sending the signal fails if the process has ended or belongs to another user.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if process.owner is not None:
                os.kill(process.owner.pid, signal.SIGINT)
                done.append(f"interrupted {process}")
    return "; ".join(done)


def _wait(name: str, directory: pathlib.Path, deadline: float) -> int:
    """Wait until no process of the run is running; return the exit code of `thinwire stop`."""
    from thinwire.runtime.run.settings import EXIT_UNREACHABLE
    from thinwire.tools.recorded import RecordedRun

    began = time.monotonic()
    while True:
        recorded = RecordedRun(directory)
        alive = recorded.alive
        if not alive:
            _report(f"{name}: has ended, after {time.monotonic() - began:.1f} s")
            return 0
        if time.monotonic() >= deadline:
            running = "; ".join(map(str, alive))
            sys.stderr.write(
                f"{name}: still running: {running}. Repeat the command to continue waiting, or end "
                "the process on its host with `kill -9`; a killed run can be resumed too.\n"
            )
            return EXIT_UNREACHABLE
        time.sleep(_POLL_SECONDS)
