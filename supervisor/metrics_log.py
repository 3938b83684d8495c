"""Writers of metrics.jsonl, TensorBoard scalars and measured rounds of one run.

Only the Supervisor writes the files with metrics, scalars and measured rounds. The class
`MetricsLog` writes metrics.jsonl and the TensorBoard scalars. The class `RoundsLog` appends one
line for each measured round of worker N to ``measure/worker-N.jsonl``.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from collections.abc import Mapping
from typing import Any, Protocol, TextIO

from absl import logging

from thinwire.ops.types import ConfigurationError
from thinwire.runtime.persistence.documents import parse_json
from thinwire.runtime.run.directory import METRICS_FILE, rounds_of, scalars_of
from thinwire.runtime.run.files import naming
from thinwire.runtime.telemetry.evaluation import Evaluation
from thinwire.runtime.telemetry.round_trace import Round, line_of, unpack
from thinwire.runtime.telemetry.run_status import RunStatus, WorkerMetrics
from thinwire.runtime.telemetry.tensorboard import ScalarFile

EVALUATION_KIND = "eval"
STATUS_KIND = "status"


class ScalarWriter(Protocol):
    """A writer of TensorBoard scalars for one run."""

    def write(self, values: Mapping[str, float | None], step: int) -> None:
        """Write and flush scalars by tag at model version ``step``; omit None values."""

    def close(self) -> None:
        """Close the files of TensorBoard scalars."""


class MetricsLog:
    """Appends evaluations and statuses of a run to ``metrics.jsonl`` and to TensorBoard.

    ``metrics.jsonl`` has one JSON object per line. Every JSON object in ``metrics.jsonl`` has the
    key ``kind``, whose value is ``eval`` (an Evaluation), ``status`` (a RunStatus) or an event's
    name.

    Args:
        run_dir: Directory of the run, created if it is missing.
        resume: True to append to the existing files and reload their evaluations; False to delete
            the existing files first.
        scalars: Writer of scalars that replaces TensorBoard's writer in tests; None for
            TensorBoard's writer.

    Raises:
        ConfigurationError: The file ``metrics.jsonl`` of the resumed run contains evaluations in
            another format.
    """

    def __init__(
        self,
        run_dir: str | os.PathLike[str],
        resume: bool,
        scalars: ScalarWriter | None = None,
    ) -> None:
        path = pathlib.Path(run_dir) / METRICS_FILE
        events = scalars_of(pathlib.Path(run_dir), "supervisor-0")
        path.parent.mkdir(parents=True, exist_ok=True)
        self.evaluations: list[Evaluation] = []
        if resume:
            self.evaluations = _reload(path)
        else:
            path.unlink(missing_ok=True)
            shutil.rmtree(events, ignore_errors=True)
        self._path = path
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115
        self._scalars = scalars or ScalarFile(events)
        self._previous: RunStatus | None = None

    def add_evaluation(self, evaluation: Evaluation) -> None:
        """Write an evaluation of the central model to metrics.jsonl and TensorBoard."""
        self.evaluations.append(evaluation)
        self._append({"kind": EVALUATION_KIND, **evaluation.to_dict()})
        values = {f"eval/{name}": value for name, value in evaluation.metrics.items()}
        self._scalars.write(values, evaluation.version)

    def add_status(self, status: RunStatus) -> None:
        """Write a status of the run to metrics.jsonl and TensorBoard."""
        self._append({"kind": STATUS_KIND, **status.to_dict()})
        self._scalars.write(status_scalars(status, self._previous), status.version)
        self._previous = status

    def close(self) -> None:
        """Close the files of metrics and measured rounds; the method may be called twice."""
        if not self._file.closed:
            with naming(self._path):
                self._file.close()
            self._scalars.close()

    def __enter__(self) -> MetricsLog:
        """Return the log."""
        return self

    def __exit__(self, *unused: object) -> None:
        """Close the log."""
        self.close()

    def _append(self, document: Mapping[str, Any]) -> None:
        with naming(self._path):
            self._file.write(json.dumps(document, separators=(",", ":"), allow_nan=False) + "\n")
            self._file.flush()


def status_scalars(status: RunStatus, previous: RunStatus | None) -> dict[str, float | None]:
    """Return TensorBoard tag -> value for the values in a run's status.

    Args:
        status: Status of the run to write.
        previous: Status written before ``status``; None if ``status`` is the run's first status.
            The ``sync/`` values among the TensorBoard scalars cover the time between the two
            statuses.
    """
    pushes, wait_seconds = status.pushes, _wait_seconds(status)
    delays, weighted = status.staleness.total, status.staleness.mean * status.staleness.total
    # A PS that restarted from an older snapshot may count fewer pushes than before. The difference
    # of the counts would be negative, so the total counts are used.
    if previous is not None and previous.pushes < pushes:
        pushes -= previous.pushes
        wait_seconds -= _wait_seconds(previous)
        delays -= previous.staleness.total
        weighted -= previous.staleness.mean * previous.staleness.total
    values: dict[str, float | None] = {
        "train/loss": status.loss,
        "train/learning_rate": status.learning_rate,
        "net/bytes_up": status.bytes_up,
        "net/bytes_down": status.bytes_down,
        "sync/staleness": weighted / delays if delays > 0 else None,
        "sync/wait_ms": 1000 * max(0.0, wait_seconds) / pushes if pushes else None,
    }
    for worker in status.workers:
        values.update(_worker_scalars(worker))
    return values


def _worker_scalars(worker: WorkerMetrics) -> dict[str, float | None]:
    values: dict[str, float | None] = {
        "loss": worker.loss,
        "clock": worker.clock,
        "lag": worker.lag,
        "steps_per_second": worker.steps_per_second,
        "wait_seconds": worker.wait_seconds,
    }
    return {f"worker/{worker.id}/{name}": value for name, value in values.items()}


def _wait_seconds(status: RunStatus) -> float:
    return sum(worker.wait_seconds for worker in status.workers)


def read_lines(path: pathlib.Path) -> tuple[list[dict[str, Any]], int]:
    """Return a metrics file's complete lines as objects, and their total length in bytes.

    Reading of a metrics file stops at the first line that is not a JSON object, because a killed
    writer leaves an incomplete last line.

    Raises:
        OSError: The file with metrics or measured rounds cannot be read.
    """
    documents: list[dict[str, Any]] = []
    num_bytes = 0
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            document = parse_json(line)
        except ValueError:
            break
        if not isinstance(document, dict) or not line.endswith(b"\n"):
            break
        documents.append(document)
        num_bytes += len(line)
    return documents, num_bytes


def evaluations_in(documents: list[dict[str, Any]]) -> list[Evaluation]:
    """Return the evaluations among a metrics file's lines; raise ValueError for a malformed one."""
    return [
        Evaluation.from_dict({name: value for name, value in line.items() if name != "kind"})
        for line in documents
        if line.get("kind") == EVALUATION_KIND
    ]


