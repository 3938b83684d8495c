"""Registry of pacers, which decide when workers push, by value of the flag --pacer."""

from __future__ import annotations

from thinwire.ops.pacing.base import Pacer
from thinwire.ops.pacing.esync import Esync
from thinwire.ops.pacing.fixed import Every, Fixed

#: Value of the flag --pacer -> class of the pacer (policy when a worker pushes).
PACERS: dict[str, type[Pacer]] = {"every": Every, "fixed": Fixed, "esync": Esync}
