"""What a shard's core is told, and what it knows of each worker."""

from __future__ import annotations

import dataclasses

from thinwire.ops.aggregation.outliers import Guards
from thinwire.ops.optimizers.schedule import Budget, Schedule
from thinwire.ps.core import events


@dataclasses.dataclass(frozen=True)
class CoreConfig:
    """What a shard needs to know besides its method."""

    budget: Budget
    schedule: Schedule
    nb_workers: int
    generation: int = 0
    generations_undone: int = 1  # before it, whose last updates may be lost
    max_seconds: float | None = None  # from the first pull
    start_timeout_seconds: float = 600.0  # then a synchronous run starts with those present
    snapshot_interval_seconds: float = 10.0
    offsets: tuple[int, ...] = ()  # where each slice begins in the shard; none: it is one slice
    guards: Guards = dataclasses.field(default_factory=Guards)


@dataclasses.dataclass
class Member:
    """What the shard knows of one worker, live or not."""

    incarnation: int = 0
    last_step: int = 0  # newest step taken in (applied, or waiting in its round)
    base_version: int = 0  # what the worker was last handed
    oldest_base: int = 0  # what its next push may have been computed at
    push_bytes: int = 0  # of its newest push, coded
    early: events.Push | None = None  # arrived before the worker became live here
    pending: events.Push | None = None  # waits for its group
    question: tuple[int, int | None] | None = None  # (step or 0 for a pull, base version)
    free: bool = False  # an open question may be answered
    asked_at: float = 0.0  # when the question came
    staleness: int = 0  # of its newest applied push
