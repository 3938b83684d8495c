"""What a worker writes into its checkpoints, and how it comes back from one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from absl import logging

from thinwire.ops.run.settings import is_finished, limit_of
from thinwire.ops.telemetry import run_status
from thinwire.ops.types import ConfigurationError, State

if TYPE_CHECKING:
    from thinwire.worker.role import Worker

_PROBE_SECONDS = 2.0


def save(worker: Worker) -> None:
    """Write a checkpoint; a disk that refuses is logged, training goes on."""
    state = {
        "run_id": worker.part.run_id,
        "core": worker.part.core.save(),
        "exchange": worker.part.exchange.save(),
        "cursor": worker.shard.cursor.state(),
        "local": worker.step.save_local(),
        "metrics": worker.part.metrics().to_dict(),
        "stop_reason": worker.part.stop_reason,
        "limit": limit_of(worker.run, worker.part.stop_reason),
    }
    try:
        worker.checkpoints.save(worker.part.core.step, state)
    except OSError as error:
        logging.error("cannot write the worker's checkpoint: %s", error)


def finished(worker: Worker) -> str | None:
    """Return why this worker's run ended, if it did and its PS is gone."""
    found = worker.checkpoints.load_latest()
    if found is None or not is_finished(worker.run, found[1]["stop_reason"], found[1]["limit"]):
        return None
    gone = not worker.part.exchange.shards[0].probe(_PROBE_SECONDS)
    return str(found[1]["stop_reason"]) if gone else None


def resume(worker: Worker, last_applied_step: int) -> None:
    """Go on from this worker's checkpoint if it is of this run.

    Raises:
        ConfigurationError: The checkpoint is of another split of the data.
    """
    found = worker.checkpoints.load_latest()
    if found is None:
        return
    state: State = found[1]
    if state["run_id"] != worker.part.run_id:
        logging.info("ignoring the checkpoint of another run (%s)", state["run_id"])
        return
    try:
        worker.shard.cursor.restore(state["cursor"])
    except ConfigurationError as error:
        raise ConfigurationError(f"--run_dir={worker.run.run_dir}: {error}") from error
    worker.step.restore_local(state["local"])
    worker.part.exchange.restore(state["exchange"])
    worker.part.before = run_status.WorkerMetrics.from_dict(state["metrics"])
    if worker.part.core.restore(state["core"], last_applied_step):
        logging.info("resumed at step %d", last_applied_step)
    else:
        logging.warning(
            "the checkpoint is of step %d, the PS applied step %d: the codec starts afresh",
            state["core"]["step"],
            last_applied_step,
        )
