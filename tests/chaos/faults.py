"""The faults, the nodes that each fault can hit, and seeded plans of faults.

Two harnesses use the faults: one simulates whole runs, the other starts real processes.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Iterable, Iterator

import numpy as np


class Fault(enum.Enum):
    """A fault; the value is its name in tables and on the command line."""

    #: kill -9 after a push was made and before it arrived: it is never sent, or never received.
    KILL_BEFORE_PUSH = "kill before push"
    #: kill -9 after a push was received (by a worker: sent) and before its reply was received.
    KILL_AFTER_PUSH = "kill after push"
    #: kill -9 while a snapshot (a worker: its checkpoint) is half written.
    KILL_IN_SNAPSHOT = "kill in snapshot"
    #: kill -9 while a record is half appended to the journal: the file ends in a torn record.
    KILL_IN_JOURNAL = "kill in journal"
    #: The process, or its link, is many times slower for a while, or stands still (SIGSTOP).
    SLOW = "slow"
    #: Its connections break, and none can be made for a while (either direction is cut off).
    CUT = "cut"
    #: A message arrives twice.
    DUPLICATED = "duplicated"
    #: A message arrives after one that was sent later.
    REORDERED = "reordered"
    #: Bytes of a message are changed on the way.
    GARBLED = "garbled"
    #: The peer vanishes silently: messages to it are dropped, and no connection breaks.
    HALF_OPEN = "half-open"
    #: The wall clock jumps; or, as time that passes unseen, the process wakes up much later.
    CLOCK_JUMP = "clock jump"
    #: Every write to its disk is refused (ENOSPC).
    DISK_FULL = "disk full"

    @property
    def kills(self) -> bool:
        """True if the fault kills the victim, which must be restarted."""
        return self in _KILLS


_KILLS = (
    Fault.KILL_BEFORE_PUSH,
    Fault.KILL_AFTER_PUSH,
    Fault.KILL_IN_SNAPSHOT,
    Fault.KILL_IN_JOURNAL,
)


class Victim(enum.Enum):
    """Whom a fault befalls."""

    SHARD_0 = "shard 0"  # the coordinator
    OTHER_SHARD = "another shard"
    WORKER = "worker"
    SUPERVISOR = "Supervisor"


#: Pairs that cannot be, and why.
IMPOSSIBLE: dict[tuple[Fault, Victim], str] = {
    (Fault.KILL_IN_JOURNAL, Victim.WORKER): "only shards keep a journal",
    (Fault.KILL_IN_JOURNAL, Victim.SUPERVISOR): "only shards keep a journal",
    (Fault.KILL_IN_SNAPSHOT, Victim.SUPERVISOR): "it has no state to come back to",
    (Fault.KILL_AFTER_PUSH, Victim.SUPERVISOR): "it pushes nothing and nobody pushes to it",
    (Fault.DUPLICATED, Victim.SUPERVISOR): "its messages travel inside one TCP stream only, and "
    "it repeats none on another",
    (Fault.REORDERED, Victim.SUPERVISOR): "its messages travel inside one TCP stream only",
}

#: Pairs that can, in the order of their definition.
POSSIBLE: tuple[tuple[Fault, Victim], ...] = tuple(
    pair for pair in itertools.product(Fault, Victim) if pair not in IMPOSSIBLE
)


@dataclasses.dataclass(frozen=True)
class Plan:
    """One fault in one run."""

    fault: Fault
    victim: Victim
    #: Time of the fault as a fraction of the undisturbed run (seconds or updates), in [0, 1).
    instant: float
    #: Seed of the harness's further draws: which worker, how long, which byte.
    seed: int

    def __str__(self) -> str:
        """Return it for messages."""
        return f"{self.fault.value} / {self.victim.value} at {self.instant:.4f} (seed {self.seed})"

    def rng(self) -> np.random.Generator:
        """Return where further draws come from, always from the start."""
        return np.random.default_rng([_ENTROPY, self.seed])


_ENTROPY = 47
_EARLIEST, _LATEST = 0.02, 0.95  # later, a run may be over before it is struck


def plans(
    seed: int, count: int, pairs: Iterable[tuple[Fault, Victim]] = POSSIBLE
) -> Iterator[Plan]:
    """Return `count` plans that cycle through the pairs, at random instants.

    Plan number n of a seed is always the same, however many follow.

    >>> one, two = plans(7, 2), plans(7, 3)
    >>> [next(one) == next(two) for _ in range(2)]
    [True, True]
    """
    rng = np.random.default_rng([_ENTROPY, seed])
    turn = itertools.cycle(tuple(pairs))
    for _ in range(count):
        fault, victim = next(turn)
        instant = float(rng.uniform(_EARLIEST, _LATEST))
        yield Plan(fault, victim, instant, int(rng.integers(1 << 31)))
