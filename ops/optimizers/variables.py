"""A Keras optimizer that steps the variables of a shard, with their names' rules and their shapes.

The weights of a shard are one flat buffer; the optimizer's variables are copies of it, written back
after each step. An optimizer whose step of an entry depends on that entry alone steps all entries
that are treated alike as one flat variable, which takes a third of the time; any other steps whole
variables in their shapes. XLA fuses the passes over many entries that are treated alike.

Source: design, section 11.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
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
    variable_name,
)
from thinwire.ops.types import ModelSpec, State, TensorSpec, Update

if TYPE_CHECKING:
    from thinwire.ops.types import Float32

#: With fewer entries XLA saves less than 0.2 ms a step, and its program takes 0.1 s to make.
FEWEST_FOR_XLA = 1 << 16


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

        from thinwire.ops.kernels.numpy_ops import aligned

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
        self._fuses = is_elementwise(described)
        self._step = self._traced()
        self._rate: float | None = None  # what the optimizer's variable holds
        self._grouped = aligned(len(theta)) if self._is_mixed else None

    @property
    def _is_mixed(self) -> bool:
        """Whether the slices of the groups, one group after the other, are in another order."""
        order = [number for group in self._groups for number in group.slices]
        return order != sorted(order)

    def _traced(self) -> Callable[[Any], Any]:
        """Return the step as one graph, from a gradient [n], group by group, to the weights."""
        import tensorflow as tf

        sizes = [group.size for group in self._groups]
        used = any(not group.unused for group in self._groups)

        def step(gradient: Any) -> Any:
            if used:
                gradients = [
                    None if group.unused else tf.reshape(piece, group.shape)
                    for group, piece in zip(self._groups, tf.split(gradient, sizes), strict=True)
                ]
                self.optimizer.apply(gradients, self.variables)
            else:
                self.optimizer._iterations.assign_add(1)
            values = [tf.reshape(variable.value, [-1]) for variable in self.variables]
            return [] if self._fuses else [tf.concat(values, 0)]

        # XLA fuses the passes over few large variables; of many small ones, and of copies between
        # them, it makes slower programs.
        function: Any = tf.function(
            step,
            input_signature=[tf.TensorSpec((sum(sizes),), tf.float32)],
            autograph=False,  # Keras applies an optimizer so, too
            jit_compile=self._fuses and sum(sizes) >= FEWEST_FOR_XLA,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that unused variables have no gradient is known
            traced: Callable[[Any], Any] = function.get_concrete_function()
        return traced  # a third less time to call than the function, which looks for it each time

    def step(self, theta: Any, update: Update, rate: float, negate: bool) -> None:
        """Apply one gradient [n] or sparse update, or its opposite; `theta` gets the result.

        Weights and a dense gradient may be `thinwire.ops.kernels.device.DeviceArray`s.
        """
        import numpy as np

        gradient = update.values
        if update.indices is not None:
            gradient = np.zeros_like(theta)
            gradient[update.indices] = update.values
        if rate != self._rate:  # setting a variable costs half as much as a small step
            self.optimizer.learning_rate.assign(rate)
            self._rate = rate
        stepped = self._step(_as_tensor(self._by_group(-gradient if negate else gradient)))
        if not isinstance(theta, np.ndarray):
            theta[:] = self._on_device()
            return
        if stepped:
            np.copyto(theta, np.asarray(memoryview(stepped[0])))  # a view of the tensor: one copy
            return
        for group, variable in zip(self._groups, self.variables, strict=True):
            values = np.asarray(memoryview(variable.value.value())).reshape(-1)
            for place, own in self._places(group):
                theta[place] = values[own]

    def _on_device(self) -> Any:
        """Return the weights [n], a `thinwire.ops.kernels.device.DeviceArray`."""
        import tensorflow as tf

        from thinwire.ops.kernels.device import DeviceArray

        found: dict[int, Any] = {}
        for group, variable in zip(self._groups, self.variables, strict=True):
            sizes = [self._spec.tensors[number].size for number in group.slices]
            flat = tf.reshape(variable.value, [-1])
            found |= zip(group.slices, tf.split(flat, sizes), strict=True)
        return DeviceArray(tf.concat([found[number] for number in range(len(found))], 0))

    def _by_group(self, flat: Float32) -> Float32:
        """Return entries [n] group by group; valid until the next call."""
        if self._grouped is None:
            return flat
        start = 0
        for group in self._groups:
            for place, own in self._places(group):
                self._grouped[start + own.start : start + own.stop] = flat[place]
            start += group.size
        return self._grouped

    def _places(self, group: _Group) -> list[tuple[slice, slice]]:
        """Return where each of a group's slices lies in the shard, and in the group."""
        offsets, found, start = self._spec.offsets, [], 0
        if len(group.slices) == len(self._spec.tensors):
            return [(slice(0, group.size), slice(0, group.size))]
        for number in group.slices:
            size = self._spec.tensors[number].size
            found.append((slice(offsets[number], offsets[number + 1]), slice(start, start + size)))
            start += size
        return found

    def set_weights(self, theta: Float32) -> None:
        """Go on from these weights [n]; the slots stay."""
        offsets = self._spec.offsets
        for group, variable in zip(self._groups, self.variables, strict=True):
            parts = [theta[offsets[number] : offsets[number + 1]] for number in group.slices]
            variable.assign(_joined(parts, group.shape))

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

    def changing(self) -> Sequence[Any]:
        """Return nothing: `save` copies Keras' variables."""
        return ()

    def save(self, keep: Keep = copied) -> State:
        """Return copies of every slot, the step counter included."""
        del keep
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


def _joined(parts: Sequence[Any], shape: tuple[int, ...]) -> Any:
    """Return arrays one after the other in a shape, where they are: on the host or the device."""
    import numpy as np

    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts).reshape(shape)
    import tensorflow as tf

    return tf.reshape(tf.concat([_as_tensor(each) for each in parts], 0), shape)


def _as_tensor(values: Any) -> Any:
    """Return a tensor [n] of a buffer [n], without a copy where it lies on a 64-byte border.

    The tensor may share the buffer's memory: neither may change while it is in use.
    """
    import numpy as np
    import tensorflow as tf

    if not isinstance(values, np.ndarray):
        return values.value  # of a `DeviceArray`
    if values.ctypes.data % 64 or not values.flags.writeable:
        return tf.convert_to_tensor(values)
    return tf.experimental.dlpack.from_dlpack(values.__dlpack__())
