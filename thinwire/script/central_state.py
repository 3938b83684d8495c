"""The state of the model and its optimizers on the PS, for a script that continues with it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from thinwire.ops.offer import Offer
from thinwire.ops.optimizers.slots import (
    SCALE_STREAK,
    OptimizerState,
    OwnSlots,
    Slot,
    whole_values,
)
from thinwire.ops.sharding.split import part_of_layout
from thinwire.ops.types import ModelSpec, ShardLayout
from thinwire.worker.client.slots import fetch_slots
from thinwire.worker.trainer import WorkerSession

if TYPE_CHECKING:
    from thinwire.ops.types import Float32


class ScriptSlots(Protocol):
    """The slots (state arrays) of one optimizer of a script."""

    def collect(self) -> list[Slot]:
        """Return copies of the optimizer's slots for shared variables, numbered by variable."""

    def fill(
        self,
        layouts: Sequence[ShardLayout],
        parts: Sequence[Sequence[Slot]],
        rate: float | None = None,
    ) -> None:
        """Overwrite the optimizer's slots with the shards' slots; see `OwnSlots.fill`."""


#: Function (offer, optimizers, shared variables) that returns the slots of each optimizer.
SlotsOf = Callable[[Offer, Sequence[Any], Sequence[Any]], Sequence[ScriptSlots]]


@dataclasses.dataclass(frozen=True)
class CentralState:
    """State of the model and its optimizers on all shards of the PS, between two updates.

    Attributes:
        spec: Names, shapes and dtypes of the model's variables.
        layouts: For each shard, its layout, which lists the slices of the model that the shard
            stores.
        shards: For each shard, the states of its optimizers, then a state with all other values of
            the shard, by slice of the layout. The state with all other values holds weights and
            averaged statistics only if they were requested.
    """

    spec: ModelSpec
    layouts: Sequence[ShardLayout]
    shards: Sequence[Sequence[OptimizerState]]

    @staticmethod
    def fetch(part: WorkerSession, num_statistics: int | None) -> CentralState:
        """Fetch the state of a script's optimizers from the shards.

        Args:
            part: The worker's session in the run.
            num_statistics: Number of averaged moving statistics, to fetch them and the weights in
                addition to the optimizer state; None to fetch only the optimizer state.

        Raises:
            Unreachable, StreamLost, RequestRejected: A shard does not answer, or rejects the
                request for optimizer state.
        """
        layouts = part.core.layouts
        shards = fetch_slots(part.run, part.own.id_worker, part.run_id, layouts, num_statistics)
        return CentralState(part.core.spec, layouts, shards)

    def weights(self) -> tuple[Float32, Float32]:
        """Return the model's weights [num_parameters] and its averaged moving statistics [m].

        Raises:
            ValueError: Weights and statistics were not requested from the shards, or belong to a
                different model.
        """
        slots = [states[-1].slots for states in self.shards]
        return whole_values(self.spec, self.layouts, slots)

    @property
    def scale_streak(self) -> int | None:
        """Number of updates without overflow since the loss scale changed; None without a scale."""
        slots = self.shards[0][-1].slots
        streaks = (slot.values for slot in slots if slot.role == SCALE_STREAK)
        return next((int(values) for values in streaks), None)

    def fill_slots(
        self,
        offer: Offer,
        optimizers: Sequence[Any],
        variables: Sequence[Any],
        slots_of: SlotsOf | None = None,
    ) -> None:
        """Write the shards' optimizer state into the script's optimizers.

        Args:
            offer: The model's description that the PS has accepted.
            optimizers: Optimizers of the script without their loss-scaling wrappers, in the order
                in which the PS knows them.
            variables: Variables that all workers train, in the order of the offer.
            slots_of: Function that returns the slots of the optimizers; None: `own_slots_of`.

        Raises:
            ConfigurationError, ValueError: An optimizer was built on variables that are not part of
                the model.
        """
        own_slots = (slots_of or own_slots_of)(offer, optimizers, variables)
        for number, numbers in enumerate(offer.groups()):
            states = [states[number] for states in self.shards]
            parts = [part_of_layout(layout, numbers)[0] for layout in self.layouts]
            own_slots[number].fill(parts, [state.slots for state in states], states[0].rate)


def own_slots_of(
    offer: Offer, optimizers: Sequence[Any], variables: Sequence[Any]
) -> list[OwnSlots]:
    """Return the slots (state variables) of the script's optimizers that a PS runs.

    Raises:
        ConfigurationError: An optimizer was built on variables that are not part of the model.
    """
    return [
        OwnSlots(optimizer, described, [variables[number] for number in numbers])
        for optimizer, described, numbers in zip(
            optimizers, offer.optimizers, offer.groups(), strict=True
        )
    ]
