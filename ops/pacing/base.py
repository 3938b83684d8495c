"""Interface of pacers, which decide after a local step if a worker pushes or steps again.

A pacer does not read the clock; callers pass times as numbers. Each worker has a pacer, and calls
the pacer after every local step. A pacer that queries a state server also runs in shard server 0,
which stores the pacer's records of the workers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from thinwire.ops.policy import Policy
from thinwire.ops.types import Kind, State


class Pacer(Policy, Protocol):
    """Policy that decides after which local step a worker pushes."""

    @property
    def kind(self) -> Kind:
        """Kind of the pushed updates: gradients, or changes of weights."""

    @property
    def queries(self) -> bool:
        """True if workers query the state server before each step but the first after a push."""

    @property
    def waits_for_answer(self) -> bool:
        """True if a worker stops computing until the state server has answered its query."""

    @property
    def longest_round(self) -> int:
        """Largest number of local steps that a worker takes between two pushes; 0: no limit."""

    @property
    def local_epochs(self) -> int:
        """Passes over a worker's examples between two pushes; 0 if a push may follow any step."""

    def push_now(self, local_steps: int) -> bool:
        """Return True if the worker must push after `local_steps` steps since the last exchange."""


@dataclasses.dataclass(frozen=True)
class PaceReport:
    """A worker's report to the state server, sent with a query or at the start of a local round."""

    worker: int
    local_steps: int  # number of local steps in this round so far; 0 at the round's start
    step_seconds: float  # duration of the last local step, in seconds
    finished_at: float  # time at which the last local step ended, in seconds by shard 0's clock
    # Round-trip time of the worker's last query to the state server, in seconds; 0 before the first
    # query.
    query_seconds: float = 0.0


@runtime_checkable
class QueryingPacer(Pacer, Protocol):
    """A pacer with which workers query a state server (shard 0) whether they must push.

    The argument `state` of a pacer's methods holds the state server's records of the workers. The
    state server does not save its records of the workers; after a restart it rebuilds them from the
    workers' reports.
    """

    @property
    def summary_name(self) -> str:
        """Key of the pacer's results in the run's summary.json."""

    def init(self) -> State:
        """Return the state server's initial records, which contain no worker."""

    def record(self, report: PaceReport, state: State) -> State:
        """Record a worker's report; return the state server's new records."""

    def answer(
        self, worker: int, members: Sequence[int], now: float, state: State
    ) -> tuple[bool, State]:
        """Return True if the querying worker must push now, and the state server's new records.

        Args:
            worker: Number of the querying worker, whose report is already recorded.
            members: Ids of the live workers (workers for which rounds wait) of the querying
                worker's group, ascending. While the querying worker waits to become live, `members`
                is empty or lacks its id.
            now: Current time in seconds, by the same clock as `PaceReport.finished_at`.
            state: The state server's records of the workers.
        """

    def pushed(self, worker: int, state: State) -> State:
        """Record that a worker has pushed, whether its query was answered or not."""

    def released(self, workers: Sequence[int], state: State) -> State:
        """Begin a new round of local steps for `workers`, who have not reported in it yet."""

    def left(self, worker: int, state: State) -> State:
        """Delete the state server's records of a worker that left the run."""

    def summary(self, state: State) -> State:
        """Return the pacer's results for the run's summary.json."""
