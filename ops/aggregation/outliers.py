"""Guards against faulty workers: limits on the size of an update, and quarantine of workers.

The state of the guards against faulty workers is plain data that the calling shard server stores.
The guards against faulty workers do not depend on the training method: they check the magnitude and
the norm of each update.
"""

from __future__ import annotations

import dataclasses
import math
import statistics

from thinwire.ops.options import FlagRule, integer, number
from thinwire.ops.policy import Policy, setting
from thinwire.ops.types import ConfigurationError, Float32, State

#: Number of accepted updates whose norms and peaks (largest magnitudes) the guards remember.
WINDOW = 128
#: Fewest remembered norms or peaks (largest magnitudes) of earlier updates with which a new update
#: is compared.
LEAST_NORMS = 16
#: Largest magnitude in an update that is accepted while fewer than LEAST_NORMS peaks (largest
#: magnitudes) are known. The square of this magnitude is finite in float32.
_FIRST_PEAK = 1e18
_CHUNK = 1 << 15  # number of entries of an update that are squared at a time


_IS_FACTOR = FlagRule(lambda value: value == 0 or value > 1, "must be 0 (off) or above 1")


@dataclasses.dataclass(frozen=True)
class Guards(Policy):
    """Limits beyond which a shard server refuses an update or quarantines a worker.

    A shard server always refuses an update with values that are not finite. The default limits on
    updates refuse only updates that an honest worker never sends.

    Attributes:
        update_peak_factor: Factor P. A shard server refuses an update whose largest magnitude
            exceeds P times the largest magnitude in the newest accepted updates of all workers. The
            limit is at least P. 0: no limit.
        max_update_norm: Largest L2 norm of an update that a shard server accepts; 0: no limit.
        update_norm_factor: Factor F. A shard server refuses an update whose L2 norm exceeds F times
            the median of the newest accepted norms of all workers. The limit applies after
            LEAST_NORMS accepted norms. 0: no limit.
        quarantine_after: Number of a worker's refused updates within `quarantine_seconds` after
            which the worker is quarantined; 0: no quarantine.
        quarantine_seconds: Length of a worker's first quarantine, in seconds. Each further
            quarantine of the worker is twice as long.
    """

    update_peak_factor: float = setting(
        number(
            "update_peak_factor",
            1e6,
            "A shard rejects a push whose largest magnitude exceeds this factor times the largest "
            "magnitude of the newest accepted pushes (times 1, if that magnitude is smaller); 0: "
            "off.",
            "factor",
            low=0.0,
            rule=_IS_FACTOR,
        )
    )
    max_update_norm: float = setting(
        number(
            "max_update_norm",
            0.0,
            "Largest L2 norm of a shard's part of a push; the shard rejects a larger part; 0: off.",
            "L2 norm",
            low=0.0,
        ),
        shown=True,
    )
    update_norm_factor: float = setting(
        number(
            "update_norm_factor",
            0.0,
            "A shard rejects a push whose norm exceeds this factor times the median norm of the "
            "newest accepted pushes of all workers; 0: off.",
            "factor",
            low=0.0,
            rule=_IS_FACTOR,
        )
    )
    quarantine_after: int = setting(
        integer(
            "quarantine_after",
            0,
            "Number of bad pushes (not finite, too large or malformed) within --quarantine_seconds "
            "after which the PS quarantines a worker; 0: off.",
            "offences",
            low=0,
        )
    )
    quarantine_seconds: float = setting(
        number(
            "quarantine_seconds",
            60.0,
            "Length of a worker's first quarantine; each further quarantine of the worker is twice "
            "as long as the previous one.",
            "seconds",
            low=0.1,
        )
    )

    def __post_init__(self) -> None:
        """Raise an error if limits on workers' updates are out of range or have no effect."""
        super().__post_init__()
        default = Guards.quarantine_seconds
        if not self.quarantine_after and self.quarantine_seconds != default:
            raise ConfigurationError(
                f"--quarantine_seconds={self.quarantine_seconds:g} without --quarantine_after: no "
                "worker is ever quarantined. Give both flags, or leave --quarantine_seconds out."
            )

    @property
    def measures(self) -> bool:
        """True if a limit on the L2 norms of workers' updates is set."""
        return self.max_update_norm > 0 or self.update_norm_factor > 0

    @property
    def active(self) -> bool:
        """True if the user has set a limit on norms of updates, or a quarantine of workers."""
        return self.measures or self.quarantine_after > 0

    def init(self) -> State:
        """Return the initial state of the guards, which limit workers' updates."""
        # Norms and peaks (largest magnitudes) of the newest accepted updates, oldest first; at most
        # WINDOW of each.
        return {"norms": [], "peaks": []}

    def record(self, norm: float, state: State) -> State:
        """Record the L2 norm of a worker's applied update; return the new state of the guards."""
        norms = [*state["norms"], norm][-WINDOW:]
        return state | {"norms": norms}

    def record_peak(self, peak: float, state: State) -> State:
        """Record the largest magnitude in a worker's accepted update; return the new state."""
        return state | {"peaks": [*state["peaks"], peak][-WINDOW:]}

    def peak_limit(self, state: State) -> tuple[float, str]:
        """Return the largest accepted magnitude in an update, and a text that explains it."""
        peaks, factor = state["peaks"], self.update_peak_factor
        if not factor:
            return math.inf, ""
        if len(peaks) < LEAST_NORMS:
            return _FIRST_PEAK, f"--update_peak_factor={factor:g}, among the first updates"
        largest = max(1.0, *peaks)
        return factor * largest, f"--update_peak_factor={factor:g} times {largest:.4g}"

    def median(self, state: State) -> float | None:
        """Return the median L2 norm of the newest applied updates; None before the first one."""
        return statistics.median(state["norms"]) if state["norms"] else None

    def limit(self, state: State) -> tuple[float, str]:
        """Return the largest L2 norm accepted for an update, and a text that explains the limit."""
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
        """Return how many seconds a worker's quarantine lasts after `times_before` earlier ones."""
        return self.quarantine_seconds * 2.0 ** min(times_before, 20)


def norm_of(values: Float32) -> float:
    """Return the L2 norm of [k] finite float32 values of an update.

    The sum of squares in the L2 norm is float64 and has a fixed order, which does not depend on the
    number of threads. Because the sum of squares has a fixed order, a replay of recorded updates
    refuses the updates that the recorded run refused.
    """
    import numpy as np

    total = 0.0
    for start in range(0, len(values), _CHUNK):
        part = values[start : start + _CHUNK].astype(np.float64)
        total += float(np.add.reduce(np.square(part, out=part)))
    return math.sqrt(total)
