"""A Keras optimizer that steps a shard server's variables, with settings for single variables.

The weights of a shard server are stored in one flat array. The optimizer's Keras variables contain
copies of the shard server's weights, and each step writes the new weights back to the flat buffer.
In an elementwise optimizer, the step of a weight depends only on that weight's gradient and
optimizer slots. For an elementwise optimizer, one flat Keras variable contains all weights with
equal rules (weight decay, constraints), which takes a third of the time of separate variables. An
optimizer that is not elementwise steps whole variables in their shapes.

Source: design, section 11.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from thinwire.ops.frozen import Keep, copied
from thinwire.ops.offer import Described
from thinwire.ops.optimizers import allow_list
from thinwire.ops.optimizers.described import build_constraint, build_optimizer
from thinwire.ops.optimizers.slots import (
    BY_ADAMW,
    ITERATION,
    LEARNING_RATE,
    Slot,
    roles_of,
    values_of,
    variable_name,
)
from thinwire.ops.optimizers.steps import SteppedVariables, steps_of_backend
from thinwire.ops.types import Float32, ModelSpec, State, TensorSpec, Update

if TYPE_CHECKING:
    from thinwire.ops.optimizers.adam import FlatAdam


@dataclasses.dataclass(frozen=True)
class VariableRules:
    """Exceptions in an optimizer's treatment of single variables, by variable path.

    Attributes:
        without_decay: Paths of variables without weight decay.
        by_adamw: Paths of variables that the optimizer Muon steps with AdamW.
        constraints: Path of a variable -> Keras constraint, for variables with a constraint.
        unused: Paths of variables without a gradient, which neither steps nor weight decay change.
    """

    without_decay: tuple[str, ...] = ()
    by_adamw: tuple[str, ...] = ()
    constraints: Mapping[str, Described] = dataclasses.field(default_factory=dict)
    unused: tuple[str, ...] = ()


NO_RULES = VariableRules()
#: Arguments of Keras' Adam with which its steps need no Keras: its factors, its name, and arguments
#: that have no effect while `use_ema` is False.
_OF_PLAIN_ADAM = {
    *("learning_rate", "beta_1", "beta_2", "epsilon", "name"),
    *("ema_momentum", "ema_overwrite_frequency"),
}


def is_elementwise(described: Described) -> bool:
    """Return True if an optimizer steps each weight by only that weight's gradient and slots."""
    return described.name in allow_list.ELEMENTWISE and not described.config.get("clipnorm")


def is_plain_adam(described: Described, rules: VariableRules = NO_RULES) -> bool:
    """Return True if the steps are Keras' Adam without any option, which needs no Keras.

    Keras does not step unused variables, also if they have moments from earlier steps.
    """
    options = {name for name, value in described.config.items() if value}
    has_rules = bool(rules.constraints or rules.unused)
    return described.name == "Adam" and not has_rules and options <= _OF_PLAIN_ADAM


def optimizer_of(
    described: Described,
    theta: Float32,
    spec: ModelSpec | None = None,
    rules: VariableRules = NO_RULES,
) -> VariablesOptimizer | FlatAdam:
    """Return the optimizer that steps a shard server's weights; see `VariablesOptimizer`.

    Weights in a GPU's memory are stepped by Keras there.
    """
    import numpy as np

    if is_plain_adam(described, rules) and isinstance(theta, np.ndarray):
        from thinwire.ops.optimizers.adam import FlatAdam

        return FlatAdam(described, theta, _known(spec, theta).tensors)
    return VariablesOptimizer(described, theta, spec, rules)


def _known(spec: ModelSpec | None, theta: Float32) -> ModelSpec:
    """Return the variable slices of a shard server; without a spec, all weights are one slice."""
    return spec or ModelSpec((TensorSpec("shard", (len(theta),)),))


