"""The model between a worker, which holds it flat, and shard 0, which holds it in slices."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ops.types import Block, CodedValues, Kind
from worker.collective_mailbox import RoundName
from worker.core import WorkerCore
from worker.exchanged import Outgoing

if TYPE_CHECKING:
    from ops.types import Float32


class ModelCopy:
    """The base model of a worker's core, as shard 0 sends and takes it."""

    def __init__(self, core: WorkerCore) -> None:
        """Look at `core` whenever asked."""
        self._core = core

    def with_blocks(self, blocks: Iterable[Block]) -> Float32:
        """Return the present model [n] with some dense blocks of shard 0 in their places."""
        flat = self._core.base.copy()
        for block in blocks:
            flat[self._place(block.slot)] = block.values.data
        return flat

    def blocks(self) -> tuple[Block, ...]:
        """Return the model as the PS holds it; it must not change before it is answered."""
        return tuple(
            Block(
                slot, piece.size, None, CodedValues("float32", self._core.base[self._place(slot)])
            )
            for slot, piece in enumerate(self._core.layouts[0].slices)
        )

    def alone(self, at: RoundName) -> Outgoing:
        """Return an exchange that brings the weights of version `at`, and no round."""
        return Outgoing(
            step=self._core.step + 1,
            kind=Kind.VALUES,
            shards=[self.blocks()],
            base_versions=[at.number],
            generations=[at.generation],
            samples=0,
            local_steps=0,
            learning_rate=self._core.learning_rate,
            loss=0.0,
        )

    def _place(self, slot: int) -> slice:
        piece = self._core.layouts[0].slices[slot]
        start = self._core.spec.offsets[piece.tensor] + piece.start
        return slice(start, start + piece.size)
