"""A Keras optimizer that steps the variables of a shard, with their names' rules and their shapes.

The weights of a shard are one flat buffer; the optimizer's variables are copies of it, written back
after each step. An optimizer whose step of an entry depends on that entry alone steps all entries
that are treated alike as one flat variable, which takes a third of the time and no time to compile;
any other steps whole variables in their shapes.

Source: design, section 11.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from thinwire.ops.offer import Described
from thinwire.ops.optimizers import allow_list
from thinwire.ops.optimizers.described import build_constraint, build_optimizer
from thinwire.ops.optimizers.slots import (
    BY_ADAMW,
    ITERATION,
    LEARNING_RATE,
    Slot,
    roles_of,
    variable_name,
)
from thinwire.ops.types import ModelSpec, State, TensorSpec, Update

if TYPE_CHECKING:
    from thinwire.ops.types import Float32


@dataclasses.dataclass(frozen=True)
class VariableRules:
    """How some variables are treated, by path.

    Attributes:
        without_decay: Weight decay leaves them alone.
        by_adamw: A Muon leaves them to AdamW.
        constraints: Of those that have one.
        unused: They get no gradient, so that nothing steps or decays them.
    """

    without_decay: tuple[str, ...] = ()
    by_adamw: tuple[str, ...] = ()
    constraints: Mapping[str, Described] = dataclasses.field(default_factory=dict)
    unused: tuple[str, ...] = ()


NO_RULES = VariableRules()


def is_elementwise(described: Described) -> bool:
    """Return whether the step of an entry depends on that entry alone."""
    return described.name in allow_list.ELEMENTWISE and not described.config.get("clipnorm")


class VariablesOptimizer:
    """A Keras optimizer on a shard's weights.

    Attributes:
        optimizer: Keras' own.
        variables: What it steps, in the order of `_groups`.
    """

    def __init__(
        self,
        described: Described,
        theta: Float32,
        spec: ModelSpec | None = None,
        rules: VariableRules = NO_RULES,
    ) -> None:
        """Build the slots for `theta` [n] float32.

        Args:
            described: The optimizer; a learning rate is given with every step.
            theta: [n] float32.
            spec: What it holds, slice by slice: path and shape, flat where the slice is a part of
                a variable; not given: one slice.
            rules: About some of the paths.

        Raises:
            ConfigurationError: The optimizer or a constraint is not on the allow-list.
        """
        import keras

        self._spec = spec or ModelSpec((TensorSpec("shard", (len(theta),)),))
        self._groups = _groups(self._spec.tensors, described, rules)
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
        self._step = self._traced(len(theta), is_elementwise(described))
        self._rate: float | None = None  # what the optimizer's variable holds

    def _traced(self, size: int, compiles: bool) -> Callable[[Any], Any]:
        """Return the step as one graph, from a gradient [n] to the weights [n] after it."""
        import tensorflow as tf

        sizes = [tensor.size for tensor in self._spec.tensors]
        used = any(not group.unused for group in self._groups)

        def step(gradient: Any) -> Any:
            if not used:
                self.optimizer._iterations.assign_add(1)
                return self._flat(tf)
            pieces = [gradient] if len(sizes) == 1 else tf.split(gradient, sizes)
            gradients = [
                None if group.unused else group.join(pieces, gradient, tf) for group in self._groups
            ]
            self.optimizer.apply(gradients, self.variables)
            return self._flat(tf)

        # XLA fuses the passes over one flat variable; of many small ones it makes slower programs.
        function: Any = tf.function(
            step, input_signature=[tf.TensorSpec((size,), tf.float32)], jit_compile=compiles
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that unused variables have no gradient is known
            function.get_concrete_function()
        traced: Callable[[Any], Any] = function
        return traced

    def _flat(self, tf: Any) -> Any:
        """Return all weights [n] in the order of the shard."""
        values = [tf.reshape(variable.value, [-1]) for variable in self.variables]
        slices: dict[int, Any] = {}
        for group, value in zip(self._groups, values, strict=True):
            if len(group.slices) == len(self._spec.tensors):
                return value
            sizes = [self._spec.tensors[number].size for number in group.slices]
            slices |= zip(group.slices, tf.split(value, sizes), strict=True)
        return tf.concat([slices[number] for number in sorted(slices)], 0)

    def step(self, theta: Float32, update: Update, rate: float, negate: bool) -> None:
        """Apply one gradient [n] or sparse update, or its opposite; `theta` gets the result."""
        import numpy as np

        gradient = update.values
        if update.indices is not None:
            gradient = np.zeros_like(theta)
            gradient[update.indices] = update.values
        if rate != self._rate:  # setting a variable costs half as much as a small step
            self.optimizer.learning_rate.assign(rate)
            self._rate = rate
        stepped = self._step(_as_tensor(-gradient if negate else gradient))
        np.copyto(theta, np.asarray(memoryview(stepped)))  # a view of the tensor: one copy

    def set_weights(self, theta: Float32) -> None:
        """Go on from these weights [n]; the slots stay."""
        import numpy as np

        offsets = self._spec.offsets
        for group, variable in zip(self._groups, self.variables, strict=True):
            parts = [theta[offsets[number] : offsets[number + 1]] for number in group.slices]
            variable.assign(np.concatenate(parts).reshape(group.shape))

    def set_iterations(self, count: int) -> None:
        """Go on as if it had taken this many steps."""
        self.optimizer._iterations.assign(count)

    def slots(self) -> list[Slot]:
        """Return the state by slice, without the learning rate; in Keras' order of each slice."""
        found = []
        for variable, (number, role) in zip(
            self.optimizer.variables, roles_of(self.optimizer), strict=True
        ):
            values = variable.numpy()
            if number is None:
                if role != LEARNING_RATE:
                    found.append(Slot(None, role, values))
            else:
                found += self._groups[number].cut(values, role, self._spec.tensors)
        return found

    def load(self, slots: Sequence[Slot]) -> None:
        """Take over slots by slice, as `slots` returns them.

        Raises:
            KeyError: One is missing.
        """
        import numpy as np

        given = {(slot.slice, slot.role): slot.values for slot in slots}
        for variable, (number, role) in zip(
            self.optimizer.variables, roles_of(self.optimizer), strict=True
        ):
            if number is not None:
                parts = [np.ravel(given[each, role]) for each in self._groups[number].slices]
                variable.assign(np.concatenate(parts).reshape(variable.shape))
            elif role not in (LEARNING_RATE, ITERATION):
                variable.assign(given[None, role])

    def save(self) -> State:
        """Return copies of every slot, the step counter included."""
        return {str(i): v.numpy() for i, v in enumerate(self.optimizer.variables)}

    def restore(self, slots: State, theta: Float32) -> None:
        """Load what `save` returned, at weights `theta`."""
        self._rate = None
        self.set_weights(theta)
        for number, variable in enumerate(self.optimizer.variables):
            variable.assign(slots[str(number)])


