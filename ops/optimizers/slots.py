"""Optimizer slots (momentum etc.): conversion between a script's optimizer and shard servers.

The key of an optimizer slot is its role (such as "momentum") and the number of its variable or
variable slice. The position of an optimizer slot in Keras' list of variables is not its key,
because the position depends on how a shard server groups its variables. In a message, a JSON
document describes the arrays of optimizer slots, and the arrays follow in the document's order.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Sequence
from typing import Any

from thinwire.ops.offer import Offer, OptimizerOffer
from thinwire.ops.optimizers.torch_groups import groups_of, is_torch
from thinwire.ops.sharding.split import part_of_layout, part_of_spec
from thinwire.ops.types import (
    ConfigurationError,
    Float32,
    ModelSpec,
    ShardLayout,
    TensorSpec,
)

#: Name prefixes of the variables that Thinwire makes for a Keras optimizer. BY_ADAMW is for
#: variables that the optimizer Muon steps with AdamW, OTHERS for all other variables.
BY_ADAMW, OTHERS = "adamw", "v"
#: Keras' name of an optimizer slot: prefix and number of the slot's variable, then the slot's role
#: (such as "momentum").
_SLOT_NAME = re.compile(rf"(?:{BY_ADAMW}|{OTHERS})(\d+)(?:_(.*))?")
#: Legal dtypes of optimizer slots on the wire, by numpy's names.
_DTYPES = ("float32", "int64", "int32")
#: Name of the learning rate in Keras' list of an optimizer's variables. The learning rate is not
#: sent as an optimizer slot.
LEARNING_RATE = "learning_rate"
#: Role of the optimizer slot with an optimizer's step count.
ITERATION = "iteration"
#: Role of a LossScaleOptimizer's counter of updates without overflow since the last scale change.
SCALE_STREAK = "scale_streak"
#: Roles of the weights and of averaged statistics (BatchNorm), if these are sent with the optimizer
#: slots.
WEIGHTS, STATISTICS = "weights", "statistics"


@dataclasses.dataclass(frozen=True)
class Slot:
    """Optimizer slot: one array of an optimizer's state, for example the momentum of a variable.

    Attributes:
        slice: Number of the variable slice on a shard server, or of the variable, to which the
            optimizer slot belongs. None for a slot of the whole optimizer, for example the step
            count.
        role: Role of the optimizer slot, for example "momentum"; unique within a variable slice.
        values: Values of the optimizer slot: an array of the variable slice's shape, or of a shape
            derived from it.
    """

    slice: int | None
    role: str
    values: Any


@dataclasses.dataclass(frozen=True)
class SlotPlace:
    """Key and shape of an optimizer slot, without the slot's values.

    Attributes:
        slice: Number of the variable slice or variable to which the optimizer slot belongs; None
            for a slot of the whole optimizer.
        role: Role of the optimizer slot, for example "momentum".
        shape: Shape of the optimizer slot's array.
    """

    slice: int | None
    role: str
    shape: tuple[int, ...]


def variable_name(number: int, by_adamw: bool) -> str:
    """Return the name of a Keras variable, from which `roles_of` reads the variable's number."""
    return f"{BY_ADAMW if by_adamw else OTHERS}{number}"


def roles_of(optimizer: Any) -> list[tuple[int | None, str]]:
    """Return (variable number, role) of the optimizer slot, for each item of `optimizer.variables`.

    Args:
        optimizer: A Keras optimizer that was built on variables named by `variable_name`.
    """
    roles: list[tuple[int | None, str]] = []
    for variable in optimizer.variables:
        match = _SLOT_NAME.fullmatch(variable.name)
        number = None if match is None else int(match[1])
        role = (match[2] or "factor") if match else variable.name
        if number is None and role not in (ITERATION, LEARNING_RATE):
            # Nadam creates its optimizer slot "product" without a name. Keras then makes a numbered
            # name; the number depends on the variables that the process has already made.
            role = "product"
        occurrence = sum(n == number and r.split(".")[0] == role for n, r in roles)
        roles.append((number, f"{role}.{occurrence}" if occurrence else role))
    return roles


def values_of(variable: Any) -> Any:
    """Return a copy of a Keras variable's value, as an array of its shape, on every backend.

    The step count is int64, as on TensorFlow; JAX and PyTorch count in int32.
    """
    import numpy as np

    values = np.asarray(variable.numpy())
    return values.astype(np.int64) if values.dtype == np.int32 else values


