"""Registry of weighting policies, which scale stale updates, by value of the flag --weighting."""

from __future__ import annotations

from thinwire.ops.weighting.base import Weighting
from thinwire.ops.weighting.by_staleness import BySamples, Inverse, Unweighted
from thinwire.ops.weighting.dc_asgd import DcAsgd
from thinwire.ops.weighting.per_entry import PerEntry

#: Value of the flag --weighting -> class of the weighting policy, which scales stale updates.
WEIGHTINGS: dict[str, type[Weighting]] = {
    "none": Unweighted,
    "inverse": Inverse,
    "per_entry": PerEntry,
    "dc_asgd": DcAsgd,
    "samples": BySamples,
}
