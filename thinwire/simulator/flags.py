"""Flags of the Simulator role, in addition to worker flags for emulated links and devices."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from absl import flags

from thinwire.ops.collectives import THROUGH_PS
from thinwire.ops.options import Topic, advanced, comma_list, words
from thinwire.ops.types import ConfigurationError, Link
from thinwire.ps import flags as ps_flags
from thinwire.runtime.run.settings import Run
from thinwire.worker import flags as worker_flags
from thinwire.worker.flags import EmulatedDevice

if TYPE_CHECKING:
    from thinwire.simulator.devices import Outage, StepTime

FLAGS = flags.FLAGS
_DEFAULT_STEP = "0.1"

TOPICS = (
    Topic(
        "Simulator",
        (
            words(
                "sim_step_seconds",
                None,
                "Computing time of a mini-batch: one value or one per worker (0.1,0.4); or one "
                "distribution, lognormal:MEAN,SIGMA, uniform:LOW,HIGH or exponential:MEAN, or one "
                "per worker separated by semicolons; or trace:FILE with one step per line. "
                "--slowdown multiplies the time, --step_seconds is its lower bound.",
                "seconds",
                unset=f"--step_seconds if given, else {_DEFAULT_STEP}",
            ),
            words(
                "sim_failures",
                "",
                "Times at which simulated workers die: 2@30-60,3@45 kills worker 2 at 30 s and "
                "starts it again at 60 s, and kills worker 3 at 45 s for good.",
                "WORKER@SECONDS-SECONDS",
                unset="none",
            ),
            comma_list(
                "sim_server_mbps",
                "0",
                "Rate of a shard's link in each direction, shared by all workers; 0: no limit.",
                "Mbit/s, one for all or one per shard",
            ),
            *advanced(
                comma_list(
                    "sim_server_seconds",
                    "0",
                    "Time that a shard takes to process a push; a shard processes pushes in order.",
                    "seconds, one for all or one per shard",
                ),
                words(
                    "sim_garbage",
                    "",
                    "Simulated faulty workers: with 4:1e6, worker 4 sends noise of L2 norm 1e6 "
                    "instead of its gradients, to test guards like --max_update_norm.",
                    "WORKER:L2 norm",
                    unset="none",
                ),
            ),
        ),
    ),
)


@dataclasses.dataclass(frozen=True)
class ShardSpeed:
    """Simulated capacity of one PS shard."""

    seconds_per_push: float  # time that the PS shard needs for one push, in seconds
    mbps: float  # rate of the PS shard's link in Mbit/s; 0: no limit


@dataclasses.dataclass(frozen=True)
class SimulatorFlags:
    """Settings of a simulated training run, from the Simulator's flags.

    The defaults are the settings of a run without faults, whose rounds are not measured.
    """

    devices: tuple[EmulatedDevice, ...]  # emulated device of each worker, worker 1 first
    # Step times of each worker, before --slowdown and --step_seconds change them.
    step_times: tuple[StepTime, ...]
    servers: tuple[ShardSpeed, ...]  # capacity of each PS shard, shard 0 first
    outages: tuple[Outage, ...] = ()
    threads: int = 0
    clip_norm: float = 0.0
    measure: str = "off"  # value of --measure
    start_timeout_seconds: float = 600.0
    # Name of a flag of the Simulator -> value as text, for the records of the run.
    settings: dict[str, str] = dataclasses.field(default_factory=dict)
    weight_decay: float = 0.0  # coupled weight decay, added to the gradient as on a worker
    #: Worker id -> L2 norm of the noise that --sim_garbage makes the worker push.
    garbage: dict[int, float] = dataclasses.field(default_factory=dict)


def check(run: Run) -> None:
    """Check the Simulator's flags before TensorFlow is imported; raise ConfigurationError."""
    read(run)


def read(run: Run) -> SimulatorFlags:
    """Return the settings of the Simulator from the flags.

    Raises:
        ConfigurationError: A flag of step times, failures, links or capacities is ill-formed, out
            of range, or has not one value per worker or shard, or the run uses an all-reduce or a
            journal.
    """
    # Only a simulation needs these modules; --help would be slower with them.
    from thinwire.simulator import devices as simulator_devices
    from thinwire.simulator import faulty_gradients

    if run.method.collective != THROUGH_PS:
        raise ConfigurationError(
            f"--collective={run.method.collective} is not simulated; use --collective={THROUGH_PS}."
        )
    if FLAGS.journal == "on":
        raise ConfigurationError(
            "--journal=on: a simulated PS never dies, so its journal would never be read; remove "
            "the flag. The same command repeats an interrupted simulation with equal results."
        )
    worker = worker_flags.read(run.nb_workers)
    worker_flags.refuse_idle_links(run)
    devices = worker_flags.devices(run.nb_workers)
    text = FLAGS.sim_step_seconds or _step_seconds_of(devices)
    seconds = _per_shard("sim_server_seconds", 3600.0, run.nb_ps)
    mbps = _per_shard("sim_server_mbps", 1e6, run.nb_ps)
    links = (f"link_{field.name}" for field in dataclasses.fields(Link))
    names = ("sim_server_seconds", "sim_server_mbps", *links)
    return SimulatorFlags(
        devices=devices,
        step_times=simulator_devices.parse_speeds(text, run.nb_workers),
        outages=simulator_devices.parse_outages(FLAGS.sim_failures, run.nb_workers),
        servers=tuple(ShardSpeed(*row) for row in zip(seconds, mbps, strict=True)),
        threads=worker.threads,
        clip_norm=worker.clip_norm,
        measure=worker.measure,
        start_timeout_seconds=ps_flags.read(run.addresses).start_timeout_seconds,
        settings={
            "step_seconds": _shortened(text),
            "failures": _shortened(FLAGS.sim_failures),
            "garbage": _shortened(FLAGS.sim_garbage),
            **{name: _shortened(",".join(getattr(FLAGS, name))) for name in names},
        },
        weight_decay=worker.weight_decay,
        garbage=faulty_gradients.parse(FLAGS.sim_garbage, run.nb_workers),
    )


def _step_seconds_of(devices: tuple[EmulatedDevice, ...]) -> str:
    """Return the default of --sim_step_seconds, which depends on --step_seconds."""
    floors = [device.step_seconds for device in devices]
    if min(floors) <= 0:
        return _DEFAULT_STEP
    if any(device.slowdown > 1 for device in devices):
        raise ConfigurationError(
            "--slowdown multiplies --sim_step_seconds, which is not set, and --step_seconds is "
            "only its lower bound; set --sim_step_seconds, or remove --slowdown."
        )
    return ",".join(map(str, floors))


def _per_shard(name: str, most: float, nb_ps: int) -> list[float]:
    """Return a flag's values as one number from 0 to `most` for each PS shard."""
    try:
        values = [float(word) for word in getattr(FLAGS, name)]
    except ValueError as error:
        raise ConfigurationError(
            f"--{name}: expected numbers, for example 0.002 or 0,0.01 ({error})."
        ) from error
    if len(values) not in (1, nb_ps):
        raise ConfigurationError(
            f"--{name} has {len(values)} values; expected one value, or one value for each of the "
            f"{nb_ps} shards (--nb_ps)."
        )
    for value in values:
        if not 0.0 <= value <= most:
            raise ConfigurationError(f"--{name}={value:g}: expected a number from 0 to {most:g}.")
    return values * (nb_ps if len(values) == 1 else 1)


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."
