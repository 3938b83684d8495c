"""Interface of pacers, which decide after a local step whether to push or to step again.

A pacer does not read the clock; callers pass times as numbers. Each worker has a pacer and calls it
after every local step. A pacer that queries a state server also runs in shard server 0, which
stores the pacer's records of the workers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from thinwire.ops.types import Kind, Policy, State


class Pacer(Policy, Protocol):
    """Policy that decides after which local step a worker pushes."""

    @property
    def kind(self) -> Kind:
        """Kind of the pushed updates: gradients, or changes of weights."""

    @property
    def queries(self) -> bool:
        """True if workers query the state server before each local step after a round's first."""

    @property
    def waits_for_answer(self) -> bool:
        """True if a worker stops computing until the state server has answered its query."""

    @property
    def longest_round(self) -> int:
        """Largest number of local steps that a worker takes in a round; 0 means no limit."""

    @property
    def local_epochs(self) -> int:
        """Number of passes over a worker's examples in a round; 0 if rounds have no full passes."""

    def push_now(self, local_steps: int) -> bool:
        """Return True if the worker must push after `local_steps` steps since the last exchange."""


@dataclasses.dataclass(frozen=True)
class PaceReport:
    """A worker's report to the state server, sent with a query or at a round's start."""

    worker: int
    local_steps: int  # number of local steps in this round so far; 0 at the round's start
    step_seconds: float  # duration of the last local step, in seconds
    finished_at: float  # time at which the last local step ended, in seconds by shard 0's clock
    # Round-trip time of the worker's last query to the state server, in seconds; 0 before the first
    # query.
    query_seconds: float = 0.0


@runtime_checkable
class QueryingPacer(Pacer, Protocol):
    """A pacer in which workers query a state server (shard 0) whether they must push.

    The argument `state` of a pacer's methods holds the state server's records of the workers. The
    state server's records of the workers are not saved; after a restart they are rebuilt from the
    workers' reports.
    """

    @property
    def summary_name(self) -> str:
        """Name of the pacer's block in the run's summary.json."""

    def init(self) -> State:
        """Return the state server's empty records, for a cluster without workers."""

    def record(self, report: PaceReport, state: State) -> State:
        """Record a worker's report; return the state server's new records."""

    def answer(
        self, worker: int, members: Sequence[int], now: float, state: State
    ) -> tuple[bool, State]:
        """Return True if the querying worker must push now, and the state server's new records.

        Args:
            worker: Number of the querying worker; its report is already recorded.
            members: Live workers of the querying worker's group, ascending. While the worker waits
                to become live, the list is empty or lacks this worker.
            now: Current time, by the clock of `PaceReport.finished_at`, in seconds.
            state: The state server's records of the workers.
        """

    def pushed(self, worker: int, state: State) -> State:
        """Record that a worker has pushed, with or without an answer to its query."""

    def released(self, workers: Sequence[int], state: State) -> State:
        """Begin a new round for `workers`, whose records then wait for the round's first report."""

    def left(self, worker: int, state: State) -> State:
        """Delete the state server's records of a worker that left the run."""

    def summary(self, state: State) -> State:
        """Return the content of the pacer's block in the run's summary."""
