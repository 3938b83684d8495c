"""The shards' model on the device where gradients are computed."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import numpy as np

from thinwire.ops.kernels.device import DeviceArray

if TYPE_CHECKING:
    from thinwire.ops.types import Float32, Int64

#: Bytes to the device for an entry by itself, and in a copy of the whole.
_APART, _TOGETHER = 12, 4


class DeviceMirror:
    """Follows a model on the host; what is copied is what has changed.

    Entries are overwritten with the host's, so the two are the same bit for bit, whatever the
    host has done to them.

    Attributes:
        array: [n] float32 on the device.

    Args:
        model: [n] float32 on the host, zeros.
    """

    def __init__(self, model: Float32) -> None:
        self._model = model
        self.array = cast("Float32", DeviceArray(model))
        self._changed: list[Int64] = []
        self._num_changed = 0

    def note(self, start: int, size: int, indices: Int64 | None) -> None:
        """Note that a part of the host's model changes.

        Args:
            start: Where it begins.
            size: Of the part.
            indices: [k] int64 what changes, from `start` on; None: all of it.
        """
        self._num_changed += size if indices is None else len(indices)
        if not self._is_whole:
            self._changed.append(start + (np.arange(size) if indices is None else indices))

    @property
    def _is_whole(self) -> bool:
        """Whether a copy of the whole is less than what has changed."""
        return self._num_changed * _APART >= len(self._model) * _TOGETHER

    def catch_up(self) -> None:
        """Take over what has changed."""
        if self._is_whole:
            self.array[:] = cast("Float32", DeviceArray(self._model))
        elif self._changed:
            where = np.concatenate(self._changed)
            self.array[where] = self._model[where]
        self._changed, self._num_changed = [], 0
