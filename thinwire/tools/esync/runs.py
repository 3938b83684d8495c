"""One run for ESync's figures: from a run directory, or from a folder of ESync's own logs."""

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
#: Trainable values of the networks that ESync's logs may be of.
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
    """One evaluation. Time, round and accuracy stay together: not every round is evaluated."""

    seconds: float
    round: int  # model version
    accuracy: float  # 0 to 1


@dataclasses.dataclass(frozen=True)
class DeviceTotals:
    """Totals of one worker."""

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
        """ESync's computing-time ratio: all but the exchange, queries and evaluations included."""
        return 1 - self.global_seconds / self.seconds if self.seconds else 0.0

    @property
    def ratio_strict(self) -> float:
        """Forward, backward and update alone."""
        return self.computing_seconds / self.seconds if self.seconds else 0.0


@dataclasses.dataclass(frozen=True)
class MeasuredRun:
    """One run."""

    name: str  # of its folder
    method: str
    network: str
    non_iid: bool
    num_parameters: int  # 0: not known
    points: list[EvaluationPoint]
    devices: list[DeviceTotals]
    bytes_up: int | None  # None: not measured
    bytes_down: int | None

    @property
    def seconds(self) -> float:
        """Training time of the worker that trained longest."""
        return max((device.seconds for device in self.devices), default=0.0)

    @property
    def samples_per_second(self) -> float:
        """Examples trained on by all workers, per second."""
        samples = sum(device.samples for device in self.devices)
        return samples / self.seconds if self.seconds else 0.0

    @property
    def traffic_est(self) -> float | None:
        """ESync's estimate in MiB/s: a float32 model for each push, one direction only."""
        if not (self.seconds and self.num_parameters):
            return None
        pushes = sum(device.rounds for device in self.devices)
        return pushes * 4 * self.num_parameters / (1 << 20) / self.seconds


def load(path: pathlib.Path) -> MeasuredRun:
    """Read a run directory, or ``BASE/NETWORK/MODE`` of ESync's own logs.

    Raises:
        ConfigurationError: It is neither, or is damaged.
    """
    try:
        if (path / SUMMARY_FILE).is_file():
            return _load_run(path)
        return of_logs(path, log_files.read_mode(path))
    except (ValueError, OSError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"{path} cannot be drawn: {error}. Expected the --run_dir of a run that has ended, "
            "with a Supervisor and without --measure=off, or NETWORK/MODE of ESync's own logs."
        ) from error


def final_accuracy(path: pathlib.Path) -> float:
    """Return the last test accuracy of a run, Standalone's as well.

    Raises:
        ConfigurationError: It has none.
    """
    try:
        return float(parse_json((path / SUMMARY_FILE).read_bytes())["test_accuracy"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigurationError(
            f"--standalone={path}: {error!r}; expected an accuracy such as 0.926, or the "
            "--run_dir of a run that was evaluated."
        ) from error


def of_logs(path: pathlib.Path, logged: Sequence[DeviceLog]) -> MeasuredRun:
    """Return the run in a folder of ESync's own logs."""
    mode, network = path.resolve().name, path.resolve().parent.name
    stem = mode.removesuffix(log_files.NON_IID_SUFFIX)
    return MeasuredRun(
        name=mode,
        method=log_files.METHODS.get(stem, stem),
        network=network,
        non_iid=mode != stem,
        num_parameters=NUM_PARAMETERS.get(network, 0),
        points=points_of(logged),
        devices=[_device(each.rounds) for each in logged],
        bytes_up=None,
        bytes_down=None,
    )


def points_of(logged: Sequence[DeviceLog]) -> list[EvaluationPoint]:
    """Return the evaluations in a folder of logs, in order of time."""
    return sorted(
        (
            EvaluationPoint(each.rounds[at].total_time, each.rounds[at].num_iters, accuracy)
            for each in logged
            for at, accuracy in each.accuracies.items()
        ),
        key=lambda point: point.seconds,
    )


def rounds_by_worker(run_dir: pathlib.Path) -> dict[int, list[Round]]:
    """Return the rounds of every worker of a run, by id.

    Raises:
        ValueError, OSError: A file is damaged, or there is none.
    """
    found = {}
    for path in (run_dir / "measure").glob("worker-*.jsonl"):
        if number := re.fullmatch(r"worker-(\d+)\.jsonl", path.name):
            found[int(number[1])] = read_rounds(path)
    if not any(found.values()):
        raise ValueError(f"{run_dir} has no measure/worker-N.jsonl")
    return {worker: rounds for worker, rounds in sorted(found.items()) if rounds}


def is_non_iid(run_dir: pathlib.Path, summary: dict[str, Any]) -> bool:
    """Return whether workers hold other kinds of examples than each other.

    Raises:
        ValueError: Neither the summary nor any flags file holds how the data was split.
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
        raise ValueError(f"{SUMMARY_FILE} holds no object")
    lines, _ = read_lines(run_dir / METRICS_FILE)
    return MeasuredRun(
        name=run_dir.resolve().name,
        method=str(summary["method"]),
        network=str(summary.get("network", "")),
        non_iid=is_non_iid(run_dir, summary),
        num_parameters=int(summary["num_parameters"]),
        points=[
            EvaluationPoint(each.seconds, each.version, accuracy)
            for each in standing(evaluations_in(lines))
            if (accuracy := each.metrics.get(ACCURACY)) is not None
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
        samples=sum(each.num_samples for each in rounds),
        seconds=last.total_time,
        global_seconds=sum(each.global_seconds for each in rounds),
        computing_seconds=sum(each.computing_seconds for each in rounds),
    )
