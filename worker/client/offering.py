"""Makes a worker's offer to a shard without a model: a JSON description and the weights."""

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
    """A worker's offer: its model, which the worker sends to shards that have no model yet.

    Attributes:
        offer: Description of the model, to which the method `make` adds the digest of the weights.
        weights: Function that returns the worker's current weights: [num_parameters] float32.
        statistics: Function that returns the moving statistics that shard 0 averages over the
            workers: [m] float32.
        slots: Function that returns the slots (state arrays) of each optimizer, for the variables
            that it updates. Empty if no optimizer has taken a step before the run.
        phase: Number of the run's phase that this script is in, from 0. In a phase the run trains
            one model.
        run_id: Id of the run that this worker has joined before; with an empty id, the worker
            accepts any run.
        program: Script, local modules and compile settings of this worker, as rows of the worker's
            Hello message.
    """

    offer: Offer
    weights: Callable[[], Float32]
    statistics: Callable[[], Float32]
    slots: Callable[[], Sequence[Sequence[Slot]]] = tuple
    phase: int = 0
    run_id: str = ""
    program: Rows = ()

    def make(self, shard: int, layouts: Sequence[ShardLayout]) -> tuple[str, Sequence[BytesLike]]:
        """Return the JSON document and the payload (weights) of the offer to a shard.

        Args:
            shard: Number of the shard that receives the model's offer, from 0.
            layouts: For each shard, the slices of the model's variables that it stores.
        """
        flat = np.ascontiguousarray(self.weights(), "<f4")
        offer = dataclasses.replace(self.offer, weights_digest=weights_digest(flat))
        places = shard_positions(offer.spec, layouts[shard])
        pieces: list[BytesLike] = [flat[place].data for place in places]
        if shard == 0:
            pieces.append(np.ascontiguousarray(self.statistics(), "<f4").data)
        places_by_optimizer = slot_places(offer, layouts[shard])
        if any(places_by_optimizer):
            for slots, numbers, slot_place in zip(
                self.slots(), offer.groups(), places_by_optimizer, strict=True
            ):
                layout, _ = part_of_layout(layouts[shard], numbers)
                values = join(cut(slots, part_of_spec(offer.spec, numbers), layout), slot_place)
                pieces.append(values.astype("<f4", copy=False).data)
        return offer.to_json(), pieces
