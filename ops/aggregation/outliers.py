"""Guards against faulty devices: how large an update may be, and which workers are quarantined.

State is plain data, owned by the caller. Nothing here knows of methods: a guard looks at the size
of what arrives, whatever it means.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import TYPE_CHECKING

from thinwire.ops.types import ConfigurationError, State

if TYPE_CHECKING:
    from thinwire.ops.types import Float32

#: Newest accepted norms that the median is of, and newest accepted peaks ...
WINDOW = 128
#: ... and how many it takes before an update is compared with them.
LEAST_NORMS = 16
#: Before that an update's largest magnitude may be this: float32 still holds its square.
_FIRST_PEAK = 1e18
_CHUNK = 1 << 15  # entries squared at a time


@dataclasses.dataclass(frozen=True)
class Guards:
    """What a shard refuses besides values that are not finite.

    Only what no honest update looks like is refused by default.

    Attributes:
        update_peak_factor: P: an update whose largest magnitude exceeds P times that of the newest
            accepted ones of all workers, or P if that is more, is refused; 0: none is.
        max_update_norm: An update of a larger L2 norm is refused; 0: none is.
        update_norm_factor: F: what exceeds F times the median of the newest accepted norms of all
            workers is refused, once there are LEAST_NORMS of them; 0: nothing is.
        quarantine_after: N: after this many offences within `quarantine_seconds` a worker is
            quarantined; 0: none is.
        quarantine_seconds: How long for the first time; each further time doubles it.
    """

    update_peak_factor: float = 1e6
    max_update_norm: float = 0.0
    update_norm_factor: float = 0.0
    quarantine_after: int = 0
    quarantine_seconds: float = 60.0

    def __post_init__(self) -> None:
        """Refuse values that cannot work, or have no effect."""
        if not 0 <= self.max_update_norm < math.inf:
            raise ConfigurationError(
                f"--max_update_norm={self.max_update_norm}: expected a finite norm; 0 is off."
            )
        if not (self.update_peak_factor == 0 or 1 < self.update_peak_factor < math.inf):
            raise ConfigurationError(
                f"--update_peak_factor={self.update_peak_factor}: expected a number above 1, such "
                "as 1e6; 0 is off."
            )
        factor = self.update_norm_factor
        if not (factor == 0 or 1 < factor < math.inf):
            raise ConfigurationError(
                f"--update_norm_factor={factor}: expected a number above 1, for half of all honest "
                "updates are larger than their median; 0 is off."
            )
        if self.quarantine_after < 0:
            raise ConfigurationError(
                f"--quarantine_after={self.quarantine_after}: expected 1 or more; 0 is off."
            )
        if not 0 < self.quarantine_seconds < math.inf:
            raise ConfigurationError(
                f"--quarantine_seconds={self.quarantine_seconds}: expected seconds above 0."
            )
        usual = Guards.quarantine_seconds
        if not self.quarantine_after and self.quarantine_seconds != usual:
            raise ConfigurationError(
                f"--quarantine_seconds={self.quarantine_seconds:g} without --quarantine_after: "
                "no worker is ever quarantined; give both, or leave it out."
            )

    @property
    def measures(self) -> bool:
        """Whether the norms of updates are looked at."""
        return self.max_update_norm > 0 or self.update_norm_factor > 0

    @property
    def active(self) -> bool:
        """Whether the user guards against anything besides values that are not finite."""
        return self.measures or self.quarantine_after > 0

    def init(self) -> State:
        """Return the state of a run's start."""
        # Of the newest accepted updates, oldest first; at most WINDOW each.
        return {"norms": [], "peaks": []}

    def record(self, norm: float, state: State) -> State:
        """Record the norm of an update that was applied."""
        norms = [*state["norms"], norm][-WINDOW:]
        return state | {"norms": norms}

    def record_peak(self, peak: float, state: State) -> State:
        """Record the largest magnitude of an update that was accepted."""
        return state | {"peaks": [*state["peaks"], peak][-WINDOW:]}

    def peak_limit(self, state: State) -> tuple[float, str]:
        """Return the largest magnitude accepted now, and for people where it comes from."""
        peaks, factor = state["peaks"], self.update_peak_factor
        if not factor:
            return math.inf, ""
        if len(peaks) < LEAST_NORMS:
            return _FIRST_PEAK, f"--update_peak_factor={factor:g}, among the first updates"
        largest = max(1.0, *peaks)
        return factor * largest, f"--update_peak_factor={factor:g} times {largest:.4g}"

    def median(self, state: State) -> float | None:
        """Return the median of the newest accepted norms; None before there are any."""
        return statistics.median(state["norms"]) if state["norms"] else None

    def limit(self, state: State) -> tuple[float, str]:
        """Return the largest norm accepted now, and for people where it comes from."""
        limits = [(math.inf, "")]
        if self.max_update_norm:
            limits.append((self.max_update_norm, f"--max_update_norm={self.max_update_norm:g}"))
        if self.update_norm_factor and len(state["norms"]) >= LEAST_NORMS:
            median, factor = statistics.median(state["norms"]), self.update_norm_factor
            if median > 0:
                text = f"--update_norm_factor={factor:g} times the median {median:.4g}"
                limits.append((factor * median, text))
        return min(limits)

    def term_seconds(self, times_before: int) -> float:
        """Return how long a worker is quarantined that has been quarantined this often before."""
        return self.quarantine_seconds * 2.0 ** min(times_before, 20)


def norm_of(values: Float32) -> float:
    """Return the L2 norm of [k] finite float32.

    Summed in float64 and in one order, whatever the number of threads: what was refused once is
    refused again where the same events are played again.
    """
    import numpy as np

    total = 0.0
    for start in range(0, len(values), _CHUNK):
        part = values[start : start + _CHUNK].astype(np.float64)
        total += float(np.add.reduce(np.square(part, out=part)))
    return math.sqrt(total)
