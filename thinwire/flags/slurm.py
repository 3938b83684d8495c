"""A step of Slurm as its variables describe it, and which nodes of a run each of its tasks starts.

``srun thinwire run train.py`` starts one such process for every task. Rank r starts worker r + 1;
rank 0 also the Supervisor; the first task of a host also shards of the PS: shard s belongs to host
s modulo their number. So nothing but the variables is needed to know every address.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping

from thinwire.ops.types import ConfigurationError

#: Ports of jobs: below those that Linux chooses by itself, and above those of most services.
_FIRST_PORT, _NUM_PORTS, _PORTS_OF_STEP = 20000, 12000, 16
_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")
_BRACKETS = re.compile(r"\[([^\]]*)\]")
_OUTER_COMMA = re.compile(r",(?![^\[]*\])")


@dataclasses.dataclass(frozen=True)
class SlurmStep:
    """A step of several tasks, and this process's place in it."""

    rank: int  # from 0
    host: int  # position of this task's in `hosts`
    rank_on_host: int  # from 0
    hosts: tuple[str, ...]
    tasks: tuple[int, ...]  # on each host
    first_port: int
    cpus_of_task: int

    @property
    def num_tasks(self) -> int:
        """How many workers the step has."""
        return sum(self.tasks)

    @property
    def is_first(self) -> bool:
        """Whether what a run does once is this task's."""
        return self.rank == 0

    def starts(self, role: str, number: int) -> bool:
        """Return whether this task starts a node."""
        if role == "Worker":
            return number == self.rank + 1
        if role == "PS":
            return self.rank_on_host == 0 and number % len(self.hosts) == self.host
        return self.is_first

    def addresses(self, nb_ps: int, first_port: int | None = None) -> tuple[str, ...]:
        """Return host:port of every shard.

        Args:
            nb_ps: Number of shards.
            first_port: Of shard 0, where the step's own is not wanted.
        """
        hosts = self.hosts if len(self.hosts) > 1 else ("127.0.0.1",)
        first = first_port or self.first_port
        return tuple(f"{hosts[shard % len(hosts)]}:{first + shard}" for shard in range(nb_ps))


def step_of(environment: Mapping[str, str]) -> SlurmStep | None:
    """Return the step that this process is a task of; None: there is none, or it has one task.

    A batch script has a rank too, but is no step of srun.

    Raises:
        ConfigurationError: Variables that contradict each other or cannot be read.
    """
    if environment.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        return None
    hosts = expand_hosts(_text(environment, "SLURM_STEP_NODELIST"))
    tasks = _expand_counts(_text(environment, "SLURM_STEP_TASKS_PER_NODE"))
    rank, host = _number(environment, "SLURM_PROCID"), _number(environment, "SLURM_NODEID")
    count = _number(environment, "SLURM_STEP_NUM_TASKS")
    if not (len(hosts) == len(tasks) and sum(tasks) == count and host < len(hosts)):
        raise ConfigurationError(
            f"Slurm's variables do not fit together: {count} tasks, of which "
            f"SLURM_STEP_TASKS_PER_NODE={environment['SLURM_STEP_TASKS_PER_NODE']}, on "
            f"SLURM_STEP_NODELIST={environment['SLURM_STEP_NODELIST']}, this one on host {host}. "
            "Start the command by srun."
        )
    if rank >= count:
        raise ConfigurationError(
            f"this process has rank {rank} of {count}; expected 0 to {count - 1}. Start the "
            "command by srun."
        )
    shared = _number(environment, "SLURM_CPUS_ON_NODE", "1") // tasks[host]
    return SlurmStep(
        rank,
        host,
        _number(environment, "SLURM_LOCALID"),
        hosts,
        tasks,
        _port(environment),
        _number(environment, "SLURM_CPUS_PER_TASK", str(max(1, shared))),
    )


def expand_hosts(nodes: str) -> tuple[str, ...]:
    """Return the hosts of Slurm's list, in its order.

    >>> expand_hosts("gpu[07-09,12],login1")
    ('gpu07', 'gpu08', 'gpu09', 'gpu12', 'login1')
    """
    found: list[str] = []
    for part in filter(None, _OUTER_COMMA.split(nodes.strip())):
        pieces = _BRACKETS.split(part)  # text, range, text, range, text
        choices = [
            [piece] if even else list(_expand_ranges(piece))
            for even, piece in zip(itertools.cycle((True, False)), pieces, strict=False)
        ]
        found += ("".join(each) for each in itertools.product(*choices))
    return tuple(found)


def _expand_ranges(text: str) -> Iterator[str]:
    for part in text.split(","):
        first, _, last = part.partition("-")
        last = last or first
        if not (first.isdecimal() and last.isdecimal()):
            raise ConfigurationError(
                f"a list of hosts has [{text}], which is no range; expected such as node[01-04,7]."
            )
        yield from (f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1))


def _expand_counts(text: str) -> tuple[int, ...]:
    """Return the number of tasks on each host from such as ``2(x3),1``."""
    found: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if match is None:
            raise ConfigurationError(
                f"SLURM_STEP_TASKS_PER_NODE={text!r}: expected numbers of tasks such as 2(x3),1."
            )
        found += [int(match[1])] * int(match[2] or 1)
    return tuple(found)


def _port(environment: Mapping[str, str]) -> int:
    """Return the port of shard 0: the first that Slurm reserves, else one that the job gives."""
    if reserved := environment.get("SLURM_STEP_RESV_PORTS", ""):
        return int(next(_expand_ranges(reserved)))
    job, step = _number(environment, "SLURM_JOB_ID"), _number(environment, "SLURM_STEP_ID")
    return _FIRST_PORT + ((job * 4 + step % 4) * _PORTS_OF_STEP) % _NUM_PORTS


def _text(environment: Mapping[str, str], name: str) -> str:
    if not environment.get(name):
        raise ConfigurationError(
            f"SLURM_STEP_NUM_TASKS={environment['SLURM_STEP_NUM_TASKS']} is set and {name} is not; "
            "start the command by srun."
        )
    return environment[name]


def _number(environment: Mapping[str, str], name: str, default: str = "0") -> int:
    text = environment.get(name) or default
    if not text.isdecimal():
        raise ConfigurationError(f"{name}={text!r}: expected a number from 0.")
    return int(text)
