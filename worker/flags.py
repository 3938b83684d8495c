"""Flags that only a worker reads (Cluster passes them on)."""

from __future__ import annotations

import dataclasses

from absl import flags

from ops.options import Topic, integer, number, numbers_per_worker
from ops.run import Run, links, per_worker
from ops.types import ConfigurationError, Link

FLAGS = flags.FLAGS

_WORKER = Topic(
    "Worker",
    (
        integer("id_worker", 1, "This worker, 1..nb_workers."),
        integer(
            "worker_threads", 0, "TensorFlow threads of a worker; 0 lets TensorFlow choose.", low=0
        ),
        number(
            "clip_norm",
            0.0,
            "Clip each mini-batch's gradient to this global L2 norm before it is coded; 0 is off.",
            low=0.0,
        ),
    ),
)
_EMULATION = Topic(
    "Emulated links and devices",
    (
        numbers_per_worker("link_mbps", "0", "Megabit per second, each way; 0 is no limit."),
        numbers_per_worker("link_delay_ms", "0", "One-way delay in milliseconds."),
        numbers_per_worker(
            "link_loss", "0", "Probability that a 1,448-byte segment is lost, below 1."
        ),
        numbers_per_worker(
            "slowdown", "1", "How many times slower than this machine a worker computes."
        ),
    ),
)
TOPICS = (_WORKER, _EMULATION)


@dataclasses.dataclass(frozen=True)
class WorkerFlags:
    """One worker's own settings."""

    id_worker: int
    threads: int
    clip_norm: float
    link: Link
    slowdown: float


def check(run: Run) -> None:
    """Refuse what cannot work, before anything heavy is imported; raises ConfigurationError."""
    read(run.nb_workers)


def read(nb_workers: int) -> WorkerFlags:
    """Return this worker's settings.

    Raises:
        ConfigurationError: An id, a link or a slowdown out of range.
    """
    if not 1 <= FLAGS.id_worker <= nb_workers:
        raise ConfigurationError(
            f"--id_worker={FLAGS.id_worker}: expected 1..{nb_workers} "
            "(--nb_workers={nb_workers})."
        )
    columns = read_emulation()
    index = FLAGS.id_worker - 1
    return WorkerFlags(
        id_worker=FLAGS.id_worker,
        threads=FLAGS.worker_threads,
        clip_norm=FLAGS.clip_norm,
        link=links(columns[0], columns[1], columns[2], nb_workers)[index],
        slowdown=per_worker(columns[3], nb_workers, "slowdown")[index],
    )


def read_emulation() -> list[list[float]]:
    """Return the values of --link_mbps, --link_delay_ms, --link_loss and --slowdown.

    Raises:
        ConfigurationError: A link or a slowdown that cannot be emulated.
    """
    limits = (
        ("link_mbps", 0.0, 1e6),
        ("link_delay_ms", 0.0, 60_000.0),
        ("link_loss", 0.0, 0.95),
        ("slowdown", 1.0, 1e6),
    )
    columns = [[float(value) for value in FLAGS[name].value] for name, _, _ in limits]
    for (name, low, high), values in zip(limits, columns, strict=True):
        for value in values:
            if not low <= value <= high:
                raise ConfigurationError(
                    f"--{name}={value:g}: expected a number from {low:g} to {high:g}."
                )
    return columns