class VariablesOptimizer:
    """A Keras optimizer for a shard server's flat weights [n].

    Attributes:
        optimizer: Keras optimizer that steps the shard server's weights.
        variables: The Keras variables that the optimizer steps. Each Keras variable contains a
            group of the shard server's variable slices.
    """

    def __init__(
        self,
        described: Described,
        theta: Float32,
        spec: ModelSpec | None = None,
        rules: VariableRules = NO_RULES,
    ) -> None:
        """Build the optimizer with its slots for the weights `theta` [n] float32.

        Args:
            described: Class and arguments of the Keras optimizer. The learning rate is an argument
                of `step`.
            theta: [n] float32, the shard server's weights.
            spec: Path and shape of each variable slice of the shard server; a slice that is a part
                of a variable is flat. None means that all weights are one flat slice.
            rules: Exceptions of the optimizer for some variables (no weight decay and others), by
                path.

        Raises:
            ConfigurationError: The optimizer or a constraint is not on the allow-list.
        """
        import keras

        from thinwire.ops.kernels.numpy_ops import aligned

        self._spec = _known(spec, theta)
        self._groups = _groups(self._spec.tensors, described, rules)
        self._steps_class = steps_of_backend(keras.backend.backend())
        with self._steps_class.device():
            self._build(described, theta)
        unused = [group.unused for group in self._groups]
        self._steps = self._steps_class(
            SteppedVariables(self.optimizer, self.variables, unused, is_elementwise(described))
        )
        self._rate: float | None = None  # learning rate in the optimizer's variable; None: unknown
        self._grouped = aligned(len(theta)) if self._is_mixed else None

    def _build(self, described: Described, theta: Float32) -> None:
        """Build the optimizer, and one Keras variable with the weights of each group."""
        import keras

        self.optimizer = build_optimizer(described, BY_ADAMW)
        self.variables = []
        for number, group in enumerate(self._groups):
            values = theta[: group.size].reshape(group.shape)
            name = variable_name(number, group.by_adamw)
            self.variables.append(keras.Variable(values, name=name))
            if group.constraint is not None:
                self.variables[-1].constraint = build_constraint(group.constraint)
        self.set_weights(theta)
        decayed = (group.decays for group in self._groups)
        exempt = [v for v, decays in zip(self.variables, decayed, strict=True) if not decays]
        if exempt:
            self.optimizer.exclude_from_weight_decay(var_list=exempt)
        self.optimizer.build(self.variables)

    @property
    def _is_mixed(self) -> bool:
        """True if the variable slices, listed by group, are not in the shard server's order."""
        order = [number for group in self._groups for number in group.slices]
        return order != sorted(order)

    def step(self, theta: Any, update: Update, rate: float, negate: bool) -> None:
        """Apply one update to the optimizer's variables and write the new weights into `theta`.

        Args:
            theta: [n] float32, the shard server's weights; may be a
                `thinwire.ops.kernels.device.DeviceArray`.
            update: A dense gradient [n] or a sparse update. A dense gradient may be a DeviceArray.
            rate: Learning rate of the optimizer step.
            negate: True if `update` is a change of weights, which has the sign of a negative
                gradient.
        """
        import numpy as np

        gradient = update.dense(len(theta))
        with self._steps_class.device():
            # assigning the learning rate takes half the time of a small optimizer step
            if rate != self._rate:
                self.optimizer.learning_rate.assign(rate)
                self._rate = rate
            stepped = self._steps.step(self._by_group(-gradient if negate else gradient))
        if not isinstance(theta, np.ndarray):
            tensors = self._spec.tensors
            numbers = [[(n, tensors[n].size) for n in group.slices] for group in self._groups]
            theta[:] = self._steps.on_device(numbers)
            return
        if stepped is not None:
            np.copyto(theta, stepped)
            return
        for number, group in enumerate(self._groups):
            values = self._steps.values(number)
            for place, part in self._places(group):
                theta[place] = values[part]

    def _by_group(self, flat: Float32) -> Float32:
        """Return `flat` [n] in the order of the slices' groups; the next call overwrites it."""
        if self._grouped is None:
            return flat
        start = 0
        for group in self._groups:
            for place, part in self._places(group):
                self._grouped[start + part.start : start + part.stop] = flat[place]
            start += group.size
        return self._grouped

    def _places(self, group: _Group) -> list[tuple[slice, slice]]:
        """Return the range in the shard's weights, and in the group, of each slice of a group."""
        offsets, places, start = self._spec.offsets, [], 0
        if len(group.slices) == len(self._spec.tensors):
            return [(slice(0, group.size), slice(0, group.size))]
        for number in group.slices:
            size = self._spec.tensors[number].size
            places.append((slice(offsets[number], offsets[number + 1]), slice(start, start + size)))
            start += size
        return places

    def assign(self, variable: Any, parts: Sequence[Any]) -> None:
        """Copy flat arrays, one after another, into a variable of the optimizer."""
        with self._steps_class.device():
            self._steps_class.assign(variable, parts)

    def set_weights(self, theta: Float32) -> None:
        """Step from the weights `theta` [n]; do not change the optimizer's slots."""
        offsets = self._spec.offsets
        for group, variable in zip(self._groups, self.variables, strict=True):
            self.assign(variable, [theta[offsets[n] : offsets[n + 1]] for n in group.slices])

    def set_iterations(self, count: int) -> None:
        """Set the optimizer's step count."""
        import numpy as np

        self.assign(self.optimizer._iterations, [np.array([count], np.int64)])

    def slots(self) -> list[Slot]:
        """Return the optimizer's slots, numbered by variable slice, without the learning rate.

        The optimizer slots of one variable slice are in Keras' order.
        """
        slots = []
        for variable, (number, role) in zip(
            self.optimizer.variables, roles_of(self.optimizer), strict=True
        ):
            values = values_of(variable)
            if number is None:
                if role != LEARNING_RATE:
                    slots.append(Slot(None, role, values))
            else:
                slots += self._groups[number].cut(values, role, self._spec.tensors)
        return slots

    def load(self, slots: Sequence[Slot]) -> None:
        """Overwrite the optimizer's slots, except its step count, by the result of `slots`.

        Raises:
            KeyError: A slot of the optimizer is missing in the argument `slots`.
        """
        import numpy as np

        values_by_key = {(slot.slice, slot.role): slot.values for slot in slots}
        roles = roles_of(self.optimizer)
        for variable, (number, role) in zip(self.optimizer.variables, roles, strict=True):
            if number is None and role in (LEARNING_RATE, ITERATION):
                continue
            pieces = [None] if number is None else self._groups[number].slices
            self.assign(variable, [np.ravel(values_by_key[piece, role]) for piece in pieces])

    def save(self, keep: Keep = copied) -> State:
        """Return copies of the optimizer's slots, step count and learning rate."""
        return {str(i): values_of(v) for i, v in enumerate(self.optimizer.variables)}

    def restore(self, slots: State | None, theta: Float32) -> None:
        """Step from the weights `theta` [n], with slots that `save` returned; None: same slots."""
        import numpy as np

        self._rate = None
        self.set_weights(theta)
        if slots is not None:
            for number, variable in enumerate(self.optimizer.variables):
                self.assign(variable, [np.ravel(slots[str(number)])])


