"""``thinwire status RUN``: shows a run's settings, progress, and running processes.

The run's status comes from PS shard 0 if this shard runs, else from the files of the run directory.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from thinwire.tools.arguments import find, make_parser

if TYPE_CHECKING:
    from thinwire.runtime.telemetry.run_status import RunStatus
    from thinwire.tools.recorded import RecordedRun

_ABOUT = """Shows a run's settings, progress, and running processes.

Exits with 0 for a run that is running or finished; 2 if the run does not exist; 3 for a run that
has died or does not answer; 4 if the run's PS rejects this observer. For a stopped run it exits
with the code of the run's nodes: 130 interrupted, 5 diverged, 1 a script that failed or returned
early.
"""
_PATIENCE_SECONDS = 3.0
#: Longest time from the start of a PS until the PS listens, in seconds. The PS first imports
#: modules and reads its checkpoint.
_START_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class RunReport:
    """State of a training run at one moment, as `thinwire status` shows it.

    Attributes:
        run: Run directory or address of PS shard 0, as the user gave it.
        state: State of the run: starting, running, finished, stopped, dead, unanswered or rejected.
        code: Exit code of `thinwire status` for this state of the run.
        why: Reason for the run's state; empty if the state needs no reason.
        source: Source of the run's figures: shard 0, summary.json, metrics.jsonl or nothing.
        status: Newest known status of the run; None if no status is known.
        recorded: Content of the run directory. None if only an address is known.
    """

    run: str
    state: str
    code: int
    why: str = ""
    source: str = "nothing"
    status: RunStatus | None = None
    recorded: RecordedRun | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the state of the run that the command line names; return the exit code."""
    options = parser().parse_args(arguments)
    from thinwire.ops.types import ConfigurationError
    from thinwire.runtime.run.settings import EXIT_CONFIGURATION

    try:
        report = inspect(options)
    except ConfigurationError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_CONFIGURATION
    if options.json:
        sys.stdout.write(json.dumps(document(report), indent=2, allow_nan=False) + "\n")
    else:
        sys.stdout.write("\n".join(lines(report)) + "\n")
    return report.code


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line of `thinwire status`."""
    argument_parser = make_parser("status", _ABOUT, _PATIENCE_SECONDS, "shard 0 to answer")
    argument_parser.add_argument(
        "--json", action="store_true", help="Write one JSON object. [switch; default text]"
    )
    return argument_parser


def inspect(given: argparse.Namespace) -> RunReport:
    """Return the report on the run that the command line names.

    Raises:
        ConfigurationError: The run does not exist, or the credential files cannot be read.
    """
    recorded = find(given.run)
    if isinstance(recorded, str):
        return _answer(given, recorded, None)
    if recorded.alive:
        address = recorded.address
        if address is not None and not _is_alone(recorded):
            return _answer(given, address, recorded)
        return RunReport(given.run, "running", 0, "", "metrics.jsonl", recorded.status, recorded)
    return _ended(given.run, recorded)


def _is_alone(found: RecordedRun) -> bool:
    """Return True if only processes of a run without PS (Standalone, Simulator) are running."""
    alone = ("Standalone", "Simulator")
    return all(process.owner is not None and process.owner.role in alone for process in found.alive)


def _answer(given: argparse.Namespace, address: str, found: RecordedRun | None) -> RunReport:
    """Contact PS shard 0 of a run, and return the report on the run."""
    from thinwire.proto import thinwire_pb2 as pb
    from thinwire.proto.grpc import Unreachable
    from thinwire.proto.grpc.session import RequestRejected
    from thinwire.runtime.run.settings import EXIT_REFUSED, EXIT_UNREACHABLE
    from thinwire.tools import observer

    credentials = observer.credentials_of(given, {} if found is None else found.flags)
    contact = observer.Contact(address, credentials, given.seconds)
    recorded = None if found is None else found.status
    source = "nothing" if recorded is None else "metrics.jsonl"
    try:
        status = observer.read_status(contact)
    except RequestRejected as error:
        if error.reason in (pb.REASON_STARTING, pb.REASON_NO_MODEL):
            return RunReport(given.run, "starting", 0, str(error), source, recorded, found)
        return RunReport(given.run, "rejected", EXIT_REFUSED, str(error), source, recorded, found)
    except Unreachable as error:
        if found is not None and _is_starting(found):
            return RunReport(given.run, "starting", 0, str(error), source, recorded, found)
        return RunReport(
            given.run, "unanswered", EXIT_UNREACHABLE, str(error), source, recorded, found
        )
    if status.stop_reason is None:
        return RunReport(given.run, "running", 0, "", "shard 0", status, found)
    return RunReport(given.run, *_end(status.stop_reason), "shard 0", status, found)


def _is_starting(found: RecordedRun) -> bool:
    """Return True if PS shard 0 has not started, or started less than `_START_SECONDS` ago."""
    owners = [process.owner for process in found.alive if process.node == "ps-0"]
    ages = [owner.age_seconds(time.time()) for owner in owners if owner is not None]
    return not owners or any(age < _START_SECONDS for age in ages)


def _ended(run: str, found: RecordedRun) -> RunReport:
    """Return the report on a run that has no running processes."""
    from thinwire.runtime.run.settings import EXIT_UNREACHABLE

    summary, status = found.summary, found.status
    # A run that ended, was resumed and then killed still has the summary of its earlier end. The
    # newest status of such a run has no stop reason, so the summary does not describe the present
    # state.
    is_of_end = summary is not None and (status is None or status.stop_reason is not None)
    if summary is not None and is_of_end:
        state, code, why = _end(summary["stop_reason"])
        return RunReport(run, state, code, why, "summary.json", status, found)
    why = (
        "no process of the run is running, and the run has not ended; the same command again "
        f"resumes it from its last checkpoint; logs: {found.directory / 'logs'}"
    )
    source = "nothing" if status is None else "metrics.jsonl"
    return RunReport(run, "dead", EXIT_UNREACHABLE, why, source, status, found)


def _end(reason: str | None) -> tuple[str, int, str]:
    """Return the state, exit code and reason to show for a run that ended with a stop reason."""
    from thinwire.runtime.run.settings import EXIT_DONE, EXIT_OF_STOP

    code = EXIT_OF_STOP.get(reason or "", EXIT_DONE)
    return ("stopped" if code else "finished"), code, reason or ""


# -- output ---------------------------------------------------------------------------------------


def document(report: RunReport) -> dict[str, Any]:
    """Return the report on a run as the JSON object of ``--json``."""
    from thinwire.ops.privacy.accountant import BLOCK

    status, recorded = report.status, report.recorded
    fields: dict[str, Any] = {
        name: getattr(report, name) for name in ("run", "state", "code", "why", "source")
    }
    summary = {} if recorded is None else recorded.summary or {}
    if status is not None:
        fields |= {
            name: getattr(status, name)
            for name in (
                *("run_id", "method", "nb_workers", "nb_ps", "num_parameters", "seed", "iter_max"),
                *("version", "generation", "samples", "seconds", "learning_rate", "bytes_up"),
                *("bytes_down", "pushes", "rejected_pushes", "stop_reason"),
            )
        }
        fields["loss"] = _finite(status.loss)
        fields["updates_per_second"] = status.version / status.seconds if status.seconds else None
        fields["workers"] = [worker.to_dict() for worker in status.workers]
        fields |= {name: status.policies[name] for name in (BLOCK,) if name in status.policies}
    elif report.source == "summary.json":
        names = ("method", "nb_workers", "nb_ps", "num_parameters", "seed", "samples", "seconds")
        fields |= {name: summary.get(name) for name in names}
        fields |= {"version": summary.get("updates"), "workers": summary.get("workers", [])}
        fields["stop_reason"] = summary.get("stop_reason")
        fields |= {name: summary[name] for name in (BLOCK,) if name in summary}
    if report.source == "summary.json":
        for name in ("test_accuracy", "best_test_accuracy", "test_loss"):
            fields[name] = summary.get(name)
        fields["metrics"] = {} if recorded is None else recorded.metrics
    if recorded is not None:
        fields["script"] = script_of(recorded)
        fields["processes"] = [
            {"node": process.node, "alive": process.alive}
            | ({} if process.owner is None else dataclasses.asdict(process.owner))
            for process in recorded.processes
        ]
    return fields


def script_of(recorded: RecordedRun) -> str | None:
    """Return the run's script with arguments, or else the run's model; None if unknown."""
    if recorded.script:
        return shlex.join(recorded.script)
    for name in ("model", "network"):
        if value := recorded.flags.get(name):
            return value
    return None


def lines(report: RunReport) -> Iterator[str]:
    """Yield the report on a run as lines of text."""
    head = f"{report.run}: {report.state}"
    yield f"{head} ({report.why})" if report.why else head
    fields = document(report)
    if "method" in fields:
        yield from _run_lines(report, fields)
    elif fields.get("script"):
        yield f"  run         {fields['script']}"
    if report.recorded is not None:
        living = report.recorded.alive
        for process in living:
            yield f"  process     {process}"
        if any(process.alive is None for process in report.recorded.processes):
            yield "  process     unknown: the run directory's file system has no locks"
        elif not living:
            yield "  process     no process is running"


def _run_lines(report: RunReport, found: dict[str, Any]) -> Iterator[str]:
    from thinwire.ops.privacy.accountant import in_words
    from thinwire.runtime.telemetry.evaluation import best_of
    from thinwire.supervisor.dashboard import (
        Progress,
        format_bytes,
        format_metric,
        progress_line,
        worker_table,
    )

    script = f", {found['script']}" if found.get("script") else ""
    yield (
        f"  run         {found['method']}{script}, {found['nb_workers']} workers, "
        f"{found['nb_ps']} PS, {found['num_parameters']:,} parameters"
    )
    status = report.status
    if status is not None:
        rate = found["updates_per_second"]
        yield f"  progress    {progress_line(Progress(status, None, rate)).strip()}"
        yield f"  samples     {status.samples:,}"
        yield (
            f"  bytes       up {format_bytes(status.bytes_up)}, "
            f"down {format_bytes(status.bytes_down)}"
        )
    for name, metric in found.get("metrics", {}).items():
        last, best = format_metric(metric.get("last")), best_of(name, metric)
        yield f"  test        {name} {last}" + (
            "" if best is None else f", best {format_metric(best)}"
        )
    if promise := in_words(found):
        yield f"  privacy     {promise}"
    if status is not None:
        for line in worker_table(status):
            yield f"  {line}"
    if report.source == "metrics.jsonl" and report.recorded is not None:
        yield f"  figures     from {_age(report.recorded)} ago (metrics.jsonl)"


def _age(recorded: RecordedRun) -> str:
    from thinwire.runtime.run.directory import METRICS_FILE
    from thinwire.supervisor.dashboard import format_duration

    written_at = (recorded.directory / METRICS_FILE).stat().st_mtime
    return format_duration(max(0.0, time.time() - written_at))


def _finite(value: float | None) -> float | None:
    return value if value is not None and abs(value) < float("inf") else None