@dataclasses.dataclass(frozen=True)
class OptimizerState:
    """The state of one of a script's optimizers on a shard server.

    Attributes:
        slots: The optimizer's slots. The slice number of a slot counts the shard server's slices of
            the optimizer's variables.
        rate: Current learning rate of the optimizer.
    """

    slots: Sequence[Slot]
    rate: float


def encode(states: Sequence[OptimizerState]) -> tuple[str, list[memoryview]]:
    """Return the JSON document and the little-endian arrays with the states of all optimizers."""
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
    """Return the states of all optimizers from a shard server's message; the arrays are copies.

    Args:
        document: JSON document with the states of all optimizers, from `encode`.
        payload: Bytes of the arrays of optimizer slots, in the document's order.

    Raises:
        ValueError: The JSON document is malformed, or its arrays do not fill the payload exactly.
    """
    import numpy as np

    try:
        states, start = [], 0
        for row in json.loads(document):
            slots = []
            for number, role, shape, dtype in row["arrays"]:
                if dtype not in _DTYPES:
                    raise ValueError(f"slot of dtype {dtype!r:.50}; expected {', '.join(_DTYPES)}")
                count = math.prod(int(size) for size in shape)
                stop = start + count * np.dtype(dtype).itemsize
                if count < 0 or stop > len(payload):
                    raise ValueError(f"the slots have only {len(payload)} bytes; expected more")
                values = np.frombuffer(payload[start:stop], np.dtype(dtype).newbyteorder("<"))
                slots.append(Slot(number, str(role), values.astype(dtype).reshape(shape)))
                start = stop
            states.append(OptimizerState(slots, float(row["rate"])))
        if start != len(payload):
            raise ValueError(f"the optimizer slots have {len(payload)} bytes; expected {start}")
        return states
    except (TypeError, KeyError, RecursionError, OverflowError) as error:
        raise ValueError(f"unreadable slots ({type(error).__name__}: {error!s:.200})") from error


