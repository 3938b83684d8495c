"""The state of an optimizer that lives on the shards, between them and a script's own optimizer.

A slot is known by the slice that it belongs to and by its role, never by its place in Keras' list
alone, which depends on how a shard groups its variables. On the wire a document names the arrays,
which follow one after the other.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from thinwire.ops.offer import Offer, OptimizerOffer
from thinwire.ops.sharding.split import part_of_layout, part_of_spec
from thinwire.ops.types import ConfigurationError, ModelSpec, ShardLayout, State, TensorSpec

if TYPE_CHECKING:
    from thinwire.ops.types import Float32

#: Prefixes of the names of variables that an optimizer of ours steps: of those that a Muon leaves
#: to AdamW, and of the others.
BY_ADAMW, OTHERS = "adamw", "v"
#: Keras' name of a slot: number of its variable, and what it is.
_SLOT_NAME = re.compile(rf"(?:{BY_ADAMW}|{OTHERS})(\d+)(?:_(.*))?")
#: Types of slots, as numpy names them.
_DTYPES = ("float32", "int64", "int32")
#: What a learning rate is called among an optimizer's variables; it is no slot.
LEARNING_RATE = "learning_rate"
ITERATION = "iteration"
#: What a LossScaleOptimizer counts: updates without an overflow since the scale was changed.
SCALE_STREAK = "scale_streak"
#: The weights themselves, and the averaged statistics, where both are sent beside the slots.
WEIGHTS, STATISTICS = "weights", "statistics"


@dataclasses.dataclass(frozen=True)
class Slot:
    """One array of an optimizer's state.

    Attributes:
        slice: Number of the slice, or of the variable, that it belongs to; None: it is of all.
        role: What it is, such as "momentum"; each once for a slice.
        values: Of the slice's shape, or of one that follows from it.
    """

    slice: int | None
    role: str
    values: Any


@dataclasses.dataclass(frozen=True)
class SlotPlace:
    """Where a slot belongs, and its shape."""

    slice: int | None
    role: str
    shape: tuple[int, ...]


def variable_name(number: int, by_adamw: bool) -> str:
    """Return the name of a variable whose slots `roles_of` knows."""
    return f"{BY_ADAMW if by_adamw else OTHERS}{number}"


def roles_of(optimizer: Any) -> list[tuple[int | None, str]]:
    """Return what each of `optimizer.variables` is: number of its variable, and its role.

    Args:
        optimizer: Of Keras, built on variables that are named by `variable_name`.
    """
    found: list[tuple[int | None, str]] = []
    for variable in optimizer.variables:
        match = _SLOT_NAME.fullmatch(variable.name)
        number = None if match is None else int(match[1])
        role = (match[2] or "factor") if match else variable.name
        if number is None and role not in (ITERATION, LEARNING_RATE):
            role = "product"  # Keras numbers variables without a name, such as Nadam's
        occurrence = sum(n == number and r.split(".")[0] == role for n, r in found)
        found.append((number, f"{role}.{occurrence}" if occurrence else role))
    return found


@dataclasses.dataclass(frozen=True)
class OptimizerState:
    """What an optimizer holds on one shard.

    Attributes:
        slots: By slice of what the shard holds of its variables.
        rate: Its learning rate.
    """

    slots: Sequence[Slot]
    rate: float


def encode(states: Sequence[OptimizerState]) -> tuple[str, list[memoryview]]:
    """Return the document and the arrays, little-endian, of all optimizers; see `decode`."""
    import numpy as np

    rows: list[dict[str, Any]] = []
    pieces = []
    for state in states:
        rows.append({"rate": state.rate, "arrays": []})
        for slot in state.slots:
            values = np.asarray(slot.values)
            array = [slot.slice, slot.role, list(values.shape), values.dtype.name]
            rows[-1]["arrays"].append(array)
            little = values.astype(values.dtype.newbyteorder("<"), copy=False)
            pieces.append(np.ascontiguousarray(little).reshape(-1).view(np.uint8).data)
    return json.dumps(rows), pieces


def decode(document: str, payload: memoryview) -> list[OptimizerState]:
    """Return what a shard has sent of all optimizers; the arrays are copies.

    Raises:
        ValueError: It is not what `encode` makes.
    """
    import numpy as np

    try:
        states, start = [], 0
        for found in json.loads(document):
            slots = []
            for number, role, shape, dtype in found["arrays"]:
                if dtype not in _DTYPES:
                    raise ValueError(f"an array of {dtype!r:.50}; expected {', '.join(_DTYPES)}")
                count = math.prod(int(size) for size in shape)
                stop = start + count * np.dtype(dtype).itemsize
                if count < 0 or stop > len(payload):
                    raise ValueError(f"{len(payload)} bytes; expected more")
                values = np.frombuffer(payload[start:stop], np.dtype(dtype).newbyteorder("<"))
                slots.append(Slot(number, str(role), values.astype(dtype).reshape(shape)))
                start = stop
            states.append(OptimizerState(slots, float(found["rate"])))
        if start != len(payload):
            raise ValueError(f"{len(payload)} bytes; expected {start}")
        return states
    except (TypeError, KeyError, RecursionError, OverflowError) as error:
        raise ValueError(f"unreadable slots ({type(error).__name__}: {error!s:.200})") from error


class OwnSlots:
    """The slots of a script's own optimizer, by variable and role.

    Args:
        optimizer: The compiled one, without the loss scaling around it; it is built if it is not.
        offer: What was described of it.
        variables: The shared variables, in order; of those that the optimizer was built on, some
            may be frozen by now.

    Raises:
        ConfigurationError: It was built on other variables.
    """

    def __init__(self, optimizer: Any, offer: OptimizerOffer, variables: Sequence[Any]) -> None:
        if not optimizer.built:
            optimizer.build(list(variables))
        built = list(optimizer._trainable_variables)
        known = {id(each) for each in built}
        if new := [each for each in variables if id(each) not in known]:
            raise ConfigurationError(
                f"the compiled {offer.optimizer.name} was built before {new[0].path} became "
                "trainable, and has no state for it; expected one for all that is trained. Compile "
                "the model again with a new optimizer, as for Keras alone."
            )
        numbers = {id(each): number for number, each in enumerate(variables)}
        paths = [TensorSpec(each.path, tuple(each.shape)) for each in built]
        initial = _initial_slots(offer, ModelSpec(tuple(paths)))
        keys = [key for key, _ in initial]
        self._rate = optimizer._learning_rate
        own = [each for each in optimizer.variables if each is not self._rate]
        if len(own) != len(keys):
            raise ConfigurationError(
                f"the compiled {offer.optimizer.name} has {len(own)} slots where its variables "
                f"make {len(keys)}; expected an optimizer built on just those that are shared. "
                "Compile the model again after its variables have changed."
            )
        shared = [None if number is None else numbers.get(id(built[number])) for number, _ in keys]
        self._by_key = {
            (number, role): each
            for number, (of, role), each in zip(shared, keys, own, strict=True)
            if (number is None) == (of is None)  # else it is frozen, and keeps its state
        }
        pairs = zip(shared, initial, strict=True)
        self._initial = {(number, role): value for number, ((_, role), value) in pairs}
        self._variables = list(variables)

    @property
    def are_initial(self) -> bool:
        """Whether all slots have the values that a new optimizer begins with."""
        return all(
            bool((variable.numpy() == self._initial[key]).all())
            for key, variable in self._by_key.items()
        )

    def collect(self) -> list[Slot]:
        """Return copies of all slots, by variable."""
        return [
            Slot(number, role, variable.numpy())
            for (number, role), variable in self._by_key.items()
        ]

    def fill(
        self,
        layouts: Sequence[ShardLayout],
        parts: Sequence[Sequence[Slot]],
        rate: float | None = None,
    ) -> None:
        """Overwrite the slots with those of the shards.

        Args:
            layouts: Of every shard.
            parts: Of every shard, by slice of its layout.
            rate: The learning rate, where it is a number.

        Raises:
            ValueError: Slots are missing, or of other shapes than these.
        """
        import keras
        import numpy as np

        whole: dict[tuple[int | None, str], Any] = {}
        for layout, slots in zip(layouts, parts, strict=True):
            for slot in slots:
                if slot.slice is None:
                    whole.setdefault((None, slot.role), slot.values)
                    continue
                piece = layout.slices[slot.slice]
                size = math.prod(self._variables[piece.tensor].shape)
                if piece.size == size:
                    whole[piece.tensor, slot.role] = slot.values
                else:
                    empty = np.zeros(size, slot.values.dtype)
                    values = whole.setdefault((piece.tensor, slot.role), empty)
                    values[piece.start : piece.stop] = slot.values
        if missing := [key for key in self._by_key if key not in whole]:
            raise ValueError(f"the shards sent no {missing[0][1]} of variable {missing[0][0]}")
        for key, variable in self._by_key.items():
            variable.assign(np.reshape(whole[key], variable.shape))
        if rate is not None and isinstance(self._rate, keras.Variable):
            self._rate.assign(rate)


def whole_slots(theta: Float32, layout: ShardLayout, statistics: Float32 | None) -> list[Slot]:
    """Return copies of a shard's weights [n] by slice, and of the averaged statistics [m]."""
    offsets = layout.offsets
    found = [
        Slot(number, WEIGHTS, theta[offsets[number] : offsets[number + 1]].copy())
        for number in range(len(layout.slices))
    ]
    if statistics is not None:
        found.append(Slot(None, STATISTICS, statistics.copy()))
    return found


