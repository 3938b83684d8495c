"""Gradients that came after their step was closed, until the slot's next closing takes them in."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ops.routing.parsing import Arrivals

if TYPE_CHECKING:
    from ops.types import Float32, Int64


@dataclasses.dataclass
class Held:
    """What came late for one slot, already weighted."""

    size: int  # entries of the slot
    dense: Float32 | None = None  # [size] float32, made when something dense comes
    positions: list[Int64] = dataclasses.field(default_factory=list)  # of sparse values
    values: list[Float32] = dataclasses.field(default_factory=list)
    starts: list[Int64] = dataclasses.field(default_factory=list)  # of the datagrams
    num_datagrams: int = 0
    sum_of_ages: int = 0  # in steps

    def add(self, part: Arrivals, age: int, weight: float) -> None:
        """Take in datagrams of this slot."""
        values = part.values if weight == 1 else part.values * np.float32(weight)
        if part.positions is not None:
            self.positions.append(part.positions.ravel())
            self.values.append(np.array(values).ravel())
        else:
            if self.dense is None:
                self.dense = np.zeros(self.size, np.float32)
            windows = np.lib.stride_tricks.sliding_window_view(
                self.dense, values.shape[1], writeable=True
            )
            with np.errstate(over="ignore"):  # whoever takes the sum looks whether it is finite
                windows[part.offsets] += values
        self.starts.append(part.offsets)
        self.num_datagrams += len(part)
        self.sum_of_ages += age * len(part)


class Late:
    """The late datagrams of one worker for one shard.

    Source: Diff-Reception of Zhou et al., "DGT", Future Generation Computer Systems 121, 2021: a
    late block is added to the next iteration's. Differences: each counts once, up to an age, and
    may weigh less the older it is.
    """

    def __init__(self, sizes: Sequence[int], decay: float) -> None:
        """Begin with nothing; a block that is `age` steps late weighs ``decay ** age``."""
        self._sizes, self._decay = sizes, decay
        self._held: dict[int, Held] = {}

    def add(self, arrivals: Arrivals, age: int) -> None:
        """Keep datagrams; no two of them hold the same entries."""
        weight = self._decay**age
        for slot, part in arrivals.by_slot():
            held = self._held.setdefault(slot, Held(self._sizes[slot]))
            held.add(part, age, weight)

    def take(self, slot: int) -> Held | None:
        """Return what was kept for a slot, and forget it."""
        return self._held.pop(slot, None)

    def slots(self) -> list[int]:
        """Return the slots that something is kept for, ascending."""
        return sorted(self._held)
