"""``thinwire status RUN``: what a run is, how far it is, and whether its processes live.

Shard 0 is contacted where it lives, else the files of the run directory answer.
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

_ABOUT = """What a run is, how far it is, and whether its processes live.

Exits with 0 for a run that goes on or has reached its end; 2 where there is no such run; 3 for one
that has died or does not answer; 4 where its PS rejects this observer; else as the nodes of a run
that was stopped: 130 interrupted, 5 diverged, 1 a script that failed or returned early.
"""
_PATIENCE_SECONDS = 3.0
#: A PS imports what it needs and reads its checkpoint before it listens.
_START_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class RunReport:
    """A run at one moment.

    Attributes:
        run: As it was named.
        state: starting, running, finished, stopped, dead, unanswered or rejected.
        code: The exit code of that.
        why: More on the state; may be empty.
        source: Where the figures are from: shard 0, summary.json, metrics.jsonl or nothing.
        status: The figures; None: there are none.
        recorded: The run directory; None where only an address is known.
    """

    run: str
    state: str
    code: int
    why: str = ""
    source: str = "nothing"
    status: RunStatus | None = None
    recorded: RecordedRun | None = None


def main(arguments: Sequence[str] | None = None) -> int:
    """Write what is known of the run that the command line names; return the exit code."""
    given = parser().parse_args(arguments)
    from thinwire.ops.types import ConfigurationError
    from thinwire.runtime.run.settings import EXIT_CONFIGURATION

    try:
        report = inspect(given)
    except ConfigurationError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_CONFIGURATION
    if given.json:
        sys.stdout.write(json.dumps(document(report), indent=2, allow_nan=False) + "\n")
    else:
        sys.stdout.write("\n".join(lines(report)) + "\n")
    return report.code


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = make_parser("status", _ABOUT, _PATIENCE_SECONDS, "shard 0 to answer")
    made.add_argument(
        "--json", action="store_true", help="Write one JSON object. [switch; default text]"
    )
    return made


def inspect(given: argparse.Namespace) -> RunReport:
    """Return the report on the run that the command line names.

    Raises:
        ConfigurationError: There is no such run, or credentials that cannot be read.
    """
    found = find(given.run)
    if isinstance(found, str):
        return _answer(given, found, None)
    if found.alive:
        address = found.address
        if address is not None and not _is_alone(found):
            return _answer(given, address, found)
        return RunReport(given.run, "running", 0, "", "metrics.jsonl", found.status, found)
    return _ended(given.run, found)


def _is_alone(found: RecordedRun) -> bool:
    """Whether who runs there has no PS, as Standalone and Simulator."""
    alone = ("Standalone", "Simulator")
    return all(each.owner is not None and each.owner.role in alone for each in found.alive)


def _answer(given: argparse.Namespace, address: str, found: RecordedRun | None) -> RunReport:
    """Return the report of a run whose shard 0 may live."""
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
    """Whether shard 0 may not listen yet: it is awaited, or was started a moment ago."""
    shards = [each.owner for each in found.alive if each.node == "ps-0"]
    ages = [each.age_seconds(time.time()) for each in shards if each is not None]
    return not shards or any(age < _START_SECONDS for age in ages)


def _ended(run: str, found: RecordedRun) -> RunReport:
    """Return the report of a run of which nothing lives."""
    from thinwire.runtime.run.settings import EXIT_UNREACHABLE

    summary, status = found.summary, found.status
    # A run that was resumed and then killed leaves the summary of its former end.
    is_of_end = summary is not None and (status is None or status.stop_reason is not None)
    if summary is not None and is_of_end:
        state, code, why = _end(summary["stop_reason"])
        return RunReport(run, state, code, why, "summary.json", status, found)
    why = (
        "no process of it lives, and it has not reached an end; the same command again goes on "
        f"from its last checkpoint; logs: {found.directory / 'logs'}"
    )
    source = "nothing" if status is None else "metrics.jsonl"
    return RunReport(run, "dead", EXIT_UNREACHABLE, why, source, status, found)


def _end(reason: str | None) -> tuple[str, int, str]:
    """Return (state, exit code, why) of a run with this stop reason."""
    from thinwire.runtime.run.settings import EXIT_DONE, EXIT_OF_STOP

    code = EXIT_OF_STOP.get(reason or "", EXIT_DONE)
    return ("stopped" if code else "finished"), code, reason or ""


# -- what is written ------------------------------------------------------------------------------


def document(report: RunReport) -> dict[str, Any]:
    """Return the report as the object of ``--json``."""
    from thinwire.ops.privacy.accountant import BLOCK

    status, recorded = report.status, report.recorded
    found: dict[str, Any] = {
        name: getattr(report, name) for name in ("run", "state", "code", "why", "source")
    }
    summary = {} if recorded is None else recorded.summary or {}
    if status is not None:
        found |= {
            name: getattr(status, name)
            for name in (
                *("run_id", "method", "nb_workers", "nb_ps", "num_parameters", "seed", "iter_max"),
                *("version", "generation", "samples", "seconds", "learning_rate", "bytes_up"),
                *("bytes_down", "pushes", "rejected_pushes", "stop_reason"),
            )
        }
        found["loss"] = _finite(status.loss)
        found["updates_per_second"] = status.version / status.seconds if status.seconds else None
        found["workers"] = [worker.to_dict() for worker in status.workers]
        found |= {name: status.policies[name] for name in (BLOCK,) if name in status.policies}
    elif report.source == "summary.json":
        names = ("method", "nb_workers", "nb_ps", "num_parameters", "seed", "samples", "seconds")
        found |= {name: summary.get(name) for name in names}
        found |= {"version": summary.get("updates"), "workers": summary.get("workers", [])}
        found["stop_reason"] = summary.get("stop_reason")
        found |= {name: summary[name] for name in (BLOCK,) if name in summary}
    if report.source == "summary.json":
        for name in ("test_accuracy", "best_test_accuracy", "test_loss"):
            found[name] = summary.get(name)
        found["metrics"] = {} if recorded is None else recorded.metrics
    if recorded is not None:
        found["script"] = script_of(recorded)
        found["processes"] = [
            {"node": each.node, "alive": each.alive}
            | ({} if each.owner is None else dataclasses.asdict(each.owner))
            for each in recorded.processes
        ]
    return found


def script_of(recorded: RecordedRun) -> str | None:
    """Return the script and its arguments, or the model, that the run trains; None: unknown."""
    if recorded.script:
        return shlex.join(recorded.script)
    for name in ("model", "network"):
        if value := recorded.flags.get(name):
            return value
    return None


def lines(report: RunReport) -> Iterator[str]:
    """Yield the report as text."""
    head = f"{report.run}: {report.state}"
    yield f"{head} ({report.why})" if report.why else head
    found = document(report)
    if "method" in found:
        yield from _run_lines(report, found)
    elif found.get("script"):
        yield f"  run         {found['script']}"
    if report.recorded is not None:
        living = report.recorded.alive
        for each in living:
            yield f"  process     {each}"
        if any(each.alive is None for each in report.recorded.processes):
            yield "  process     unknown: the run directory's file system has no locks"
        elif not living:
            yield "  process     none lives"


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
    for name, each in found.get("metrics", {}).items():
        last, best = format_metric(each.get("last")), best_of(name, each)
        yield f"  test        {name} {last}" + (
            "" if best is None else f", best {format_metric(best)}"
        )
    if promise := in_words(found):
        yield f"  privacy     {promise}"
    if status is not None:
        for line in worker_table(status):
            yield f"  {line}"
    if report.source == "metrics.jsonl" and report.recorded is not None:
        yield f"  figures     of {_age(report.recorded)} ago (metrics.jsonl)"


def _age(recorded: RecordedRun) -> str:
    from thinwire.runtime.run.directory import METRICS_FILE
    from thinwire.supervisor.dashboard import format_duration

    written_at = (recorded.directory / METRICS_FILE).stat().st_mtime
    return format_duration(max(0.0, time.time() - written_at))


def _finite(value: float | None) -> float | None:
    return value if value is not None and abs(value) < float("inf") else None
