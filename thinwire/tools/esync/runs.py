"""Loads a run for ESync's figures, from a run directory or a folder of ESync's log files."""

from __future__ import annotations

import dataclasses
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from thinwire.ops.types import ConfigurationError
from thinwire.runtime.persistence.documents import parse_json
from thinwire.runtime.run.directory import METRICS_FILE, SUMMARY_FILE
from thinwire.runtime.run.target import ACCURACY
from thinwire.runtime.telemetry.evaluation import standing
from thinwire.runtime.telemetry.round_trace import Round
from thinwire.supervisor.metrics_log import evaluations_in, read_lines, read_rounds
from thinwire.tools.esync import format as log_files
from thinwire.tools.esync.format import DeviceLog

_EVEN_PARTITIONS = ("iid", "contiguous", "file")
#: Network -> number of trainable values, which ESync's log files do not contain.
NUM_PARAMETERS = {
    "alexnet": 57_029_322,
    "resnet18-v1": 11_175_370,
    "resnet50-v1": 23_541_130,
    "resnet50-v2": 23_514_698,
    "mobilenet-v1": 3_216_650,
    "mobilenet-v2": 2_237_184,
    "inception-v3": 21_805_482,
}


@dataclasses.dataclass(frozen=True)
class EvaluationPoint:
    """Test accuracy of the model after a training round, with the time of the evaluation."""

    seconds: float
    round: int  # number of updates of the evaluated model
    accuracy: float  # test accuracy from 0 to 1


@dataclasses.dataclass(frozen=True)
class DeviceTotals:
    """Counts and times of one worker, summed over a training run.

    Attributes:
        host: Name of the worker's host.
        device: Name of the worker's device: cpu, gpu0 and so on.
        rank: Rank of the worker, from 0.
        rounds: Number of the worker's training rounds.
        samples: Number of training examples that the worker processed.
        seconds: Training time of the worker, in seconds.
        global_seconds: Time of the worker's exchanges with the PS, in seconds.
        computing_seconds: Time of the worker's forward passes, backward passes and local updates,
            in seconds.
    """

    host: str
    device: str
    rank: int
    rounds: int
    samples: int
    seconds: float
    global_seconds: float
    computing_seconds: float

    @property
    def ratio_orig(self) -> float:
        """ESync's computing-time ratio: share of the training time outside PS exchanges."""
        return 1 - self.global_seconds / self.seconds if self.seconds else 0.0

    @property
    def ratio_strict(self) -> float:
        """Share of the training time that forward, backward passes and local updates take."""
        return self.computing_seconds / self.seconds if self.seconds else 0.0


@dataclasses.dataclass(frozen=True)
class MeasuredRun:
    """Measurements of one training run, from which ESync's figures are drawn."""

    name: str  # name of the folder of the run
    method: str
    network: str
    non_iid: bool
    num_parameters: int  # number of the model's trainable values; 0 if unknown
    points: list[EvaluationPoint]
    devices: list[DeviceTotals]
    bytes_up: int | None  # bytes from the workers to the PS; None if not measured
    bytes_down: int | None  # bytes from the PS to the workers; None if not measured

    @property
    def seconds(self) -> float:
        """Training time of the worker that trained longest, in seconds."""
        return max((device.seconds for device in self.devices), default=0.0)

    @property
    def samples_per_second(self) -> float:
        """Data throughput of the run: training examples of all workers per second."""
        samples = sum(device.samples for device in self.devices)
        return samples / self.seconds if self.seconds else 0.0

    @property
    def traffic_est(self) -> float | None:
        """ESync's traffic estimate in MiB/s: one float32 model per push, in one direction."""
        if not (self.seconds and self.num_parameters):
            return None
        pushes = sum(device.rounds for device in self.devices)
        return pushes * 4 * self.num_parameters / (1 << 20) / self.seconds


def load(path: pathlib.Path) -> MeasuredRun:
    """Read a run directory, or a folder ``BASE/NETWORK/MODE`` of ESync's log files.

    Raises:
        ConfigurationError: The folder is neither a run directory nor a folder of ESync's log files,
            or its files are damaged.
    """
    try:
        if (path / SUMMARY_FILE).is_file():
            return _load_run(path)
        return of_logs(path, log_files.read_mode(path))
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"cannot draw figures of {path}: {error}. Expected the --run_dir of an ended run with "
            "a Supervisor and without --measure=off, or a folder NETWORK/MODE of ESync's logs."
        ) from error


