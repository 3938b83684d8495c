"""Flags that only a worker process reads, and that a Cluster passes to its workers."""

from __future__ import annotations

import dataclasses

from absl import flags

from thinwire.ops.collectives import THROUGH_PS
from thinwire.ops.options import Topic, advanced, choice, integer, number, numbers_per_worker
from thinwire.ops.types import BEST_EFFORT, ConfigurationError, Link
from thinwire.runtime.run.settings import Run, links, per_worker
from thinwire.runtime.telemetry.round_trace import LEVELS

FLAGS = flags.FLAGS

WORKER = Topic(
    "Worker",
    (
        integer("id_worker", 1, "Id of this worker, from 1 to nb_workers.", "number"),
        integer(
            "worker_threads",
            0,
            "Number of TensorFlow threads of a worker; 0: TensorFlow chooses.",
            "threads",
            low=0,
        ),
        number(
            "clip_norm",
            0.0,
            "Global norm to which a worker clips a mini-batch's gradient before coding; 0: off.",
            "L2 norm",
            low=0.0,
        ),
        *advanced(
            number(
                "worker_weight_decay",
                0.0,
                "Factor of the weights that a worker adds to each gradient before clipping.",
                "factor",
                low=0.0,
            ),
            integer(
                "num_restarts",
                0,
                "Number of earlier starts of this worker, for summary.json; a Cluster sets it.",
                "count",
                low=0,
            ),
            integer(
                "worker_port",
                0,
                "With --collective: port for connections of other workers; 0: a free port.",
                "port",
                low=0,
                high=65535,
            ),
            integer(
                "collective_sync_every",
                1,
                "With --collective: number of rounds between two model copies to the PS.",
                "rounds",
                low=1,
            ),
            choice(
                "measure",
                "rounds",
                "Times that a worker writes to RUN_DIR/measure for each round: none, only sums, "
                "or the time of every local step.",
                LEVELS,
            ),
        ),
    ),
)
_EMULATION = Topic(
    "Emulated links and devices",
    (
        numbers_per_worker(
            "link_mbps", "0", "Rate of the emulated link in each direction; 0: no limit.", "Mbit/s"
        ),
        numbers_per_worker("link_delay_ms", "0", "One-way delay of the link.", "milliseconds"),
        numbers_per_worker(
            "link_loss",
            "0",
            "Probability, below 1, that the link loses a 1,448-byte segment or a datagram.",
            "fraction",
        ),
        numbers_per_worker(
            "slowdown", "1", "Factor by which a worker computes slower than its machine.", "factor"
        ),
        numbers_per_worker(
            "step_seconds",
            "0",
            "Least time of a mini-batch: a worker that is faster sleeps for the remaining time.",
            "seconds",
        ),
        *advanced(
            numbers_per_worker(
                "link_queue_kb",
                "0",
                "Size of the emulated uplink's queue for each class of service; a full queue "
                "drops datagrams. 0: no limit.",
                "kB (1,000 bytes)",
            ),
            numbers_per_worker(
                "link_reorder",
                "0",
                "Probability that a datagram arrives after datagrams that were sent later.",
                "fraction",
            ),
            numbers_per_worker(
                "link_duplicate", "0", "Probability that a datagram arrives twice.", "fraction"
            ),
            numbers_per_worker(
                "link_background_mbps",
                "0",
                "Rate of background traffic on the emulated uplink, less than --link_mbps.",
                "Mbit/s",
            ),
            numbers_per_worker(
                "link_background_class",
                str(BEST_EFFORT),
                "Class of service of the background traffic: 0 is served first, 7 is unmarked.",
                "class",
            ),
        ),
    ),
)
TOPICS = (WORKER, _EMULATION)


_PREFIX = "link_"  # prefix of the flags that set the fields of class Link
_SMALLEST_QUEUE_KB = 2.0  # size in kilobytes; a smaller queue could not hold one datagram

#: Maps the name of an emulation flag to the smallest and largest value that can be emulated.
_LIMITS: dict[str, tuple[float, float]] = {
    "link_mbps": (0.0, 1e6),
    "link_delay_ms": (0.0, 60_000.0),
    "link_loss": (0.0, 0.95),
    "link_queue_kb": (0.0, 1e9),
    "link_reorder": (0.0, 1.0),
    "link_duplicate": (0.0, 1.0),
    "link_background_mbps": (0.0, 1e6),
    "link_background_class": (0, BEST_EFFORT),
    "slowdown": (1.0, 1e6),
    "step_seconds": (0.0, 86_400.0),
}


@dataclasses.dataclass(frozen=True)
class EmulatedDevice:
    """Settings of one worker's emulated network link and of its emulated slow device."""

    link: Link
    # factor by which the emulated device is slower than the machine that emulates it
    slowdown: float
    step_seconds: float  # shortest time that a mini-batch may take, in seconds; 0 for no limit


