"""Defines the files of a run directory, and removes files for --overwrite.

`LogFile` is a node's log file, which reports only the first log line that a full disk rejects.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import pathlib
import shutil
import sys
from collections.abc import Callable
from typing import Any, BinaryIO, cast

from thinwire.runtime.run.lock import DirectoryLock

METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
#: Files and folders of a run directory with the records (metrics, summary, report) of the run.
_RECORDS = (METRICS_FILE, SUMMARY_FILE, "best.keras", "report", "measure")
#: Folders of a run directory that contain one folder for each node.
_NODE_FOLDERS = ("checkpoints", "tb")

#: File in the run directory with the failure of a script that ended without notifying a PS, for
#: example by os._exit.
_FAILURE_FILE = "failure.json"
#: File in the run directory with the flags and the script of `thinwire run`.
LAUNCH_FILE = "launch.json"
_LOCKS = "locks"
#: Roles that write the records of a run (`_RECORDS`).
_RECORDERS = ("Supervisor", "Standalone", "Simulator")
#: Roles that write checkpoints, each node into its own folder.
_KEEPERS = ("PS", "Worker")


def checkpoints_of(run_dir: pathlib.Path, node: str) -> pathlib.Path:
    """Return the folder of a node's checkpoints; `node` is for example ``worker-3``."""
    return run_dir / "checkpoints" / node


def scalars_of(run_dir: pathlib.Path, node: str) -> pathlib.Path:
    """Return the folder of a node's TensorBoard files; `node` is for example ``worker-3``."""
    return run_dir / "tb" / node


def lock_of(run_dir: pathlib.Path, role: str, number: int) -> DirectoryLock:
    """Return the lock of the files that a node writes; the caller must still take the lock.

    Roles that write a run's records (metrics, summary, report) share one lock. The lock file is
    outside the folder that the lock protects, because --overwrite removes the protected folder.
    """
    if role in _RECORDERS:
        return DirectoryLock(run_dir / _LOCKS / "records.lock", run_dir)
    node = f"{role.lower()}-{number}"
    protects = checkpoints_of(run_dir, node) if role in _KEEPERS else run_dir
    return DirectoryLock(run_dir / _LOCKS / f"{node}.lock", protects)


def node_locks(run_dir: pathlib.Path) -> list[DirectoryLock]:
    """Return the locks of all nodes (not launchers) that have written to a run directory."""
    names = ("records", "ps-*", "worker-*")
    paths = [path for name in names for path in (run_dir / _LOCKS).glob(f"{name}.lock")]
    return [DirectoryLock(path, run_dir) for path in sorted(paths)]


def lock_files(run_dir: pathlib.Path) -> list[pathlib.Path]:
    """Return the lock files of all nodes and launchers that have written to a run directory."""
    return sorted((run_dir / _LOCKS).glob("*.lock"))


def _object_in(path: pathlib.Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if the file is missing or has other content."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def launched_with(run_dir: pathlib.Path) -> dict[str, Any]:
    """Return the content of a run's launch.json (flags and script); empty if unreadable."""
    return _object_in(run_dir / LAUNCH_FILE)


def summary_of(run_dir: pathlib.Path) -> dict[str, Any]:
    """Return the content of a run's summary.json; empty if the file is missing or unreadable."""
    return _object_in(run_dir / SUMMARY_FILE)


def update_of_failure(run_dir: pathlib.Path) -> int | None:
    """Return the number of updates at which a failed script started; None without a failure."""
    begun_at = _object_in(run_dir / _FAILURE_FILE).get("begun_at")
    return begun_at if isinstance(begun_at, int) else None


def note_failure(run_dir: pathlib.Path, why: str, begun_at: int) -> None:
    """Record in the run directory that a run's script failed.

    Args:
        run_dir: Directory of the run whose script failed.
        why: Description of the script's failure, for the user.
        begun_at: Number of updates of the model when the failed process had started to train.
    """
    text = json.dumps({"why": why, "begun_at": begun_at})
    (run_dir / _FAILURE_FILE).write_text(f"{text}\n")


def forget_failure(run_dir: pathlib.Path) -> None:
    """Remove the record of a script's failure that `note_failure` has written."""
    (run_dir / _FAILURE_FILE).unlink(missing_ok=True)


def rounds_of(run_dir: pathlib.Path, worker: int) -> pathlib.Path:
    """Return the path of the file with a worker's round times, which --measure records."""
    return run_dir / "measure" / f"worker-{worker}.jsonl"


def clear_node(run_dir: pathlib.Path, node: str) -> None:
    """Remove a node's checkpoints and TensorBoard files; `node` is for example ``worker-3``."""
    for folder in _NODE_FOLDERS:
        shutil.rmtree(run_dir / folder / node, ignore_errors=True)


def clear_records(run_dir: pathlib.Path) -> None:
    """Remove the records (metrics, summary, report) that an earlier Supervisor wrote."""
    for name in _RECORDS:
        path = run_dir / name
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def clear(run_dir: pathlib.Path) -> None:
    """Remove an earlier run's files, except logs and flag files, which a new run overwrites."""
    clear_records(run_dir)
    forget_failure(run_dir)
    for folder in _NODE_FOLDERS:
        shutil.rmtree(run_dir / folder, ignore_errors=True)


class LogFile(logging.FileHandler):
    """Log file that drops log records while the disk of the file is full.

    A `LogFile` reports only the first log record that is lost. Where log records are missing, the
    log file has a line with the number of missing records.

    Args:
        path: Path of the node's log file.
        report: Function that is called with a sentence that reports the first lost log record.
            None: write the sentence to stderr.
    """

    def __init__(
        self, path: str | pathlib.Path, report: Callable[[str], object] | None = None
    ) -> None:
        self._report = report or (lambda text: sys.stderr.write(f"{text}\n"))
        self._num_missing, self._was_reported = 0, False
        super().__init__(path)

    def emit(self, record: logging.LogRecord) -> None:
        """Write a log record; if earlier records were lost, write their number before it."""
        before = self._num_missing
        if before and self.stream is not None:
            try:
                self.stream.write(f"[thinwire: {before} records are missing here]\n")
                self.flush()
            except OSError:
                self._num_missing += 1
                return
            self._num_missing = 0
        super().emit(record)

    def _open(self) -> io.TextIOWrapper:
        """Open the log file without a buffer, which would keep and repeat failed writes."""
        binary = open(self.baseFilename, "ab", buffering=0)  # noqa: SIM115 - until it is closed
        return io.TextIOWrapper(
            cast(BinaryIO, binary), self.encoding or "utf-8", "backslashreplace", write_through=True
        )

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        """Report the first log record that could not be written."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        self._num_missing += 1
        if not self._was_reported:
            self._was_reported = True
            text = f"cannot write the log {self.baseFilename}: {error.strerror or error}"
            with contextlib.suppress(OSError):  # a write to stderr may fail, too
                self._report(f"{text}. Records are missing there; this node continues.")
