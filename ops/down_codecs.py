"""The down half of the Codec seam: what a worker must be sent so that it has the shard's model.

Both values are exact: after applying the reply the worker's floats equal the shard's bit for bit.
AdaComp's published code sends the whole model every time; docs/METHOD.md, AdaComp, has the rule.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING

from ops.types import ConfigurationError, State, Update

if TYPE_CHECKING:
    from ops.types import Float32, Int64


class Operation(enum.Enum):
    """How a reply changes what the worker has; values equal the wire's."""

    NONE = 0
    FULL = 1
    SET = 2
    ADD = 3


@dataclasses.dataclass(frozen=True)
class DownDense:
    """Send the whole shard every time."""

    def init(self, size: int) -> State:
        """Return the empty state."""
        del size
        return {}

    def note(self, indices: Int64 | None, version: int, state: State) -> State:
        """Hear that applying `version` changed these entries (None: all)."""
        del indices, version
        return state

    def gather(
        self, theta: Float32, base_version: int | None, version: int, state: State
    ) -> tuple[Operation, Update]:
        """Return a copy of the model."""
        del base_version, version, state
        return Operation.FULL, Update(None, theta.copy())


@dataclasses.dataclass(frozen=True)
class DownDelta:
    """Send the new values of the entries that changed since the worker's version (SET).

    One int32 per entry remembers when it last changed and serves every worker. Where more than
    `dense_fraction` of the entries changed, the whole shard is smaller and is sent instead.
    """

    dense_fraction: float = 0.6

    def __post_init__(self) -> None:
        """Refuse what is no fraction."""
        if not 0 <= self.dense_fraction <= 1:  # refuses NaN too
            raise ConfigurationError(
                f"dense_fraction={self.dense_fraction}: expected a fraction from 0 to 1."
            )

    def init(self, size: int) -> State:
        """Return `last_changed` = 0 for every entry, and the newest dense change."""
        import numpy as np

        return {"last_changed": np.zeros(size, np.int32), "dense_version": 0}

    def note(self, indices: Int64 | None, version: int, state: State) -> State:
        """Hear that applying `version` changed these entries (None: all)."""
        if indices is None:
            state["dense_version"] = version
        else:
            state["last_changed"][indices] = version
        return state

    def gather(
        self, theta: Float32, base_version: int | None, version: int, state: State
    ) -> tuple[Operation, Update]:
        """Return what turns the model of `base_version` into the current one."""
        import numpy as np

        if base_version is None or base_version < state["dense_version"]:
            return Operation.FULL, Update(None, theta.copy())
        if base_version == version:
            return Operation.NONE, Update(np.empty(0, np.int64), np.empty(0, np.float32))
        changed = np.flatnonzero(state["last_changed"] > base_version)
        if len(changed) > self.dense_fraction * len(theta):
            return Operation.FULL, Update(None, theta.copy())
        return Operation.SET, Update(changed, theta[changed])


DownCodec = DownDense | DownDelta

#: --down_codec value -> policy.
REGISTRY: dict[str, type[DownDense] | type[DownDelta]] = {"dense": DownDense, "delta": DownDelta}
