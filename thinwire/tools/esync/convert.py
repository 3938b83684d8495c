"""Converts measured training rounds of a run to log files of ESync, and back.

``python -m thinwire.tools.esync.convert export RUN DIR`` writes the log files
``DIR/NETWORK/MODE/HOST/DEVICE/iter-N.txt``. The action ``import DIR/NETWORK/MODE RUN`` makes a run
directory from ESync's log files. The action ``summary DIR/NETWORK/MODE`` writes the content of log
files to one JSON file. `thinwire.tools.esync.convert` does not need TensorFlow.
"""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from thinwire.ops.types import ConfigurationError
from thinwire.runtime.persistence.documents import parse_json, write_json_atomically
from thinwire.runtime.run.directory import METRICS_FILE, SUMMARY_FILE, rounds_of
from thinwire.runtime.run.streams import standard_streams
from thinwire.runtime.run.target import ACCURACY
from thinwire.runtime.telemetry.evaluation import Evaluation, standing
from thinwire.runtime.telemetry.round_trace import line_of
from thinwire.runtime.telemetry.run_status import RunStatus, WorkerMetrics, summarise
from thinwire.supervisor.metrics_log import (
    EVALUATION_KIND,
    evaluations_in,
    read_lines,
)
from thinwire.supervisor.report.arguments import EXIT_CONFIGURATION, ReportArguments
from thinwire.tools.esync import format as log_files
from thinwire.tools.esync import runs as measured_runs
from thinwire.tools.esync.format import DeviceLog


def export(run_dir: pathlib.Path, out: pathlib.Path) -> pathlib.Path:
    """Write a run's training rounds as ESync's log files; return the folder DIR/NETWORK/MODE.

    Only the first worker's log files contain the test accuracy. If a training round was measured as
    sums over local steps, the sums are distributed evenly over its local steps.

    Args:
        run_dir: Directory of the measured run.
        out: Folder that receives the log files.

    Raises:
        ConfigurationError: The run has no measured training rounds, or its files are damaged.
    """
    try:
        summary = parse_json((run_dir / SUMMARY_FILE).read_bytes())
        mode = log_files.mode_of(summary["method"], measured_runs.is_non_iid(run_dir, summary))
        network = pathlib.PurePath(str(summary.get("network") or "unknown")).stem
        lines, _ = read_lines(run_dir / METRICS_FILE)
        evaluations = standing(evaluations_in(lines))
        workers = list(measured_runs.rounds_by_worker(run_dir).values())
    except (ValueError, OSError, KeyError, TypeError, AttributeError) as error:
        raise ConfigurationError(
            f"the run in {run_dir} cannot be exported: {error!r}. Expected the --run_dir of an "
            "ended run with a Supervisor and without --measure=off."
        ) from error
    folder = out / network / mode
    origins = [(rounds[-1].host, rounds[-1].device, rounds[-1].rank) for rounds in workers]
    names = log_files.folder_names(origins)
    for number, ((host, device), rounds) in enumerate(zip(names, workers, strict=True)):
        placed = log_files.place_accuracies(rounds, evaluations) if number == 0 else {}
        log_files.write_device(
            folder / host / device,
            (log_files.document_of(at + 1, row, placed.get(at)) for at, row in enumerate(rounds)),
        )
    return folder


