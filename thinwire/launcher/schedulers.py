"""A worker's place as cluster managers give it in the environment: Slurm, torchrun, Kubernetes.

Each process of the job is a worker; its rank, from 0, is its id - 1. The PS runs beside them, at
the addresses of ``THINWIRE_PS`` (host:port, with commas between shards); where a manager names a
first host, at its default port unless that variable is set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from thinwire.flags.slurm import step_of
from thinwire.launcher.tf_config import ClusterPosition
from thinwire.ops.types import ConfigurationError

#: Names the PS.
PS_VARIABLE = "THINWIRE_PS"
#: How many workers a Kubernetes Job has, which its pods do not know.
WORKERS_VARIABLE = "THINWIRE_NB_WORKERS"
_DEFAULT_PORT = 2223

Environment = Mapping[str, str]


def position(environment: Environment) -> tuple[str, ClusterPosition] | None:
    """Return who gives this process a place, and the place; None: nobody does.

    Raises:
        ConfigurationError: Variables that are no numbers, or a PS that none of them names.
    """
    for name, read in _SCHEDULERS.items():
        found = read(environment)
        if found is not None:
            return name, found
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
            f"JOB_COMPLETION_INDEX={rank} and {PS_VARIABLE} are set, and the number of workers is "
            f"not known; set {WORKERS_VARIABLE} to the Job's completions."
        )
    return _worker(rank, _number(environment, WORKERS_VARIABLE), _shards(environment, "", ""))


_SCHEDULERS: dict[str, Callable[[Environment], ClusterPosition | None]] = {
    "Slurm": _slurm,
    "torchrun": _torchrun,
    "Kubernetes": _kubernetes,
}


#: Who gives places to workers.
NAMES = tuple(_SCHEDULERS)


def _worker(rank: int, count: int, shards: tuple[str, ...]) -> ClusterPosition:
    if not 0 <= rank < count:
        raise ConfigurationError(
            f"this process has rank {rank} of {count}; expected 0 to {count - 1}. Mend the "
            "scheduler's variables, or give distribute() id_worker and nb_workers."
        )
    return ClusterPosition("Worker", rank + 1, shards, count)


def _shards(environment: Environment, host: str, variable: str) -> tuple[str, ...]:
    """Return the addresses of the PS."""
    given = environment.get(PS_VARIABLE, "")
    if given:
        return tuple(each.strip() for each in given.split(","))
    if not host:
        raise ConfigurationError(
            f"{variable} names no host, so the PS is not known; set {PS_VARIABLE}=host:port."
        )
    return (f"{host}:{_DEFAULT_PORT}",)


def _number(environment: Environment, name: str, default: int = 0) -> int:
    text = environment.get(name, str(default))
    if not text.isdecimal():
        raise ConfigurationError(f"{name}={text!r}: expected a number from 0.")
    return int(text)
