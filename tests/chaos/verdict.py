"""The result of a run's checks."""

from __future__ import annotations

import dataclasses

from tests.chaos.checker import Violation
from tests.chaos.history import Acknowledged, History


@dataclasses.dataclass(frozen=True)
class Verdict:
    """The result of a trial."""

    violations: tuple[Violation, ...]
    history: History

    @property
    def promises(self) -> frozenset[str]:
        """Names of those that are broken."""
        return frozenset(each.promise for each in self.violations)

    @property
    def num_acknowledged(self) -> int:
        """How many pushes and pulls were answered."""
        return len(list(self.history.of(Acknowledged)))