def import_logs(folder: pathlib.Path, run_dir: pathlib.Path) -> pathlib.Path:
    """Make a run directory from ESync's log files; return its path.

    Values that ESync's log files do not contain (bytes, staleness, policies) are null or empty in
    the new run directory.

    Args:
        folder: Folder ``BASE/NETWORK/MODE`` of ESync's log files.
        run_dir: Path of the run directory to make, which must be empty or missing.

    Raises:
        ConfigurationError: The folder has no log files of ESync, or the run directory is not empty.
    """
    if run_dir.exists() and any(run_dir.iterdir()):
        raise ConfigurationError(f"folder {run_dir} is not empty; give a new or empty folder.")
    logged = _read(folder)
    run = measured_runs.of_logs(folder, logged)
    evaluations = [
        Evaluation(point.round, 0, point.seconds, {ACCURACY: point.accuracy}, 0, 0)
        for point in run.points
    ]
    for worker, device_log in enumerate(logged, 1):
        path = rounds_of(run_dir, worker)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(map(line_of, device_log.rounds)), encoding="utf-8")
    lines = [{"kind": EVALUATION_KIND, **evaluation.to_dict()} for evaluation in evaluations]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run_dir / METRICS_FILE).write_text(text, encoding="utf-8")
    unknown = dict.fromkeys(("bytes_up", "bytes_down", "seed"))
    about = {
        "network": run.network,
        "partition": "class" if run.non_iid else "iid",
        "imported": True,
    }
    summary = summarise(_status(run, logged), evaluations) | unknown | about
    write_json_atomically(run_dir / SUMMARY_FILE, summary)
    return run_dir


def write_summary(folder: pathlib.Path) -> pathlib.Path:
    """Write a JSON summary of ESync's log files into their folder; return the summary's path.

    Args:
        folder: Folder ``BASE/NETWORK/MODE`` of ESync's log files.

    Raises:
        ConfigurationError: The folder has no log files of ESync.
    """
    path = folder / f"{log_files.name_of(folder.resolve().name)}.json"
    write_json_atomically(path, log_files.summarise_mode(_read(folder)))
    return path


def _read(folder: pathlib.Path) -> list[DeviceLog]:
    try:
        return log_files.read_mode(folder)
    except (ValueError, OSError) as error:
        raise ConfigurationError(
            f"{error}. Expected a folder NETWORK/MODE with files HOST/DEVICE/iter-N.txt, N from 1."
        ) from error


def _status(run: measured_runs.MeasuredRun, logged: Sequence[DeviceLog]) -> RunStatus:
    """Return the final status of an imported run, computed from ESync's log files."""
    workers = [
        WorkerMetrics(
            id=number,
            state="done",
            clock=device.rounds,
            pushes=device.rounds,
            samples=device.samples,
            local_steps=sum(row.n_local for row in device_log.rounds),
            compute_seconds=max(0.0, device.seconds - device.global_seconds),
            wait_seconds=device.global_seconds,
        )
        for number, (device, device_log) in enumerate(zip(run.devices, logged, strict=True), 1)
    ]
    return RunStatus(
        run_id="imported",
        method=run.method,
        seams={},
        nb_workers=len(workers),
        nb_ps=1,
        num_parameters=run.num_parameters,
        seed=0,
        iter_max=0,
        version=max(device.rounds for device in run.devices),
        samples=sum(device.samples for device in run.devices),
        seconds=run.seconds,
        pushes=sum(device.rounds for device in run.devices),
        workers=workers,
        stop_reason="interrupted",
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Perform the command line's action (export, import or summary); return the exit code."""
    parser = ReportArguments(prog="python -m thinwire.tools.esync.convert", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    actions: dict[str, tuple[Any, tuple[str, ...], str]] = {
        "export": (export, ("RUN", "DIR"), "write a run as ESync's log files"),
        "import": (import_logs, ("FOLDER", "RUN"), "make a run directory from ESync's log files"),
        "summary": (
            write_summary,
            ("FOLDER",),
            "write the content of ESync's log files to one JSON file",
        ),
    }
    for verb, (_, names, text) in actions.items():
        sub = verbs.add_parser(verb, help=text, description=text)
        for name in names:
            sub.add_argument(name, type=pathlib.Path)
    options: argparse.Namespace = parser.parse_args(arguments)
    action, names, _ = actions[options.verb]
    try:
        path = action(*(getattr(options, name) for name in names))
    except (ConfigurationError, OSError) as error:
        sys.stderr.write(f"{parser.prog}: {error}\n")
        return EXIT_CONFIGURATION
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    with standard_streams():
        sys.exit(main())
