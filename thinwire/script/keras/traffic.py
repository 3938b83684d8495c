"""Traffic of one worker's steps within an epoch."""

from __future__ import annotations

import dataclasses

from thinwire.script.session import StepInfo


@dataclasses.dataclass
class EpochTraffic:
    """Sums over the steps of an epoch.

    Attributes:
        bytes_up: Bytes sent to the shards, framing included.
        bytes_down: Bytes received from the shards, framing included.
        num_exchanges: Number of steps that pushed an update.
        staleness: Sum of the staleness of all steps that pushed. The staleness of a step is the
            number of updates by which the model had changed when the step's push was merged.
        largest_staleness: Largest staleness of one step.
    """

    bytes_up: int = 0
    bytes_down: int = 0
    num_exchanges: int = 0
    staleness: int = 0
    largest_staleness: int = 0

    def add(self, step: StepInfo) -> None:
        """Add the traffic of one step to the sums."""
        self.bytes_up += step.bytes_up
        self.bytes_down += step.bytes_down
        if step.exchanged:
            self.num_exchanges += 1
            self.staleness += step.staleness
            self.largest_staleness = max(self.largest_staleness, step.staleness)
