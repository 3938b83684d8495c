"""What every role needs to know of a run: read once from the command line, then passed around."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Sequence

from ops.methods import Method
from ops.schedule import Schedule
from ops.types import ConfigurationError, Link

#: Exit codes of every role (docs/OPERATIONS.md).
EXIT_DONE = 0
EXIT_BAD_FLAG = 1
EXIT_CONFIGURATION = 2
EXIT_UNREACHABLE = 3
EXIT_REFUSED = 4
EXIT_DIVERGED = 5
EXIT_INTERRUPTED = 130

#: Why a run stopped -> the exit code of its nodes; every other reason is a run that is done.
EXIT_OF_STOP = {"interrupted": EXIT_INTERRUPTED, "diverged": EXIT_DIVERGED}


#: Stop reasons of a run that reached an end of its own.
END_REASONS = ("iter_max", "epochs", "max_seconds", "target_accuracy")


class Diverged(Exception):
    """Gradients or weights stayed non-finite. Exit code 5."""


@dataclasses.dataclass(frozen=True)
class ModelChoice:
    """Which model: a built-in network, or the user's file."""

    network: str
    path: str | None  # --model
    image_size: int
    image_depth: int
    nb_classes: int


@dataclasses.dataclass(frozen=True)
class DataChoice:
    """Which examples, and who gets which."""

    dataset: str
    data_dir: str | None
    scaling: str
    partition: str
    sharding_file: str | None


@dataclasses.dataclass(frozen=True)
class Run:
    """Settings common to all roles."""

    type_node: str
    method: Method
    nb_workers: int
    addresses: tuple[str, ...]  # host:port of every shard
    seed: int
    run_dir: pathlib.Path
    overwrite: bool
    model: ModelChoice
    data: DataChoice
    batch_size: int
    schedule: Schedule
    iter_max: int
    epochs: float | None
    max_seconds: float | None
    target_accuracy: float | None
    kernels: str
    device: str
    lease_seconds: float
    checkpoint_interval_seconds: float
    keep_checkpoints: int
    reconnect_timeout_seconds: float

    @property
    def nb_ps(self) -> int:
        """Number of PS shards."""
        return len(self.addresses)


def per_worker(values: Sequence[float], nb_workers: int, flag: str) -> tuple[float, ...]:
    """Spread one value, or one per worker, over all workers.

    Raises:
        ConfigurationError: Another number of values.
    """
    if len(values) == 1:
        return tuple(values) * nb_workers
    if len(values) != nb_workers:
        raise ConfigurationError(
            f"--{flag} has {len(values)} values; give one, or one for each of the "
            f"{nb_workers} workers (--nb_workers)."
        )
    return tuple(values)


def links(
    mbps: Sequence[float], delay_ms: Sequence[float], loss: Sequence[float], nb_workers: int
) -> tuple[Link, ...]:
    """Return the emulated link of every worker, in order of id."""
    columns = (
        per_worker(mbps, nb_workers, "link_mbps"),
        per_worker(delay_ms, nb_workers, "link_delay_ms"),
        per_worker(loss, nb_workers, "link_loss"),
    )
    return tuple(Link(*row) for row in zip(*columns, strict=True))


def is_finished(run: Run, reason: str | None, updates: int, seconds: float) -> bool:
    """Return whether a run that once ended this way has nothing left to do.

    Args:
        run: What is asked for now; a raised limit makes the run go on.
        reason: Why it ended then.
        updates: Applied by then.
        seconds: Of training by then.
    """
    if reason == "iter_max":
        return updates >= run.iter_max
    if reason == "max_seconds":
        return run.max_seconds is not None and seconds >= run.max_seconds
    return reason in END_REASONS


def finished_summary(run: Run) -> str | None:
    """Return the stop reason in the run directory's summary.json if that run is finished."""
    try:
        summary = json.loads((run.run_dir / "summary.json").read_text())
        reason, updates, seconds = (summary[k] for k in ("stop_reason", "updates", "seconds"))
        return reason if is_finished(run, reason, updates, seconds) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
