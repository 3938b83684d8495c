"""The outcome of a simulated run."""

from __future__ import annotations

import dataclasses

from tests.chaos.checker import Violation
from tests.chaos.faults import Plan
from tests.chaos.history import Ended, History, Life, Took
from tests.chaos.simulated_run import Case


@dataclasses.dataclass
class Outcome:
    """The outcome of a run."""

    case: Case
    plans: tuple[Plan, ...]
    struck: bool = False  # by every fault
    violations: tuple[Violation, ...] = ()
    reason: str = ""
    seconds: float = 0.0  # virtual
    history: History = dataclasses.field(default_factory=History)

    @property
    def error(self) -> str:
        """The checks that the run failed, one line for each."""
        return "\n".join(map(str, self.violations))

    @property
    def lost_updates(self) -> int:
        """Number of lost updates, as counted by all shards."""
        return sum(end.lost_updates for end in self.history.of(Ended))

    @property
    def restarts(self) -> int:
        """Number of restarts of shards."""
        return len(list(self.history.of(Life))) - len(self.history.shards)

    @property
    def models(self) -> int:
        """How often a worker's model was compared with the shard's copy of the worker's model."""
        return len(list(self.history.of(Took)))