def final_accuracy(path: pathlib.Path) -> float:
    """Return the last test accuracy of a run, which may be a Standalone run.

    Raises:
        ConfigurationError: The run's summary has no test accuracy.
    """
    try:
        return float(parse_json((path / SUMMARY_FILE).read_bytes())["test_accuracy"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"--standalone={path}: {error!r}; expected an accuracy, for example 0.926, or the "
            "--run_dir of a run that was evaluated."
        ) from error


def of_logs(path: pathlib.Path, logged: Sequence[DeviceLog]) -> MeasuredRun:
    """Return the measured run in a folder of ESync's log files.

    Args:
        path: Folder ``BASE/NETWORK/MODE`` of ESync's log files.
        logged: Content of ESync's log files, one item per device.
    """
    mode, network = path.resolve().name, path.resolve().parent.name
    stem = mode.removesuffix(log_files.NON_IID_SUFFIX)
    return MeasuredRun(
        name=mode,
        method=log_files.METHODS.get(stem, stem),
        network=network,
        non_iid=mode != stem,
        num_parameters=NUM_PARAMETERS.get(network, 0),
        points=points_of(logged),
        devices=[_device(log.rounds) for log in logged],
        bytes_up=None,
        bytes_down=None,
    )


def points_of(logged: Sequence[DeviceLog]) -> list[EvaluationPoint]:
    """Return the evaluations in ESync's log files of a run, in order of time."""
    return sorted(
        (
            EvaluationPoint(log.rounds[at].total_time, log.rounds[at].num_iters, accuracy)
            for log in logged
            for at, accuracy in log.accuracies.items()
        ),
        key=lambda point: point.seconds,
    )


def rounds_by_worker(run_dir: pathlib.Path) -> dict[int, list[Round]]:
    """Return worker id -> measured training rounds, for the workers of a run that have some.

    Raises:
        OSError: A file of measured rounds cannot be read.
        ValueError: A file of measured rounds is damaged, or the run has no measured rounds.
    """
    measured = {}
    for path in (run_dir / "measure").glob("worker-*.jsonl"):
        if number := re.fullmatch(r"worker-(\d+)\.jsonl", path.name):
            measured[int(number[1])] = read_rounds(path)
    if not any(measured.values()):
        raise ValueError(f"the run directory {run_dir} has no files measure/worker-N.jsonl")
    return {worker: rounds for worker, rounds in sorted(measured.items()) if rounds}


def is_non_iid(run_dir: pathlib.Path, summary: dict[str, Any]) -> bool:
    """Return True if the training data was split so that workers' label distributions differ.

    Raises:
        ValueError: Neither the summary nor a flags file has the value of --partition.
    """
    partition = summary.get("partition")
    for path in () if partition else sorted(run_dir.glob("flags-*.txt")):
        if line := re.search(r"^--partition=(\S+)", path.read_text(encoding="utf-8"), re.M):
            partition = line[1]
    if not isinstance(partition, str):
        raise ValueError(f"neither {SUMMARY_FILE} nor flags-*.txt has the value of --partition")
    return partition not in _EVEN_PARTITIONS


def _load_run(run_dir: pathlib.Path) -> MeasuredRun:
    summary = parse_json((run_dir / SUMMARY_FILE).read_bytes())
    if not isinstance(summary, dict):
        raise ValueError(f"the file {SUMMARY_FILE} does not contain a JSON object")
    lines, _ = read_lines(run_dir / METRICS_FILE)
    return MeasuredRun(
        name=run_dir.resolve().name,
        method=str(summary["method"]),
        network=str(summary.get("network", "")),
        non_iid=is_non_iid(run_dir, summary),
        num_parameters=int(summary["num_parameters"]),
        points=[
            EvaluationPoint(evaluation.seconds, evaluation.version, accuracy)
            for evaluation in standing(evaluations_in(lines))
            if (accuracy := evaluation.metrics.get(ACCURACY)) is not None
        ],
        devices=[_device(rounds) for rounds in rounds_by_worker(run_dir).values()],
        bytes_up=summary.get("bytes_up"),
        bytes_down=summary.get("bytes_down"),
    )


def _device(rounds: Sequence[Round]) -> DeviceTotals:
    last = rounds[-1]
    return DeviceTotals(
        host=last.host,
        device=last.device,
        rank=last.rank,
        rounds=len(rounds),
        samples=sum(row.num_samples for row in rounds),
        seconds=last.total_time,
        global_seconds=sum(row.global_seconds for row in rounds),
        computing_seconds=sum(row.computing_seconds for row in rounds),
    )
