"""Counts network traffic and staleness of one worker's steps within an epoch."""

from __future__ import annotations

import dataclasses

from thinwire.script.steps import StepInfo


@dataclasses.dataclass
class EpochTraffic:
    """Sums of the bytes and the staleness of a worker's steps in an epoch.

    Attributes:
        bytes_up: Number of bytes that the worker sent to the shards, with framing.
        bytes_down: Number of bytes that the worker received from the shards, with framing.
        num_exchanges: Number of steps in the epoch that pushed an update.
        staleness: Sum of the staleness of all steps that pushed an update. The staleness of a step
            is the number of updates that were merged between the worker's pull and its push.
        largest_staleness: Largest staleness of one step, in updates: how many updates were merged
            between pull and push.
    """

    bytes_up: int = 0
    bytes_down: int = 0
    num_exchanges: int = 0
    staleness: int = 0
    largest_staleness: int = 0

    def add(self, step: StepInfo) -> None:
        """Add the bytes and the staleness of one step to the sums of the epoch."""
        self.bytes_up += step.bytes_up
        self.bytes_down += step.bytes_down
        if step.exchanged:
            self.num_exchanges += 1
            self.staleness += step.staleness
            self.largest_staleness = max(self.largest_staleness, step.staleness)
