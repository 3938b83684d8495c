"""Counters of a script's calls of `fit`, over all its models, and of the data sets used.

All workers shuffle alike, from the run's seed. A script that calls `fit` once for each epoch must
not get the same order each time, so the number of the `fit` is mixed into the seed. Each script
process counts its own calls. A restarted worker makes the same calls again, including fits that it
skips, and so arrives at the same numbers.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import numpy as np

_NUM_SEEDS = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class FitNumber:
    """Position of a `fit` among all calls of `fit` in its script.

    Attributes:
        before: Number of fits before this one.
        before_data: Number of fits before the first fit on the same data set object. An equal data
            set made again is a different object.
        uses: Number of fits on the same data set object before this one.
    """

    before: int = 0
    before_data: int = 0
    uses: int = 0


class FitCounts:
    """Counters of one script."""

    def __init__(self) -> None:
        self.num_fits = 0
        self._data: dict[int, tuple[weakref.ref[Any], int, int]] = {}  # by id(data)

    def begin_fit(self, data: Any) -> FitNumber:
        """Count a `fit` whose x is `data`; return the number of the `fit`."""
        number = self.use(data)
        self.num_fits += 1
        return number

    def use(self, data: Any) -> FitNumber:
        """Count a use of `data` without a `fit`; return the number of the use."""
        known = self._data.get(id(data))
        if known is None or known[0]() is not data:
            known = None
        before_data, uses = (self.num_fits, 0) if known is None else known[1:]
        try:
            self._data[id(data)] = weakref.ref(data), before_data, uses + 1
        except TypeError:  # a list or another object without weak references is not counted
            before_data = self.num_fits
        return FitNumber(self.num_fits, before_data, uses)


def mixed_seed(seed: int, *numbers: int) -> int:
    """Return a seed mixed from a seed and some numbers; `seed` itself if all numbers are 0.

    >>> mixed_seed(7), mixed_seed(7, 0, 0), mixed_seed(7, 1) == mixed_seed(7, 2)
    (7, 7, False)
    """
    if not any(numbers):
        return seed
    sequence = np.random.SeedSequence([seed % (1 << 64), *numbers])
    return int(sequence.generate_state(1)[0]) % _NUM_SEEDS