def _reload(path: pathlib.Path) -> list[Evaluation]:
    """Read the earlier evaluations in metrics.jsonl and cut off an incomplete last line of the
    file.
    """
    if not path.exists():
        return []
    documents, num_bytes = read_lines(path)
    torn_bytes = path.stat().st_size - num_bytes
    if torn_bytes:
        logging.warning("file %s: dropped %d bytes of an incomplete last line.", path, torn_bytes)
        os.truncate(path, num_bytes)
    try:
        return evaluations_in(documents)
    except ValueError as error:
        raise ConfigurationError(
            f"the file {path} is not a metrics file of this version of Thinwire: {error}. Start a "
            "new run with --overwrite or choose another --run_dir."
        ) from error


class RoundsLog:
    """Appends the measured rounds (timings of training rounds) of all workers to files.

    Within one incarnation (process) of a worker, rounds are numbered in ascending order. A measured
    round whose number is not above the number of the worker's last written round was written before
    and is skipped.

    Args:
        run_dir: Directory of the run; files are created when the first round arrives.
    """

    def __init__(self, run_dir: pathlib.Path) -> None:
        self._run_dir = run_dir
        self._files: dict[int, TextIO] = {}
        self._last: dict[
            int, dict[str, int]
        ] = {}  # worker id -> incarnation of the worker -> number of the last written round

    def add(self, worker: int, batch: str) -> None:
        """Append a batch of a worker's measured rounds; log and skip an unreadable batch."""
        try:
            rounds = unpack(batch)
        except ValueError as error:
            logging.log_every_n_seconds(
                logging.WARNING, "rounds of worker %d cannot be read: %s", 10, worker, error
            )
            return
        if worker not in self._files:
            self._open(worker)
        last = self._last[worker]
        new = []
        for row in rounds:
            if row.num_iters > last.get(row.life, 0):
                last[row.life] = row.num_iters
                new.append(line_of(row))
        if new:
            with naming(rounds_of(self._run_dir, worker)):
                self._files[worker].write("".join(new))
                self._files[worker].flush()

    def close(self) -> None:
        """Close the files of metrics and measured rounds; the method may be called twice."""
        for worker, file in self._files.items():
            with naming(rounds_of(self._run_dir, worker)):
                file.close()
        self._files.clear()

    def _open(self, worker: int) -> None:
        path = rounds_of(self._run_dir, worker)
        path.parent.mkdir(parents=True, exist_ok=True)
        last = self._last[worker] = {}
        if path.exists():
            lines, num_bytes = read_lines(path)
            # A killed writer leaves an incomplete last line in a file. The next measured round must
            # start on a new line.
            os.truncate(path, num_bytes)
            for line in lines:
                number, life = line.get("num_iters"), str(line.get("life", ""))
                if type(number) is int:
                    last[life] = max(number, last.get(life, 0))
        self._files[worker] = open(path, "a", encoding="utf-8")  # noqa: SIM115


def read_rounds(path: pathlib.Path) -> list[Round]:
    """Return the measured rounds in one worker's file; skip an incomplete last line.

    Raises:
        OSError: The file with metrics or measured rounds cannot be read.
        ValueError: A line is not a measured round in the format of this version.
    """
    lines, _ = read_lines(path)
    return [Round.from_dict(line, f"{path.name}:{n}") for n, line in enumerate(lines, 1)]