@dataclasses.dataclass(frozen=True)
class _Group:
    """Slices that are one variable of the optimizer."""

    slices: tuple[int, ...]  # ascending
    size: int
    shape: tuple[int, ...]
    decays: bool
    by_adamw: bool
    unused: bool
    constraint: Described | None

    def join(self, pieces: Sequence[Any], whole: Any, tf: Any) -> Any:
        """Return the gradient of this variable, out of those of all slices and the whole [n]."""
        if len(self.slices) == len(pieces):
            return tf.reshape(whole, self.shape)
        parts = [pieces[number] for number in self.slices]
        return tf.reshape(parts[0] if len(parts) == 1 else tf.concat(parts, 0), self.shape)

    def cut(self, values: Any, role: str, tensors: Sequence[TensorSpec]) -> list[Slot]:
        """Return a slot by slice."""
        if values.shape != self.shape or len(self.slices) == 1:
            return [Slot(number, role, values) for number in self.slices]
        found, start, flat = [], 0, values.reshape(-1)
        for number in self.slices:
            tensor = tensors[number]
            part = flat[start : start + tensor.size]
            found.append(Slot(number, role, part.reshape(tensor.shape)))
            start += tensor.size
        return found


def _groups(
    tensors: Sequence[TensorSpec], described: Described, rules: VariableRules
) -> list[_Group]:
    """Return what the optimizer steps: slices that it treats alike together, or each by itself."""
    together = is_elementwise(described)
    found: dict[Any, list[int]] = {}
    for number, tensor in enumerate(tensors):
        apart = not together or tensor.path in rules.constraints
        alike = (tensor.path in rules.without_decay, tensor.path in rules.unused)
        found.setdefault(number if apart else alike, []).append(number)
    groups = []
    for numbers in found.values():
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


def _as_tensor(values: Float32) -> Any:
    """Return a tensor [n] of a buffer [n], without a copy where it lies on a 64-byte border.

    The tensor may share the buffer's memory: neither may change while it is in use.
    """
    import tensorflow as tf

    if values.ctypes.data % 64 or not values.flags.writeable:
        return tf.convert_to_tensor(values)
    return tf.experimental.dlpack.from_dlpack(values.__dlpack__())
