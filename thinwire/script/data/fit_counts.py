"""How often a script has called `fit`, over all its models, and on which data sets.

All workers shuffle alike, from the run's seed. A script that calls `fit` once for each epoch must
not get the same order each time, so the number of the `fit` goes into the seed. It is counted in
the script itself: a worker that is started again makes the same calls, also of fits that it passes
over, and comes to the same numbers.
"""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import numpy as np

_NUM_SEEDS = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class FitNumber:
    """Where a `fit` stands among those of its script.

    Attributes:
        before: Fits before this one.
        before_data: Fits before the first one on the same data set. Another object, made in the
            same way, has another number.
        uses: Fits on the same data set before this one.
    """

    before: int = 0
    before_data: int = 0
    uses: int = 0


class FitCounts:
    """The counts of one script."""

    def __init__(self) -> None:
        self.num_fits = 0
        self._data: dict[int, tuple[weakref.ref[Any], int, int]] = {}  # by identity

    def begin_fit(self, data: Any) -> FitNumber:
        """Count a `fit` on some data, given as its x; return its number."""
        number = self.use(data)
        self.num_fits += 1
        return number

    def use(self, data: Any) -> FitNumber:
        """Count a use of some data; return its number."""
        known = self._data.get(id(data))
        if known is None or known[0]() is not data:
            known = None
        before_data, uses = (self.num_fits, 0) if known is None else known[1:]
        try:
            self._data[id(data)] = weakref.ref(data), before_data, uses + 1
        except TypeError:  # a list or the like, which nothing is counted for
            before_data = self.num_fits
        return FitNumber(self.num_fits, before_data, uses)


def mixed_seed(seed: int, *numbers: int) -> int:
    """Return a seed made of another and of numbers; the same one, where these are all 0.

    >>> mixed_seed(7), mixed_seed(7, 0, 0), mixed_seed(7, 1) == mixed_seed(7, 2)
    (7, 7, False)
    """
    if not any(numbers):
        return seed
    sequence = np.random.SeedSequence([seed % (1 << 64), *numbers])
    return int(sequence.generate_state(1)[0]) % _NUM_SEEDS
