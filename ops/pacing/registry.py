"""The pacer class for each value of --pacer."""

from __future__ import annotations

from thinwire.ops.pacing.base import Pacer
from thinwire.ops.pacing.esync import Esync
from thinwire.ops.pacing.fixed import Every, Fixed

#: Value of --pacer -> class of the pacer.
PACERS: dict[str, type[Pacer]] = {"every": Every, "fixed": Fixed, "esync": Esync}