@dataclasses.dataclass(frozen=True)
class WorkerFlags:
    """Settings of one worker that only this worker reads from its flags."""

    id_worker: int
    threads: int
    clip_norm: float
    measure: str  # level of measuring, one of thinwire.runtime.telemetry.round_trace.LEVELS
    device: EmulatedDevice
    peer_port: int = 0  # port for connections of other workers; 0 for a free port
    # number of rounds after which the worker sends the PS the next copy of the model
    sync_every: int = 1
    insecure: bool = False  # True if other machines may connect without TLS and secret
    # factor of weight decay: this factor times the weights is added to gradients
    weight_decay: float = 0.0
    num_restarts: int = 0  # number of times that a Cluster object has restarted this worker


def check(run: Run, given: flags.FlagValues = FLAGS) -> None:
    """Raise ConfigurationError for invalid worker flags, before TensorFlow is imported."""
    read(run.nb_workers, given)
    refuse_idle_links(run, given)
    if run.method.collective != THROUGH_PS:
        from thinwire.worker.collective.peers import listening_address

        listening_address(run.addresses[0], given.insecure, run.credentials.protection)


def read(nb_workers: int, given: flags.FlagValues = FLAGS) -> WorkerFlags:
    """Return this worker's settings from its flags.

    Raises:
        ConfigurationError: The worker's id, an emulated link or an emulated device is out of range.
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
        num_restarts=given.num_restarts,
    )


def devices(nb_workers: int, given: flags.FlagValues = FLAGS) -> tuple[EmulatedDevice, ...]:
    """Return the emulated link and device of every worker, in order of id.

    Raises:
        ConfigurationError: A value of an emulation flag is out of range, or a flag does not have
            one value per worker.
    """
    columns = {name: [float(value) for value in getattr(given, name)] for name in _LIMITS}
    for name, (low, high) in _LIMITS.items():
        for value in columns[name]:
            if not low <= value <= high:
                raise ConfigurationError(
                    f"--{name}={value:g}: expected a number from {low:g} to {high:g}."
                )
    columns[_PREFIX + "background_class"] = _background_classes(columns)
    names = [name for name in _LIMITS if name.startswith(_PREFIX)]
    rows = zip(
        links({name[len(_PREFIX) :]: columns[name] for name in names}, nb_workers),
        per_worker(columns["slowdown"], nb_workers, "slowdown"),
        per_worker(columns["step_seconds"], nb_workers, "step_seconds"),
        strict=True,
    )
    emulated = tuple(EmulatedDevice(*row) for row in rows)
    for device in emulated:
        _check_classes(device.link)
    return emulated


def refuse_idle_links(run: Run, given: flags.FlagValues = FLAGS) -> None:
    """Reject emulation flags for datagrams if the run sends no datagrams.

    Raises:
        ConfigurationError: An emulation flag has no effect in this run; the message contains its
            name.
    """
    if run.method.router.uses_datagrams:
        return
    for link in (device.link for device in devices(run.nb_workers, given)):
        idle = ["queue_kb"] if not link.background_mbps else []
        for name in (*idle, "reorder", "duplicate"):
            if getattr(link, name):
                raise ConfigurationError(
                    f"--{_PREFIX}{name}={getattr(link, name):g} affects only datagrams, but this "
                    "method sends no datagrams; remove the flag, or choose a --router that sends "
                    "datagrams."
                )


def _background_classes(columns: dict[str, list[float]]) -> list[float]:
    """Return the classes of service of the emulated background traffic as whole numbers."""
    classes = columns[_PREFIX + "background_class"]
    for value in classes:
        if value != int(value):
            raise ConfigurationError(
                f"--{_PREFIX}background_class={value:g}: expected a whole number from 0 to "
                f"{BEST_EFFORT}."
            )
        if value != BEST_EFFORT and not any(columns[_PREFIX + "background_mbps"]):
            raise ConfigurationError(
                f"--{_PREFIX}background_class={value:g} has no effect without background "
                f"traffic; add --{_PREFIX}background_mbps, or remove the flag."
            )
    return [int(value) for value in classes]


def _check_classes(link: Link) -> None:
    """Reject emulated background traffic, or a queue, that does not fit the link's rate."""
    name, value = _PREFIX + "background_mbps", link.background_mbps
    if value and value >= link.mbps:
        raise ConfigurationError(
            f"--{name}={value:g}: expected less than the link's rate (--link_mbps={link.mbps:g}), "
            "because otherwise less urgent traffic never passes."
        )
    if link.queue_kb and (not link.mbps or link.queue_kb < _SMALLEST_QUEUE_KB):
        raise ConfigurationError(
            f"--link_queue_kb={link.queue_kb:g} at --link_mbps={link.mbps:g}: expected a queue of "
            f"at least {_SMALLEST_QUEUE_KB:g} kB, the size of one datagram, and --link_mbps above "
            "0; a queue of 0 has no limit."
        )
