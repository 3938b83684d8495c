"""What a worker offers to a shard without model: the document, and its part of the values."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from thinwire.ops.offer import Offer, weights_digest
from thinwire.ops.optimizers.slots import Slot, cut, join, slot_places
from thinwire.ops.sharding.split import part_of_layout, part_of_spec, shard_positions
from thinwire.ops.types import ShardLayout
from thinwire.proto.framing import BytesLike
from thinwire.runtime.run.program import Rows

if TYPE_CHECKING:
    from thinwire.ops.types import Float32


@dataclasses.dataclass(frozen=True)
class Offering:
    """A worker's model, as it is offered to any shard.

    Attributes:
        offer: What it is; the digest of its weights is filled in when it is made.
        weights: Returns the present weights: [num_parameters] float32.
        statistics: Returns the moving statistics that are averaged: [m] float32.
        slots: Returns the slots of each optimizer, by those of its variables, where one of them has
            moved before the run.
        phase: Of the script; 0: the first.
        run_id: Of the run, where this worker has been in it; empty: of any run.
        program: What this worker computes with, as rows of its Hello.
    """

    offer: Offer
    weights: Callable[[], Float32]
    statistics: Callable[[], Float32]
    slots: Callable[[], Sequence[Sequence[Slot]]] = tuple
    phase: int = 0
    run_id: str = ""
    program: Rows = ()

    def make(self, shard: int, layouts: Sequence[ShardLayout]) -> tuple[str, Sequence[BytesLike]]:
        """Return the document and the payload of the offer to a shard.

        Args:
            shard: Its number.
            layouts: Of all shards.
        """
        flat = np.ascontiguousarray(self.weights(), "<f4")
        offer = dataclasses.replace(self.offer, weights_digest=weights_digest(flat))
        places = shard_positions(offer.spec, layouts[shard])
        pieces: list[BytesLike] = [flat[place].data for place in places]
        if shard == 0:
            pieces.append(np.ascontiguousarray(self.statistics(), "<f4").data)
        slots_of = slot_places(offer, layouts[shard])
        if any(slots_of):
            for slots, numbers, own in zip(self.slots(), offer.groups(), slots_of, strict=True):
                layout, _ = part_of_layout(layouts[shard], numbers)
                values = join(cut(slots, part_of_spec(offer.spec, numbers), layout), own)
                pieces.append(values.astype("<f4", copy=False).data)
        return offer.to_json(), pieces
