"""Reads and writes ESync's log files: one JSON file per training round of a device.

The log file ``BASE/NETWORK/MODE/HOST/DEVICE/iter-N.txt`` holds ``num_iters``, ``num_samples`` (of
the round), ``total_time`` (seconds since the start), ``accuracy`` (if the round was evaluated), and
``time``: local step (from "0") -> phase -> seconds. The other values of a `Round`, for example
bytes, are not in ESync's log files.
"""

from __future__ import annotations

import bisect
import dataclasses
import json
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from thinwire.runtime.persistence.documents import parse_json
from thinwire.runtime.run.target import ACCURACY
from thinwire.runtime.telemetry.evaluation import Evaluation
from thinwire.runtime.telemetry.round_trace import (
    CHECK_READY,
    ENCODE,
    EVALUATION,
    FORWARD_AND_BACKWARD,
    GLOBAL_PHASES,
    Round,
)

#: Thinwire's training method -> (ESync's folder name, ESync's name in figures). An unlisted
#: method keeps Thinwire's name.
MODES = {
    "esync": ("esync", "ESync"),
    "ssgd": ("sync", "Sync"),
    "bsp": ("sync", "Sync"),
    "asgd": ("async", "Async"),
    "dcasgd": ("dcasgd", "DCASGD"),
}
#: ESync's folder name -> Thinwire's training method.
METHODS = {"esync": "esync", "sync": "ssgd", "async": "asgd", "dcasgd": "dcasgd"}
NON_IID_SUFFIX = "-niid"
#: Phases of a training round that follow the local steps.
_AT_THE_END = (ENCODE, *GLOBAL_PHASES, EVALUATION)
_DECIMALS = 6


@dataclasses.dataclass(frozen=True)
class DeviceLog:
    """Training rounds and test accuracies of one device, read from the device's log files."""

    host: str
    device: str
    rounds: list[Round]
    accuracies: dict[int, float]  # index of an evaluated round in `rounds` -> test accuracy


def mode_of(method: str, non_iid: bool) -> str:
    """Return ESync's folder name for a training method of Thinwire."""
    mode = MODES[method][0] if method in MODES else method
    return mode + (NON_IID_SUFFIX if non_iid else "")


def name_of(mode: str) -> str:
    """Return the file name, without ending, of the JSON summary of an ESync mode (method)."""
    stem = mode.removesuffix(NON_IID_SUFFIX)
    names = {folder: name for folder, name in MODES.values()}
    return names.get(stem, stem) + ("-Non-IID" if mode != stem else "")


def folder_names(origins: Sequence[tuple[str, str, int]]) -> list[tuple[str, str]]:
    """Return ESync's folder names (host, device) of workers, given as (host, device, rank).

    If several workers share a device, the folder name of the device ends with the worker's rank.
    """
    names = []
    for host, device, rank in origins:
        shared = sum((host, device) == (h, d) for h, d, _ in origins) > 1
        names.append((_safe(host), _safe(f"{device}-{rank}" if shared else device)))
    return names


def place_accuracies(
    rounds: Sequence[Round], evaluations: Iterable[Evaluation]
) -> dict[int, float]:
    """Return index in `rounds` -> test accuracy, for each round that was evaluated.

    An evaluation belongs to the last training round whose model version is not above the evaluated
    version. An evaluation of the untrained model belongs to no training round and is omitted.
    """
    versions = [row.version for row in rounds]
    placed = {}
    for evaluation in evaluations:
        position = bisect.bisect_right(versions, evaluation.version) - 1
        accuracy = evaluation.metrics.get(ACCURACY)
        if position >= 0 and accuracy is not None:
            placed[position] = accuracy
    return placed


def document_of(number: int, each: Round, accuracy: float | None) -> dict[str, Any]:
    """Return the content of a training round's log file ``iter-number.txt``."""
    document: dict[str, Any] = {
        "num_iters": number,
        "num_samples": each.num_samples,
        "total_time": round(each.total_time, _DECIMALS),
    }
    if accuracy is not None:
        document["accuracy"] = accuracy
    steps = each.steps if each.steps else _even_steps(each)
    steps = [*steps[:-1], {**steps[-1], EVALUATION: steps[-1].get(EVALUATION, 0.0)}]
    document["time"] = {
        str(index): {phase: round(seconds, _DECIMALS) for phase, seconds in step.items()}
        for index, step in enumerate(steps)
    }
    return document