def whole_values(
    spec: ModelSpec, layouts: Sequence[ShardLayout], parts: Sequence[Sequence[Slot]]
) -> tuple[Float32, Float32]:
    """Return the weights [num_parameters] and the averaged statistics [m] of all shards' parts.

    Raises:
        ValueError: Some are missing, or of another size.
    """
    import numpy as np

    weights, missing = np.empty(spec.num_parameters, np.float32), spec.num_parameters
    statistics = np.empty(0, np.float32)
    for layout, slots in zip(layouts, parts, strict=True):
        for slot in slots:
            if slot.role == STATISTICS:
                statistics = slot.values
            elif slot.role == WEIGHTS and slot.slice is not None:
                piece = layout.slices[slot.slice]
                start = spec.offsets[piece.tensor] + piece.start
                weights[start : start + piece.size] = slot.values
                missing -= piece.size
    if missing:
        raise ValueError(f"the shards did not send {missing} of {spec.num_parameters} weights")
    return weights, statistics


def planned(offer: OptimizerOffer, spec: ModelSpec) -> list[SlotPlace]:
    """Return the slots that come with the weights; none of an optimizer in its first state.

    All of it is float32; its count of steps stands in the offer itself.

    Args:
        offer: The optimizer.
        spec: The variables that it steps.

    Raises:
        ConfigurationError: The optimizer is not on the allow-list.
    """
    if not offer.has_slots:
        return []
    config = offer.optimizer.config
    averages = config.get("use_ema") or config.get("gradient_accumulation_steps")
    if offer.optimizer.name == "SGD" and not averages:
        numbers = range(len(spec.tensors) if config.get("momentum") else 0)
        return [SlotPlace(number, "momentum", spec.tensors[number].shape) for number in numbers]
    return [
        SlotPlace(number, role, () if number is None else _shape(role, spec.tensors[number].shape))
        for (number, role), _ in _initial_slots(offer, spec)
        if role != ITERATION
    ]


