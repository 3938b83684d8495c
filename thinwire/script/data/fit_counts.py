"""Counts a script's calls of `fit`, over all its models, and its uses of data sets.

All workers shuffle data in the same order, which the run's seed determines. A script that calls
`fit` once for each epoch must get a new order of its data in each call, so the seed of the order
contains the number of the call of `fit`. Each script process counts its own calls of `fit`. A
restarted worker repeats the script's calls of `fit`, including calls that it skips, so it counts
them as before the restart.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import numpy as np

_NUM_SEEDS = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class FitNumber:
    """Numbers that locate a call of `fit` among all calls of `fit` in its script.

    Attributes:
        before: Number of calls of `fit` that the script has made before this call of `fit`.
        before_data: Number of the script's calls of `fit` before the first call on the same data
            set object. An equal data set that the script creates later is a different object.
        uses: Number of calls of `fit` that the script has made on the same data set object before
            this call of `fit`.
    """

    before: int = 0
    before_data: int = 0
    uses: int = 0


class FitCounts:
    """Counters of one script's calls of `fit` and of its uses of data sets."""

    def __init__(self) -> None:
        self.num_fits = 0
        # maps id(data set) to the counts of its uses
        self._data: dict[int, tuple[weakref.ref[Any], int, int]] = {}

    def begin_fit(self, data: Any) -> FitNumber:
        """Count a call of `fit` with the data set `data`; return its position among all calls."""
        number = self.use(data)
        self.num_fits += 1
        return number

    def use(self, data: Any) -> FitNumber:
        """Count a use of a data set outside of `fit`; return its position among all uses."""
        known = self._data.get(id(data))
        if known is None or known[0]() is not data:
            known = None
        before_data, uses = (self.num_fits, 0) if known is None else known[1:]
        try:
            self._data[id(data)] = weakref.ref(data), before_data, uses + 1
        # a data set of a type such as list allows no weak reference and is not counted
        except TypeError:
            before_data = self.num_fits
        return FitNumber(self.num_fits, before_data, uses)


def mixed_seed(seed: int, *numbers: int) -> int:
    """Return a seed that depends on `seed` and some numbers; `seed` itself if all numbers are 0.

    >>> mixed_seed(7), mixed_seed(7, 0, 0), mixed_seed(7, 1) == mixed_seed(7, 2)
    (7, 7, False)
    """
    if not any(numbers):
        return seed
    sequence = np.random.SeedSequence([seed % (1 << 64), *numbers])
    return int(sequence.generate_state(1)[0]) % _NUM_SEEDS