class OwnSlots:
    """The slots of the compiled optimizer in a script's process, by variable and role.

    Args:
        optimizer: The compiled Keras optimizer, without a LossScaleOptimizer around it. The
            constructor builds an optimizer that is not built yet.
        offer: The description of the script's optimizer for the parameter server.
        variables: The model's variables that all workers share, in order. The optimizer may have
            been built on additional variables that are frozen now.

    Raises:
        ConfigurationError: The optimizer was not built on the variables that all workers share.
    """

    def __init__(self, optimizer: Any, offer: OptimizerOffer, variables: Sequence[Any]) -> None:
        if not optimizer.built:
            optimizer.build(list(variables))
        built = list(optimizer._trainable_variables)
        known = {id(variable) for variable in built}
        if new := [variable for variable in variables if id(variable) not in known]:
            raise ConfigurationError(
                f"the compiled optimizer {offer.optimizer.name} was built before {new[0].path} "
                "became trainable, so it has no slots for this variable; expected an optimizer "
                "that was built on all trainable variables. Compile the model again with a new "
                "optimizer, as Keras without Thinwire also requires."
            )
        numbers = {id(variable): number for number, variable in enumerate(variables)}
        paths = [TensorSpec(variable.path, tuple(variable.shape)) for variable in built]
        initial = _initial_slots(offer, ModelSpec(tuple(paths)))
        keys = [key for key, _ in initial]
        self._rate = optimizer._learning_rate
        slots = [variable for variable in optimizer.variables if variable is not self._rate]
        if len(slots) != len(keys):
            raise ConfigurationError(
                f"the compiled optimizer {offer.optimizer.name} has {len(slots)} slots, but its "
                f"variables need {len(keys)} slots; expected an optimizer that was built on the "
                "shared variables only. Compile the model again after its variables have changed."
            )
        shared = [None if number is None else numbers.get(id(built[number])) for number, _ in keys]
        # `of` numbers the variables that the optimizer was built on, `number` the shared variables.
        # A variable without a `number` is frozen now, and its optimizer slots stay unchanged.
        self._by_key = {
            (number, role): slot
            for number, (of, role), slot in zip(shared, keys, slots, strict=True)
            if (number is None) == (of is None)
        }
        pairs = zip(shared, initial, strict=True)
        self._initial = {(number, role): value for number, ((_, role), value) in pairs}
        self._variables = list(variables)

    @property
    def are_initial(self) -> bool:
        """True if all slots have the values of a new optimizer, which has done no step."""
        return all(
            bool((values_of(variable) == self._initial[key]).all())
            for key, variable in self._by_key.items()
        )

    def collect(self) -> list[Slot]:
        """Return copies of the optimizer's slots for shared variables, numbered by variable."""
        return [
            Slot(number, role, values_of(variable))
            for (number, role), variable in self._by_key.items()
        ]

    def fill(
        self,
        layouts: Sequence[ShardLayout],
        parts: Sequence[Sequence[Slot]],
        rate: float | None = None,
    ) -> None:
        """Overwrite the slots of the script's optimizer with the slots from the shard servers.

        Args:
            layouts: The layout (slices of variables) of every shard server.
            parts: The optimizer slots of every shard server, numbered by slice of its layout.
            rate: The learning rate to set in the script's optimizer. None leaves its learning rate,
                for example a schedule, unchanged.

        Raises:
            ValueError: Slots of the optimizer are missing in `parts`, or have wrong shapes.
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
            raise ValueError(f"the shards sent no slot {missing[0][1]} of variable {missing[0][0]}")
        for key, variable in self._by_key.items():
            variable.assign(np.reshape(whole[key], variable.shape))
        if rate is not None and isinstance(self._rate, keras.Variable):
            self._rate.assign(rate)


def whole_slots(theta: Float32, layout: ShardLayout, statistics: Float32 | None) -> list[Slot]:
    """Return copies of a shard's weights, one array per slice, and of its averaged statistics [m].

    Args:
        theta: [n] float32, the shard server's weights.
        layout: The layout (slices of variables) of the shard server.
        statistics: [m] float32, statistics (BatchNorm) averaged over workers; None if the shard
            server has no statistics.
    """
    offsets = layout.offsets
    slots = [
        Slot(number, WEIGHTS, theta[offsets[number] : offsets[number + 1]].copy())
        for number in range(len(layout.slices))
    ]
    if statistics is not None:
        slots.append(Slot(None, STATISTICS, statistics.copy()))
    return slots


def whole_values(
    spec: ModelSpec, layouts: Sequence[ShardLayout], parts: Sequence[Sequence[Slot]]
) -> tuple[Float32, Float32]:
    """Join the weights and averaged statistics of all shards to arrays [num_parameters] and [m].

    Args:
        spec: Paths and shapes of all shared variables of the whole model.
        layouts: The layout (slices of variables) of every shard server.
        parts: The weights and statistics of every shard server, from `whole_slots`.

    Raises:
        ValueError: Weights are missing in `parts`, or an array in `parts` has the wrong size.
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
        raise ValueError(f"the PS shards did not send {missing} of {spec.num_parameters} weights")
    return weights, statistics


def planned(offer: OptimizerOffer, spec: ModelSpec) -> list[SlotPlace]:
    """Return the optimizer slots that a worker sends with initial weights; [] for new optimizers.

    All optimizer slots that a worker sends with initial weights are float32. The optimizer's step
    count is part of the offer (description of the script's optimizer), not of the slots that a
    worker sends.

    Args:
        offer: A worker's description of the script's optimizer.
        spec: Paths and shapes of the variables that the optimizer steps.

    Raises:
        ConfigurationError: The script's optimizer is not on the allow-list.
    """
    if not offer.has_slots:
        return []
    if is_torch(offer.optimizer):
        return [
            SlotPlace(number, role, tensor.shape)
            for role in groups_of(offer.optimizer).roles
            for number, tensor in enumerate(spec.tensors)
        ]
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
    """Return ((variable number, role), initial value) of each slot in a Keras optimizer's order."""
    import keras

    from thinwire.ops.optimizers.described import build_optimizer

    # An optimizer of the same class that is built on one-entry variables, with the same numbers of
    # dimensions, has the same slots in the same order, but needs no memory for a whole model.
    tiny = [
        keras.Variable(
            keras.ops.zeros((1,) * len(tensor.shape)),
            name=variable_name(number, tensor.path in offer.by_adamw),
        )
        for number, tensor in enumerate(spec.tensors)
    ]
    probe = build_optimizer(offer.optimizer, BY_ADAMW)
    probe.build(tiny)
    values = [float(values_of(variable).flat[0]) for variable in probe.variables]
    pairs = zip(roles_of(probe), values, strict=True)
    return [(key, value) for key, value in pairs if key[1] != LEARNING_RATE]