@dataclasses.dataclass(frozen=True)
class _Group:
    """Variable slices of a shard server that are stepped as one Keras variable."""

    slices: tuple[int, ...]  # numbers of the variable slices, ascending
    size: int  # number of weights of all variable slices in the group
    shape: tuple[int, ...]  # shape of the Keras variable of the group
    decays: bool
    by_adamw: bool
    unused: bool
    constraint: Described | None

    def cut(self, values: Any, role: str, tensors: Sequence[TensorSpec]) -> list[Slot]:
        """Cut an optimizer slot of the group's Keras variable into one slot per variable slice."""
        if values.shape != self.shape or len(self.slices) == 1:
            return [Slot(number, role, values) for number in self.slices]
        slots, start, flat = [], 0, values.reshape(-1)
        for number in self.slices:
            tensor = tensors[number]
            part = flat[start : start + tensor.size]
            slots.append(Slot(number, role, part.reshape(tensor.shape)))
            start += tensor.size
        return slots


def _groups(
    tensors: Sequence[TensorSpec], described: Described, rules: VariableRules
) -> list[_Group]:
    """Group a shard server's variable slices; each group is stepped as one Keras variable.

    For an elementwise optimizer, variable slices with equal rules (weight decay and others) form a
    group. For an optimizer that is not elementwise, each variable slice is a group. A variable
    slice with a Keras constraint is always a group of one, because the constraint needs the slice's
    shape.
    """
    together = is_elementwise(described)
    slices_by_key: dict[Any, list[int]] = {}
    for number, tensor in enumerate(tensors):
        apart = not together or tensor.path in rules.constraints
        alike = (tensor.path in rules.without_decay, tensor.path in rules.unused)
        slices_by_key.setdefault(number if apart else alike, []).append(number)
    groups = []
    for numbers in slices_by_key.values():
        first = tensors[numbers[0]]
        size = sum(tensors[number].size for number in numbers)
        groups.append(
            _Group(
                tuple(numbers),
                size,
                first.shape if len(numbers) == 1 else (size,),
                decays=first.path not in rules.without_decay,
                by_adamw=first.path in rules.by_adamw,
                unused=first.path in rules.unused,
                constraint=rules.constraints.get(first.path),
            )
        )
    return groups
