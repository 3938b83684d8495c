"""What a trainer tells of a mini-batch."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from ops.types import State

if TYPE_CHECKING:
    from ops.types import Float32


@dataclasses.dataclass(frozen=True)
class Step:
    """What one mini-batch came to, besides its gradient."""

    loss: float
    samples: int
    statistics: Float32  # [m] moving statistics after it, where they are averaged
    local: State  # what stays on the worker