def _shape(role: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return an optimizer slot's shape: its variable's shape, or less for Adafactor's factors."""
    if not role.startswith("factor"):
        return shape
    if len(shape) < 2:
        return ()
    return shape[:-1] if role == "factor" else (*shape[:-2], shape[-1])


def places_in(places: Sequence[SlotPlace], spec: ModelSpec, layout: ShardLayout) -> list[SlotPlace]:
    """Return the keys and shapes of one shard server's optimizer slots.

    Args:
        places: Keys and shapes of the model's optimizer slots, numbered by variable.
        spec: Paths and shapes of the model's variables.
        layout: The layout (slices of variables) of the shard server.

    Returns:
        Keys and shapes of the slots, numbered by slice of the layout.
    """
    shard_places = [place for place in places if place.slice is None]
    by_tensor: dict[int | None, list[SlotPlace]] = {}
    for place in places:
        by_tensor.setdefault(place.slice, []).append(place)
    for number, piece in enumerate(layout.slices):
        whole = piece.size == spec.tensors[piece.tensor].size
        for place in by_tensor.get(piece.tensor, ()):
            shape = place.shape if whole else (piece.size,)
            shard_places.append(SlotPlace(number, place.role, shape))
    return shard_places


def slot_places(offer: Offer, layout: ShardLayout) -> list[list[SlotPlace]]:
    """Return, for each optimizer, the slots that a worker sends with a shard's initial weights.

    The slice number of an optimizer slot counts the shard server's slices of that optimizer's
    variables.

    Raises:
        ConfigurationError: One of the script's optimizers is not on the allow-list.
    """
    places = []
    for optimizer, numbers in zip(offer.optimizers, offer.groups(), strict=True):
        spec, (part, _) = part_of_spec(offer.spec, numbers), part_of_layout(layout, numbers)
        places.append(places_in(planned(optimizer, spec), spec, part))
    return places


def num_values(places: Sequence[SlotPlace]) -> int:
    """Return the total number of values in optimizer slots of the given shapes."""
    return sum(math.prod(place.shape) for place in places)


def join(slots: Sequence[Slot], places: Sequence[SlotPlace]) -> Float32:
    """Join optimizer slots into one array [num_values] float32, in the order of `places`."""
    import numpy as np

    by_key = {(slot.slice, slot.role): slot.values for slot in slots}
    parts = [np.ravel(by_key[place.slice, place.role]) for place in places]
    return np.concatenate([np.empty(0, np.float32), *parts]).astype(np.float32, copy=False)


def divide(values: Float32, places: Sequence[SlotPlace]) -> list[Slot]:
    """Divide an array from `join` into optimizer slots; the slots' arrays are views."""
    slots, start = [], 0
    for place in places:
        stop = start + math.prod(place.shape)
        slots.append(Slot(place.slice, place.role, values[start:stop].reshape(place.shape)))
        start = stop
    return slots


def cut(slots: Sequence[Slot], spec: ModelSpec, layout: ShardLayout) -> list[Slot]:
    """Return the parts of a model's optimizer slots that belong to one shard server.

    Args:
        slots: Optimizer slots of the model, numbered by variable.
        spec: Paths and shapes of the model's variables.
        layout: The layout (slices of variables) of the shard server.

    Returns:
        Optimizer slots of the shard, numbered by slice of the layout.
    """
    by_tensor: dict[int | None, list[Slot]] = {}
    for slot in slots:
        by_tensor.setdefault(slot.slice, []).append(slot)
    parts = list(by_tensor.get(None, ()))
    for number, piece in enumerate(layout.slices):
        whole = piece.size == spec.tensors[piece.tensor].size
        for slot in by_tensor.get(piece.tensor, ()):
            values = slot.values if whole else slot.values.reshape(-1)[piece.start : piece.stop]
            parts.append(Slot(number, slot.role, values))
    return parts


def flat_slots(values: Float32, role: str, tensors: Sequence[TensorSpec]) -> list[Slot]:
    """Return the slots of one role of an optimizer of flat weights, one per variable slice.

    Args:
        values: [n] float32, the values of the slots, in the order of the flat weights.
        role: Role of the slots, for example "momentum".
        tensors: Shapes of the shard server's variable slices, in the order of the flat weights.
    """
    slots, start = [], 0
    for number, tensor in enumerate(tensors):
        part = values[start : start + tensor.size]
        slots.append(Slot(number, role, part.reshape(tensor.shape)))
        start += tensor.size
    return slots