def _initial_slots(
    offer: OptimizerOffer, spec: ModelSpec
) -> list[tuple[tuple[int | None, str], float]]:
    """Return variable and role of each slot, and the value it begins with, in Keras' order."""
    import keras

    from thinwire.ops.optimizers.described import build_optimizer

    # Of the same class on tiny variables of as many dimensions: the same slots in that order.
    tiny = [
        keras.Variable(
            keras.ops.zeros((1,) * len(tensor.shape)),
            name=variable_name(number, tensor.path in offer.by_adamw),
        )
        for number, tensor in enumerate(spec.tensors)
    ]
    probe = build_optimizer(offer.optimizer, BY_ADAMW)
    probe.build(tiny)
    values = [float(variable.numpy().reshape(-1)[0]) for variable in probe.variables]
    pairs = zip(roles_of(probe), values, strict=True)
    return [(key, value) for key, value in pairs if key[1] != LEARNING_RATE]


def _shape(role: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of a slot of a variable: as it is, but for Adafactor's two factors."""
    if not role.startswith("factor"):
        return shape
    if len(shape) < 2:
        return ()
    return shape[:-1] if role == "factor" else (*shape[:-2], shape[-1])


def places_in(places: Sequence[SlotPlace], spec: ModelSpec, layout: ShardLayout) -> list[SlotPlace]:
    """Return the part of one shard, by slice of its layout, of slots by variable."""
    found = [place for place in places if place.slice is None]
    by_tensor: dict[int | None, list[SlotPlace]] = {}
    for place in places:
        by_tensor.setdefault(place.slice, []).append(place)
    for number, piece in enumerate(layout.slices):
        whole = piece.size == spec.tensors[piece.tensor].size
        for place in by_tensor.get(piece.tensor, ()):
            shape = place.shape if whole else (piece.size,)
            found.append(SlotPlace(number, place.role, shape))
    return found


def slot_places(offer: Offer, layout: ShardLayout) -> list[list[SlotPlace]]:
    """Return the slots of each optimizer that come with a shard's weights.

    Slices are those of what the shard holds of the optimizer's variables.

    Raises:
        ConfigurationError: An optimizer is not on the allow-list.
    """
    found = []
    for optimizer, numbers in zip(offer.optimizers, offer.groups(), strict=True):
        spec, (own, _) = part_of_spec(offer.spec, numbers), part_of_layout(layout, numbers)
        found.append(places_in(planned(optimizer, spec), spec, own))
    return found


def num_values(places: Sequence[SlotPlace]) -> int:
    """Return how many values these slots have together."""
    return sum(math.prod(place.shape) for place in places)


def join(slots: Sequence[Slot], places: Sequence[SlotPlace]) -> Float32:
    """Return the values of slots, in the order of their places: [num_values] float32."""
    import numpy as np

    by_key = {(slot.slice, slot.role): slot.values for slot in slots}
    parts = [np.ravel(by_key[place.slice, place.role]) for place in places]
    return np.concatenate([np.empty(0, np.float32), *parts]).astype(np.float32, copy=False)


def divide(values: Float32, places: Sequence[SlotPlace]) -> list[Slot]:
    """Return the slots that `join` has joined."""
    found, start = [], 0
    for place in places:
        stop = start + math.prod(place.shape)
        found.append(Slot(place.slice, place.role, values[start:stop].reshape(place.shape)))
        start = stop
    return found


def cut(slots: Sequence[Slot], spec: ModelSpec, layout: ShardLayout) -> list[Slot]:
    """Return the part of one shard: slots by slice of its layout, out of those by variable."""
    by_tensor: dict[int | None, list[Slot]] = {}
    for slot in slots:
        by_tensor.setdefault(slot.slice, []).append(slot)
    found = list(by_tensor.get(None, ()))
    for number, piece in enumerate(layout.slices):
        whole = piece.size == spec.tensors[piece.tensor].size
        for slot in by_tensor.get(piece.tensor, ()):
            values = slot.values if whole else slot.values.reshape(-1)[piece.start : piece.stop]
            found.append(Slot(number, slot.role, values))
    return found


def velocity_slots(state: State, tensors: Sequence[TensorSpec]) -> list[Slot]:
    """Return Keras' slots of a MomentumSGD on slices that lie one after the other."""
    found, start, velocity = [], 0, state["2"]
    for number, tensor in enumerate(tensors):
        part = velocity[start : start + tensor.size]
        found.append(Slot(number, "momentum", part.reshape(tensor.shape)))
        start += tensor.size
    return found
