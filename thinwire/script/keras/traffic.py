"""What a worker's steps of one epoch have sent and received."""

from __future__ import annotations

import dataclasses

from thinwire.script.session import StepInfo


@dataclasses.dataclass
class EpochTraffic:
    """Sums over the steps of an epoch.

    Attributes:
        bytes_up: On the wire to the shards, framing included.
        bytes_down: From them.
        num_exchanges: Steps that pushed an update.
        staleness: The sum, over them, of the updates that the model had moved on by.
        largest_staleness: Of one of them.
    """

    bytes_up: int = 0
    bytes_down: int = 0
    num_exchanges: int = 0
    staleness: int = 0
    largest_staleness: int = 0

    def add(self, step: StepInfo) -> None:
        """Add one step."""
        self.bytes_up += step.bytes_up
        self.bytes_down += step.bytes_down
        if step.exchanged:
            self.num_exchanges += 1
            self.staleness += step.staleness
            self.largest_staleness = max(self.largest_staleness, step.staleness)
