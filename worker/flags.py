"""Flags that only a worker reads (Cluster passes them on)."""

from __future__ import annotations

import dataclasses

from absl import flags

from ops.collectives import THROUGH_PS
from ops.options import Topic, choice, integer, number, numbers_per_worker
from ops.rounds import LEVELS
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
        integer(
            "worker_port",
            0,
            "With --collective: where this worker listens to others; 0 takes a free port.",
            low=0,
            high=65535,
        ),
        integer(
            "collective_sync_every",
            1,
            "With --collective: rounds between two copies of the model to the PS.",
            low=1,
        ),
        number(
            "clip_norm",
            0.0,
            "Clip each mini-batch's gradient to this global L2 norm before it is coded; 0 is off.",
            low=0.0,
        ),
        number(
            "worker_weight_decay",
            0.0,
            "Add this times the weights to each mini-batch's gradient, before it is clipped.",
            low=0.0,
        ),
        choice(
            "measure",
            "rounds",
            "What of each round goes to RUN_DIR/measure: nothing, its sums, or every local step.",
            LEVELS,
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
        numbers_per_worker(
            "step_seconds", "0", "Seconds a mini-batch takes at least: the rest of it is slept."
        ),
    ),
)
TOPICS = (_WORKER, _EMULATION)


#: Flag of the topic above -> smallest and largest value that can be emulated.
_LIMITS = {
    "link_mbps": (0.0, 1e6),
    "link_delay_ms": (0.0, 60_000.0),
    "link_loss": (0.0, 0.95),
    "slowdown": (1.0, 1e6),
    "step_seconds": (0.0, 86_400.0),
}


@dataclasses.dataclass(frozen=True)
class Device:
    """One worker's emulated link and device."""

    link: Link
    slowdown: float  # how many times slower than this machine
    step_seconds: float  # what a mini-batch takes at least


@dataclasses.dataclass(frozen=True)
class WorkerFlags:
    """One worker's own settings."""

    id_worker: int
    threads: int
    clip_norm: float
    measure: str  # one of ops.rounds.LEVELS
    device: Device
    peer_port: int = 0  # where it listens to other workers
    sync_every: int = 1  # rounds between two copies of the model to the PS
    insecure: bool = False  # whether that may be beyond this machine
    weight_decay: float = 0.0  # coupled: added to the gradients


def check(run: Run, given: flags.FlagValues = FLAGS) -> None:
    """Refuse what cannot work, before anything heavy is imported; raises ConfigurationError."""
    read(run.nb_workers, given)
    if run.method.collective != THROUGH_PS:
        from worker.collective_peers import listening_address

        listening_address(run.addresses[0], given.insecure)


def read(nb_workers: int, given: flags.FlagValues = FLAGS) -> WorkerFlags:
    """Return this worker's settings.

    Raises:
        ConfigurationError: An id, an emulated link or an emulated device out of range.
    """
    if not 1 <= given.id_worker <= nb_workers:
        raise ConfigurationError(
            f"--id_worker={given.id_worker}: expected 1..{nb_workers} (--nb_workers={nb_workers})."
        )
    return WorkerFlags(
        id_worker=given.id_worker,
        threads=given.worker_threads,
        clip_norm=given.clip_norm,
        measure=given.measure,
        device=devices(nb_workers, given)[given.id_worker - 1],
        peer_port=given.worker_port,
        sync_every=given.collective_sync_every,
        insecure=given.insecure,
        weight_decay=given.worker_weight_decay,
    )


def devices(nb_workers: int, given: flags.FlagValues = FLAGS) -> tuple[Device, ...]:
    """Return the emulated link and device of every worker, in order of id.

    Raises:
        ConfigurationError: A value out of range, or another number of values than workers.
    """
    columns = {name: [float(value) for value in given[name].value] for name in _LIMITS}
    for name, (low, high) in _LIMITS.items():
        for value in columns[name]:
            if not low <= value <= high:
                raise ConfigurationError(
                    f"--{name}={value:g}: expected a number from {low:g} to {high:g}."
                )
    rows = zip(
        links(columns["link_mbps"], columns["link_delay_ms"], columns["link_loss"], nb_workers),
        per_worker(columns["slowdown"], nb_workers, "slowdown"),
        per_worker(columns["step_seconds"], nb_workers, "step_seconds"),
        strict=True,
    )
    return tuple(Device(*row) for row in rows)
