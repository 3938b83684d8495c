"""What the workers were last handed: a dense copy per worker, for weightings that ask for it.

A copy belongs to a version of the shard, so that workers handed the same version share it. Only
a weighting whose `needs_copies` is true costs this memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ops.types import State

if TYPE_CHECKING:
    from ops.types import Float32


class HandedOut:
    """The copies, and who holds which."""

    def __init__(self) -> None:
        """Start with nobody."""
        self._versions: dict[int, int] = {}  # worker -> version it was last handed
        self._copies: dict[int, Float32] = {}  # version -> [n] float32, read-only

    @property
    def copies(self) -> Mapping[int, Float32]:
        """Version -> the shard's weights [n] float32 as they were then."""
        return self._copies

    @property
    def num_bytes(self) -> int:
        """Memory of the copies."""
        return sum(copy.nbytes for copy in self._copies.values())

    def note(self, worker: int, version: int, theta: Float32) -> None:
        """Keep what a worker is being handed, `theta` [n] at `version`, instead of what it had."""
        if version not in self._copies:
            copy = theta.copy()
            copy.flags.writeable = False
            self._copies[version] = copy
        self._versions[worker] = version
        self._drop_unheld()

    def forget(self, worker: int) -> None:
        """Drop what a worker held that has left."""
        self._versions.pop(worker, None)
        self._drop_unheld()

    def save(self) -> State:
        """Return durable state; the arrays never change, so they are not copied."""
        return {
            "versions": {str(worker): version for worker, version in self._versions.items()},
            "copies": {str(version): copy for version, copy in self._copies.items()},
        }

    def restore(self, state: State) -> None:
        """Take back what `save` gave."""
        self._versions = {int(worker): version for worker, version in state["versions"].items()}
        self._copies = {int(version): copy for version, copy in state["copies"].items()}

    def _drop_unheld(self) -> None:
        held = set(self._versions.values())
        for version in [version for version in self._copies if version not in held]:
            del self._copies[version]
