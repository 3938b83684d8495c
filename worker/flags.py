"""Flags that only a worker reads (Cluster passes them on)."""

from __future__ import annotations

import dataclasses

from absl import flags

from ops.run import Run, links, per_worker
from ops.types import ConfigurationError, Link

FLAGS = flags.FLAGS
_TOPIC = "Worker"
_EMULATION = "Emulated links and devices"


@dataclasses.dataclass(frozen=True)
class WorkerFlags:
    """One worker's own settings."""

    id_worker: int
    threads: int
    clip_norm: float
    link: Link
    slowdown: float


def define() -> None:
    """Register the flags."""
    flags.DEFINE_integer("id_worker", 1, "This worker, 1..nb_workers.", module_name=_TOPIC)
    flags.DEFINE_integer(
        "worker_threads",
        0,
        "TensorFlow threads of a worker; 0 lets TensorFlow choose.",
        lower_bound=0,
        module_name=_TOPIC,
    )
    flags.DEFINE_float(
        "clip_norm",
        0.0,
        "Clip each mini-batch's gradient to this global L2 norm before it is coded; 0 is off.",
        lower_bound=0.0,
        module_name=_TOPIC,
    )
    _define_floats("link_mbps", "0", "Megabit per second, each way; 0 is no limit.")
    _define_floats("link_delay_ms", "0", "One-way delay in milliseconds.")
    _define_floats("link_loss", "0", "Probability that a 1,448-byte segment is lost, below 1.")
    _define_floats("slowdown", "1", "How many times slower than this machine a worker computes.")


def _define_floats(name: str, default: str, text: str) -> None:
    flags.DEFINE_list(
        name, default, f"{text} One value, or one per worker.", module_name=_EMULATION
    )
    flags.register_validator(
        name, _is_floats, message=f"--{name} takes numbers, such as 100 or 100,10,1"
    )


def _is_floats(values: list[str]) -> bool:
    try:
        return bool([float(value) for value in values])
    except (TypeError, ValueError):
        return False


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
            f"--id_worker={FLAGS.id_worker}: expected 1..{nb_workers} (--nb_workers={nb_workers})."
        )
    columns = [[float(v) for v in FLAGS[name].value] for name in
               ("link_mbps", "link_delay_ms", "link_loss", "slowdown")]  # fmt: skip
    check_emulation(columns)
    number = FLAGS.id_worker - 1
    return WorkerFlags(
        id_worker=FLAGS.id_worker,
        threads=FLAGS.worker_threads,
        clip_norm=FLAGS.clip_norm,
        link=links(columns[0], columns[1], columns[2], nb_workers)[number],
        slowdown=per_worker(columns[3], nb_workers, "slowdown")[number],
    )


def check_emulation(columns: list[list[float]]) -> None:
    """Refuse links and slowdowns that cannot be emulated."""
    limits = (
        ("link_mbps", 0.0, 1e6),
        ("link_delay_ms", 0.0, 60_000.0),
        ("link_loss", 0.0, 0.95),
        ("slowdown", 1.0, 1e6),
    )
    for (name, low, high), values in zip(limits, columns, strict=True):
        for value in values:
            if not low <= value <= high:
                raise ConfigurationError(
                    f"--{name}={value:g}: expected a number from {low:g} to {high:g}."
                )
