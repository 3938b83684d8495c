"""Reads a worker's id and the PS addresses from the environment of Slurm, torchrun or Kubernetes.

Each process of the scheduler's job is a worker, whose id is the process's rank (from 0) plus 1. The
user starts the PS separately, at the addresses in ``THINWIRE_PS`` (host:port, with commas between
shards). If ``THINWIRE_PS`` is not set, the workers expect the PS on the first host that Slurm or
torchrun names, at the default port.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from thinwire.flags.slurm import step_of
from thinwire.launcher.tf_config import ClusterPosition
from thinwire.ops.types import ConfigurationError

#: Name of the environment variable with the addresses (host:port) of the PS shards.
PS_VARIABLE = "THINWIRE_PS"
#: Name of the environment variable with the number of workers, which a pod of a Kubernetes Job
#: cannot find out otherwise.
WORKERS_VARIABLE = "THINWIRE_NB_WORKERS"
_DEFAULT_PORT = 2223

Environment = Mapping[str, str]


def position(environment: Environment) -> tuple[str, ClusterPosition] | None:
    """Return the scheduler's name, and this process's role, worker id and PS addresses.

    The function `position` returns None if no scheduler has started this process.

    Args:
        environment: Environment variables of this process.

    Raises:
        ConfigurationError: A numeric environment variable of the scheduler is malformed, or no
            variable gives the address of the PS.
    """
    for name, read in _SCHEDULERS.items():
        place = read(environment)
        if place is not None:
            return name, place
    return None


def _slurm(environment: Environment) -> ClusterPosition | None:
    step = step_of(environment)
    if step is None:
        return None
    shards = _shards(environment, step.hosts[0], "SLURM_STEP_NODELIST")
    return _worker(step.rank, step.num_tasks, shards)


def _torchrun(environment: Environment) -> ClusterPosition | None:
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR"} <= environment.keys():
        return None
    rank, count = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
    return _worker(rank, count, _shards(environment, environment["MASTER_ADDR"], "MASTER_ADDR"))


def _kubernetes(environment: Environment) -> ClusterPosition | None:
    if "JOB_COMPLETION_INDEX" not in environment or not environment.get(PS_VARIABLE):
        return None
    rank = _number(environment, "JOB_COMPLETION_INDEX")
    if WORKERS_VARIABLE not in environment:
        raise ConfigurationError(
            f"JOB_COMPLETION_INDEX={rank} and {PS_VARIABLE} are set, but the number of workers is "
            f"unknown; set {WORKERS_VARIABLE} to the Job's completions."
        )
    return _worker(rank, _number(environment, WORKERS_VARIABLE), _shards(environment, "", ""))


_SCHEDULERS: dict[str, Callable[[Environment], ClusterPosition | None]] = {
    "Slurm": _slurm,
    "torchrun": _torchrun,
    "Kubernetes": _kubernetes,
}


#: Names of the schedulers that this module knows.
NAMES = tuple(_SCHEDULERS)


def _worker(rank: int, count: int, shards: tuple[str, ...]) -> ClusterPosition:
    if not 0 <= rank < count:
        raise ConfigurationError(
            f"this process has rank {rank} of {count}; expected 0 to {count - 1}. Correct the "
            "scheduler's variables, or give distribute() id_worker and nb_workers."
        )
    return ClusterPosition("Worker", rank + 1, shards, count)


def _shards(environment: Environment, host: str, variable: str) -> tuple[str, ...]:
    """Return host:port of every PS shard, by ``THINWIRE_PS`` or of `host` with the default port."""
    addresses = environment.get(PS_VARIABLE, "")
    if addresses:
        return tuple(address.strip() for address in addresses.split(","))
    if not host:
        raise ConfigurationError(
            f"variable {variable} names no host, so the PS is unknown; set {PS_VARIABLE}=host:port."
        )
    return (f"{host}:{_DEFAULT_PORT}",)


def _number(environment: Environment, name: str, default: int = 0) -> int:
    text = environment.get(name, str(default))
    if not text.isdecimal():
        raise ConfigurationError(f"variable {name}={text!r}: expected a whole number from 0.")
    return int(text)
