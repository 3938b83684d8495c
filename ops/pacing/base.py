"""The interface of pacers: push now, or take one more local step?

Pacers are clock-free: only numbers go in. Each worker holds one, and consults it after every local
step. One that queries a state server also lives in shard 0's core, which keeps its records.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from thinwire.ops.types import Kind, Policy, State


class Pacer(Policy, Protocol):
    """When a worker pushes."""

    @property
    def kind(self) -> Kind:
        """What its updates mean: gradients, or changes of weights."""

    @property
    def queries(self) -> bool:
        """Whether workers query the state server before a further local step."""

    @property
    def waits_for_answer(self) -> bool:
        """Whether a worker stands still until the state server has answered."""

    @property
    def longest_round(self) -> int:
        """The most local steps of a round; 0 is no limit."""

    @property
    def local_epochs(self) -> int:
        """Passes over a worker's examples that make a round; 0: it does not count them."""

    def push_now(self, local_steps: int) -> bool:
        """Return whether `local_steps` since the last exchange are enough."""


@dataclasses.dataclass(frozen=True)
class PaceReport:
    """What a worker reports with a query, or when it begins a round (local_steps 0)."""

    worker: int
    local_steps: int  # done in this round
    step_seconds: float  # the last one's duration
    finished_at: float  # when it ended, by shard 0's clock
    query_seconds: float = 0.0  # round trip of the worker's last query; 0 if none yet


@runtime_checkable
class QueryingPacer(Pacer, Protocol):
    """A pacer with a state server, whose records are in `state`: soft, rebuilt from reports."""

    @property
    def summary_name(self) -> str:
        """Name of its block in summary.json."""

    def init(self) -> State:
        """Return the records of an empty cluster."""

    def record(self, report: PaceReport, state: State) -> State:
        """Record what a worker reports of itself."""

    def answer(
        self, worker: int, members: Sequence[int], now: float, state: State
    ) -> tuple[bool, State]:
        """Return whether a worker that has reported is to push now.

        Args:
            worker: Whose query it is; its report is recorded.
            members: Live workers of its group, ascending; none, or without this one, while it
                waits to become live.
            now: By the clock of `PaceReport.finished_at`.
            state: The records.
        """

    def pushed(self, worker: int, state: State) -> State:
        """Record a push, whether or not the state server had answered the worker."""

    def released(self, workers: Sequence[int], state: State) -> State:
        """Begin a new round for these: their records wait for the first report of it."""

    def left(self, worker: int, state: State) -> State:
        """Forget a worker."""

    def summary(self, state: State) -> State:
        """Return the state server's block of the run's summary."""
