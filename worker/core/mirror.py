"""Copy of the shards' model on the device that computes gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from thinwire.ops.kernels.base import Kernels
    from thinwire.ops.types import Float32, Int64

#: Number of bytes sent to the device for one changed entry with its position, and for one entry in
#: a copy of the whole model.
_APART, _TOGETHER = 12, 4


class DeviceMirror:
    """Copy of the host's model on the device, updated by copying only changed entries.

    The host's values overwrite the device's values, so host and device hold the same bits after any
    arithmetic on the host.

    Attributes:
        array: [n] float32 copy of the model's weights on the device that computes gradients.

    Args:
        model: [n] float32 weights on the host.
        kernels: Kernels of the device, such as those of TensorFlow or JAX.
    """

    def __init__(self, model: Float32, kernels: Kernels) -> None:
        self._model = model
        self.array = kernels.joined([model.copy()])  # the device may use the memory of its source
        self._changed: list[Int64] = []
        self._num_changed = 0

    def note(self, start: int, size: int, indices: Int64 | None) -> None:
        """Record that entries of the host's model change, for the next copy to the device.

        Args:
            start: Position of the changed part's first entry in the model's flat weight vector.
            size: Number of entries in the changed part of the model's flat weight vector.
            indices: [k] int64 positions of the changed entries of the model, relative to `start`;
                None if all entries of the part change.
        """
        self._num_changed += size if indices is None else len(indices)
        if not self._is_whole:
            self._changed.append(start + (np.arange(size) if indices is None else indices))

    @property
    def _is_whole(self) -> bool:
        """True if copying the whole model takes no more bytes than copying its changed entries."""
        return self._num_changed * _APART >= len(self._model) * _TOGETHER

    def catch_up(self) -> None:
        """Copy the entries of the host's model that have changed to the device."""
        if self._is_whole:
            self.array[:] = self._model.copy()  # the device may use the memory of its source
        elif self._changed:
            where = np.concatenate(self._changed)
            self.array[where] = self._model[where]
        self._changed, self._num_changed = [], 0
