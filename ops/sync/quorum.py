"""Quorum: a round ends when K of n workers have pushed and a grace period is over.

Source: "Decoupled DiLoCo", arXiv 2604.21428, whose grace period ends at a multiple of the step
time; here the period is a fixed number of seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from thinwire.ops.options import integer, number
from thinwire.ops.policy import setting
from thinwire.ops.sync.base import Ready, RoundsView, SyncRule
from thinwire.ops.sync.groups import Groups
from thinwire.ops.types import ConfigurationError


@dataclasses.dataclass(frozen=True)
class Quorum(SyncRule):
    """Rule that releases a round `grace` seconds after `quorum` pushes of the round arrived.

    A round with a push of every live worker is released without a grace period. A push that arrives
    after the release of its round is merged into the next round, so no push is lost.

    Attributes:
        groups: One worker group with all workers of the run.
        quorum: K, the number of pushes that a round needs; None for more than half of the workers.
        grace: Time in seconds between the arrival of push K and the release of the round.
    """

    groups: Groups
    quorum: int | None = setting(
        integer(
            "quorum",
            None,
            "Number of pushes that a round of --sync=quorum needs before it may end.",
            "pushes",
            low=1,
            unset="more than half of the workers",
        )
    )
    grace: float = setting(
        number(
            "quorum_grace_seconds",
            0.0,
            "Time that a round of --sync=quorum waits for further pushes after --quorum pushes.",
            "seconds",
            low=0.0,
        )
    )

    def __post_init__(self) -> None:
        """Raise an error if the workers are not one group, or are fewer than the quorum."""
        super().__post_init__()
        if len(self.groups) != 1 or self._needed > len(self.groups[0]):
            raise ConfigurationError(
                f"--quorum={self._needed}: expected 1 to {len(self.groups[0])} pushes of one group "
                "of workers (--nb_workers)."
            )

    @property
    def _needed(self) -> int:
        return len(self.groups[0]) // 2 + 1 if self.quorum is None else self.quorum

    @property
    def sizes(self) -> Sequence[int]:
        """Least number of workers whose pushes a round merges, if all workers are live."""
        return [self._needed]

    def ready(self, rounds: RoundsView, now: float) -> Ready:
        """Return the waiting pushes if all have arrived, or if the grace period is over."""
        waiting = rounds.oldest(rounds.live())
        if rounds.is_complete(0):
            return Ready([waiting])
        if len(waiting) < self._needed:
            return Ready()
        due = sorted(map(rounds.arrived_at, waiting))[self._needed - 1] + self.grace
        return Ready([waiting]) if now >= due else Ready(look_again_at=due)
