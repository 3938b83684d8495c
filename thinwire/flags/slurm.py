"""Reads the Slurm step of this process from the environment; maps Slurm tasks to nodes.

``srun thinwire run train.py`` starts one launcher process for every task. The Slurm task of rank r
starts worker r + 1. The Slurm task of rank 0 also starts the Supervisor. The first Slurm task of
each host also starts PS shards, such that shard s runs on host s modulo the number of hosts. With
this rule, every Slurm task can compute the addresses of all PS shards from Slurm's variables.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping

from thinwire.ops.types import ConfigurationError

#: Range of PS ports, 20000 to 31999: below the ephemeral ports of Linux (from 32768), and above the
#: ports of most services. A Slurm step gets 16 consecutive ports of this range.
_FIRST_PORT, _NUM_PORTS, _PORTS_OF_STEP = 20000, 12000, 16
_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")
_BRACKETS = re.compile(r"\[([^\]]*)\]")
_OUTER_COMMA = re.compile(r",(?![^\[]*\])")


@dataclasses.dataclass(frozen=True)
class SlurmStep:
    """A Slurm step of several tasks, and the position of this process in the step.

    Attributes:
        rank: Rank of this process's task in the Slurm step, from 0.
        host: Index of the host of this Slurm task in the list `hosts`.
        rank_on_host: Rank of this Slurm task among the step's tasks on the same host, from 0.
        hosts: Names of the hosts on which the tasks of the Slurm step run.
        tasks: Number of tasks of the Slurm step on each host, in the order of `hosts`.
        first_port: TCP port of PS shard 0.
        cpus_of_task: Number of CPUs that Slurm gives the task of this process.
    """

    rank: int
    host: int
    rank_on_host: int
    hosts: tuple[str, ...]
    tasks: tuple[int, ...]
    first_port: int
    cpus_of_task: int

    @property
    def num_tasks(self) -> int:
        """Number of tasks in the Slurm step, which equals the run's number of workers."""
        return sum(self.tasks)

    @property
    def is_first(self) -> bool:
        """True for the Slurm task of rank 0, which does work that only one task may do."""
        return self.rank == 0

    def starts(self, role: str, number: int) -> bool:
        """Return True if this Slurm task starts the node with the given role and number."""
        if role == "Worker":
            return number == self.rank + 1
        if role == "PS":
            return self.rank_on_host == 0 and number % len(self.hosts) == self.host
        return self.is_first

    def addresses(self, nb_ps: int, first_port: int | None = None) -> tuple[str, ...]:
        """Return the address host:port of every PS shard, by shard id.

        Args:
            nb_ps: Number of PS shards of the run.
            first_port: Port of PS shard 0; None for `SlurmStep.first_port`.
        """
        hosts = self.hosts if len(self.hosts) > 1 else ("127.0.0.1",)
        first = first_port or self.first_port
        return tuple(f"{hosts[shard % len(hosts)]}:{first + shard}" for shard in range(nb_ps))


def step_of(environment: Mapping[str, str]) -> SlurmStep | None:
    """Return the Slurm step in which this process is a task.

    `step_of` returns None if srun has not started this process, or if the Slurm step has one task.
    A Slurm batch script also has a rank variable, although srun has not started the script.

    Raises:
        ConfigurationError: Slurm's environment variables contradict each other or cannot be parsed.
    """
    if environment.get("SLURM_STEP_NUM_TASKS", "1") == "1":
        return None
    hosts = expand_hosts(_text(environment, "SLURM_STEP_NODELIST"))
    tasks = _expand_counts(_text(environment, "SLURM_STEP_TASKS_PER_NODE"))
    rank, host = _number(environment, "SLURM_PROCID"), _number(environment, "SLURM_NODEID")
    count = _number(environment, "SLURM_STEP_NUM_TASKS")
    if not (len(hosts) == len(tasks) and sum(tasks) == count and host < len(hosts)):
        raise ConfigurationError(
            f"Slurm's variables contradict each other: SLURM_STEP_NUM_TASKS={count}, "
            f"SLURM_STEP_TASKS_PER_NODE={environment['SLURM_STEP_TASKS_PER_NODE']}, "
            f"SLURM_STEP_NODELIST={environment['SLURM_STEP_NODELIST']}, SLURM_NODEID={host}. "
            "Start the command with srun."
        )
    if rank >= count:
        raise ConfigurationError(
            f"Slurm's variable SLURM_PROCID={rank} in a step of {count} tasks; expected a rank "
            f"from 0 to {count - 1}. Start the command with srun."
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
    """Expand Slurm's compact list of hosts to host names, in the list's order.

    >>> expand_hosts("gpu[07-09,12],login1")
    ('gpu07', 'gpu08', 'gpu09', 'gpu12', 'login1')
    """
    hosts: list[str] = []
    for part in filter(None, _OUTER_COMMA.split(nodes.strip())):
        # `_BRACKETS.split` returns a text, a range of host numbers, a text, and so on.
        pieces = _BRACKETS.split(part)
        choices = [
            [piece] if even else list(_expand_ranges(piece))
            for even, piece in zip(itertools.cycle((True, False)), pieces, strict=False)
        ]
        hosts += ("".join(texts) for texts in itertools.product(*choices))
    return tuple(hosts)


def _expand_ranges(text: str) -> Iterator[str]:
    for part in text.split(","):
        first, _, last = part.partition("-")
        last = last or first
        if not (first.isdecimal() and last.isdecimal()):
            raise ConfigurationError(
                f"Slurm's list of hosts has the brackets [{text}], which hold no ranges of "
                "numbers; expected for example node[01-04,7]."
            )
        yield from (f"{number:0{len(first)}}" for number in range(int(first), int(last) + 1))


def _expand_counts(text: str) -> tuple[int, ...]:
    """Expand Slurm's counts like ``2(x3),1`` to the numbers of tasks on the hosts: 2, 2, 2, 1."""
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part)
        if match is None:
            raise ConfigurationError(
                f"SLURM_STEP_TASKS_PER_NODE={text!r}: expected numbers of tasks such as 2(x3),1."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def _port(environment: Mapping[str, str]) -> int:
    """Return PS shard 0's port: the first port that Slurm reserves, or a port by the job id."""
    if reserved := environment.get("SLURM_STEP_RESV_PORTS", ""):
        return int(next(_expand_ranges(reserved)))
    job, step = _number(environment, "SLURM_JOB_ID"), _number(environment, "SLURM_STEP_ID")
    return _FIRST_PORT + ((job * 4 + step % 4) * _PORTS_OF_STEP) % _NUM_PORTS


def _text(environment: Mapping[str, str], name: str) -> str:
    if not environment.get(name):
        raise ConfigurationError(
            f"SLURM_STEP_NUM_TASKS={environment['SLURM_STEP_NUM_TASKS']} is set but {name} is "
            "not; start the command with srun."
        )
    return environment[name]


def _number(environment: Mapping[str, str], name: str, default: str = "0") -> int:
    text = environment.get(name) or default
    if not text.isdecimal():
        raise ConfigurationError(f"Slurm's {name}={text!r}: expected a whole number from 0.")
    return int(text)