def write_device(folder: pathlib.Path, documents: Iterable[Mapping[str, Any]]) -> int:
    """Write a device's log files ``iter-1.txt``, ``iter-2.txt``...; return the number of files.

    Raises:
        OSError: The folder of log files cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    count = 0
    for count, document in enumerate(documents, 1):
        (folder / f"iter-{count}.txt").write_text(json.dumps(document), encoding="utf-8")
    # Files of an earlier, longer run would be read as rounds of the present run.
    for old in folder.glob("iter-*.txt"):
        if (number := re.fullmatch(r"iter-(\d+)\.txt", old.name)) and int(number[1]) > count:
            old.unlink()
    return count


def read_mode(folder: pathlib.Path) -> list[DeviceLog]:
    """Read the logs of all devices of ``BASE/NETWORK/MODE``, in order of host and device.

    Raises:
        OSError: A log file cannot be read.
        ValueError: A file is not a log file of ESync, or the folder has no log file.
    """
    logs: list[DeviceLog] = []
    for host in _folders(folder):
        for device in _folders(host):
            documents = list(_read_device(device))
            if documents:
                logs.append(_logged(host.name, device.name, len(logs), documents))
    if not logs:
        raise ValueError(f"the folder {folder} has no file HOST/DEVICE/iter-1.txt")
    return logs


def summarise_mode(devices: Iterable[DeviceLog]) -> dict[str, dict[str, dict[str, list[Any]]]]:
    """Return the JSON summary of ESync's logs: host -> device -> lists with an entry per round.

    The list ``accuracy_list`` in the JSON summary has entries for evaluated rounds only. The list
    ``evaluations`` in the JSON summary has the evaluated rounds as (seconds, round, accuracy).
    """
    summary: dict[str, dict[str, dict[str, list[Any]]]] = {}
    for log in devices:
        rounds = log.rounds
        evaluated = sorted(log.accuracies.items())
        summary.setdefault(log.host, {})[log.device] = {
            "accuracy_list": [round(accuracy, 3) for _, accuracy in evaluated],
            "num_samples_list": [row.num_samples for row in rounds],
            "self_iters_list": [len(row.steps or ()) for row in rounds],
            "elapsed_time_list": [int(row.total_time) for row in rounds],
            "aggregate_time_list": [row.global_seconds for row in rounds],
            "evaluations": [
                [rounds[at].total_time, rounds[at].num_iters, round(accuracy, 3)]
                for at, accuracy in evaluated
            ],
        }
    return summary


def _even_steps(each: Round) -> list[dict[str, float]]:
    """Return a round's times per local step: even shares, and the exchange in the last step."""
    local = {
        phase: seconds / max(1, each.n_local)
        for phase, seconds in each.time.items()
        if phase != CHECK_READY and phase not in _AT_THE_END
    }
    last = {phase: each.time[phase] for phase in _AT_THE_END if phase in each.time}
    if CHECK_READY not in each.time:
        return [*(dict(local) for _ in range(each.n_local - 1)), {**local, **last}]
    ready = {CHECK_READY: each.time[CHECK_READY] / each.entries}
    return [*({**ready, **local} for _ in range(each.n_local)), {**ready, **last}]


def _read_device(folder: pathlib.Path) -> Iterator[dict[str, Any]]:
    """Yield the contents of the log files iter-1.txt, iter-2.txt... until a file is missing."""
    number = 1
    while (path := folder / f"iter-{number}.txt").is_file():
        try:
            document = parse_json(path.read_bytes())
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error
        if not isinstance(document, dict) or not isinstance(document.get("time"), dict):
            raise ValueError(
                f"file {path} has no map 'time'; expected a round in the format of ESync's logs"
            )
        yield document
        number += 1


def _logged(host: str, device: str, rank: int, documents: Sequence[dict[str, Any]]) -> DeviceLog:
    rounds, accuracies = [], {}
    for position, document in enumerate(documents):
        where = f"{host}/{device}/iter-{position + 1}.txt"
        times: dict[str, dict[str, float]] = document["time"]
        try:
            steps = [times[key] for key in sorted(times, key=int)]
            total: dict[str, float] = {}
            for step in steps:
                for phase, seconds in step.items():
                    total[phase] = total.get(phase, 0.0) + seconds
            accuracy = float(document.get("accuracy") or 0.0)
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(
                f"{where}: the map 'time' or 'accuracy' is malformed: {error}"
            ) from error
        values = {
            "num_iters": document.get("num_iters"),
            "num_samples": document.get("num_samples"),
            "total_time": document.get("total_time"),
            "time": total,
            "steps": steps,
            "n_local": sum(FORWARD_AND_BACKWARD in step for step in steps),
            "version": document.get("num_iters"),
            "host": host,
            "device": device,
            "rank": rank,
            "life": "imported",
        }
        rounds.append(Round.from_dict(values, where))
        if accuracy:
            accuracies[position] = accuracy
    return DeviceLog(host, device, rounds, accuracies)


def _folders(folder: pathlib.Path) -> list[pathlib.Path]:
    return sorted(path for path in folder.iterdir() if path.is_dir())


def _safe(name: str) -> str:
    """Return a name in which characters that are unsafe in a folder name are replaced."""
    text = re.sub(r"[^A-Za-z0-9._-]", "_", name)[:100]
    return text if text.strip(".") else "_"
