"""Torch's SGD, Adam and AdamW on the parameter server, in numpy: no shard imports torch.

Each parameter has its own step count, because torch's optimizers leave a parameter without a
gradient as it is: without decay, momentum or a counted step.

Source: `_single_tensor_sgd` and `_single_tensor_adam` of torch 2.13, in float32. Differences: torch
may fuse a product and a sum to one rounding, which this module does not, so that results may differ
in the last bit.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from thinwire.ops.frozen import Keep, copied
from thinwire.ops.kernels.base import Kernels
from thinwire.ops.offer import OptimizerOffer
from thinwire.ops.optimizers.base import Moment, OptimizerTraits, ServerUpdate, StepRate
from thinwire.ops.optimizers.slots import Slot, flat_slots
from thinwire.ops.optimizers.torch_groups import TorchGroups, groups_of
from thinwire.ops.types import (
    ConfigurationError,
    Float32,
    Int64,
    Kind,
    ModelSpec,
    State,
    TensorSpec,
    Update,
)

#: Number of array entries per chunk, so that the arrays of a chunk fit into a second-level cache.
_PIECE = 1 << 15
#: Role of the slot with the number of steps of one parameter.
STEP = "step"
_F = np.float32
_Arrays = Mapping[str, Float32]


@dataclasses.dataclass(frozen=True)
class _SteppedSlice:
    """A variable slice of a shard: its range in the flat weights, its parameter and its group."""

    start: int
    stop: int
    parameter: int
    group: int


@dataclasses.dataclass(frozen=True)
class TorchUpdate(ServerUpdate):
    """Policy for one optimizer of a torch script, with which the PS steps for all workers.

    Attributes:
        offer: The worker's description of the optimizer. Its `paths` are in the order of the
            optimizer's parameters.
        initial: Slots of the shard from steps that the script did before the run, numbered by
            variable slice. Empty for a new optimizer.
    """

    offer: OptimizerOffer
    initial: Sequence[Slot] = dataclasses.field(default=(), compare=False, repr=False)

    @staticmethod
    def of(offer: OptimizerOffer, initial: Sequence[Slot] = ()) -> TorchUpdate:
        """Return the policy for an optimizer in an offer. Raises ConfigurationError."""
        update = TorchUpdate(offer, initial)
        sizes = {len(offer.paths), len(update.groups.group_of), len(update.groups.steps)}
        if len(sizes) > 1:
            raise ConfigurationError(
                f"{offer.optimizer.name} has {sizes} paths, groups and steps of parameters; "
                "expected a path for each parameter, its group and its steps."
            )
        return update

    @functools.cached_property
    def groups(self) -> TorchGroups:
        """The optimizer's parameter groups; raises ConfigurationError for an illegal offer."""
        return groups_of(self.offer.optimizer)

    @property
    def traits(self) -> OptimizerTraits:
        """Properties of the optimizer: only SGD without momentum and decay keeps sparse updates."""
        return OptimizerTraits(keeps_sparse=self._is_plain, setting_limits=(self.groups.limits,))

    @property
    def _is_plain(self) -> bool:
        groups = self.groups
        decays = any(groups.named("weight_decay"))
        return groups.kind == "SGD" and not groups.roles and not decays

    def init(self, theta: Float32, spec: ModelSpec | None = None) -> State:
        """Return the optimizer's state for the shard's flat weights `theta` [n]."""
        known = spec or ModelSpec((TensorSpec(self.offer.paths[0], (len(theta),)),))
        numbers = {path: number for number, path in enumerate(self.offer.paths)}
        parameters = [numbers[tensor.path] for tensor in known.tensors]
        offsets, group_of = known.offsets, self.groups.group_of
        state: State = {
            "settings": self.groups.settings,
            "without": frozenset(),
            "steps": np.array([self.groups.steps[n] for n in parameters], np.int64),
            **{role: np.zeros(len(theta), np.float32) for role in self.groups.roles},
            "parts": [
                _SteppedSlice(offsets[n], offsets[n + 1], parameter, group_of[parameter])
                for n, parameter in enumerate(parameters)
            ],
            "tensors": known.tensors,
        }
        for slot in self.initial:
            if slot.slice is not None and slot.role in self.groups.roles:
                part = state["parts"][slot.slice]
                state[slot.role][part.start : part.stop] = np.ravel(slot.values)
        return state

    def check_rates(
        self, firsts: Sequence[int], most_updates: int | None, most_batches: int | None
    ) -> None:
        """Do nothing: the script evaluates its learning-rate schedulers itself."""

    def rate(self, moment: Moment, state: State, number: int = 0) -> StepRate:
        """Take the numbers of a push; return the learning rate of the first parameter group."""
        if moment.settings:
            state["settings"] = tuple(moment.settings)
            state["without"] = frozenset(moment.without_gradient)
        return StepRate(float(state["settings"][0]), moment.batches)

    def step(
        self,
        theta: Float32,
        update: Update,
        kind: Kind,
        rate: float,
        kernels: Kernels,
        state: State,
        number: int = 0,
    ) -> tuple[Int64 | None, State]:
        """Apply a gradient to the weights `theta` in place; `ServerUpdate.step` has the details."""
        stepped = [part for part in state["parts"] if part.parameter not in state["without"]]
        numbers = {part.parameter for part in stepped}
        for n, part in enumerate(state["parts"]):
            state["steps"][n] += part.parameter in numbers and self._counts(part, state)
        if self._is_plain and update.indices is not None:
            rates = self._rates(state, len(theta))[update.indices]
            np.subtract.at(theta, update.indices, rates * update.values)
            return update.indices, state
        gradient, rule = update.dense(len(theta)), _sgd if self.groups.kind == "SGD" else _adam
        for n, part in enumerate(state["parts"]):
            if part.parameter not in numbers:
                continue
            group = self.groups.of_group(part.group, state["settings"])
            switches, count = self.groups.switches[part.group], int(state["steps"][n])
            for start in range(part.start, part.stop, _PIECE):
                piece = slice(start, min(start + _PIECE, part.stop))
                arrays = {role: state[role][piece] for role in self.groups.roles}
                rule(theta[piece], gradient[piece], arrays, count, group, switches)
        return None, state

    def _counts(self, part: _SteppedSlice, state: State) -> bool:
        """Return True if a step counts: torch's SGD makes its buffer at the first with momentum."""
        if self.groups.kind != "SGD":
            return True
        return bool(self.groups.of_group(part.group, state["settings"])["momentum"])

    def _rates(self, state: State, size: int) -> Float32:
        """Return the learning rate of each weight, 0 for weights that the step leaves alone."""
        rates = np.zeros(size, np.float32)
        lrs = self.groups.named("lr", state["settings"])
        for part in state["parts"]:
            if part.parameter not in state["without"]:
                sign = -1 if self.groups.switches[part.group]["maximize"] else 1
                rates[part.start : part.stop] = sign * lrs[part.group]
        return rates

    def slots(self, state: State) -> list[list[Slot]]:
        """Return copies of the optimizer's slots, numbered by variable slice, as torch has them."""
        slots = [Slot(n, STEP, np.asarray(count)) for n, count in enumerate(state["steps"])]
        for role in self.groups.roles:
            slots += flat_slots(state[role].copy(), role, state["tensors"])
        return [slots]

    def save(self, state: State, keep: Keep = copied) -> State:
        """Return copies of the slots, step counts and numbers of the parameter groups."""
        arrays = {role: keep(state[role]) for role in self.groups.roles}
        plain = {"settings": list(state["settings"]), "without": sorted(state["without"])}
        return {**plain, "steps": keep(state["steps"]), **arrays}

    def restore(self, saved: State | None, theta: Float32, state: State) -> State:
        """Load a state that `save` returned; None leaves the state unchanged."""
        if saved is not None:
            for role in ("steps", *self.groups.roles):
                np.copyto(state[role], saved[role])
            state["settings"] = tuple(map(float, saved["settings"]))
            state["without"] = frozenset(map(int, saved["without"]))
        return state


def _sgd(
    theta: Float32,
    gradient: Float32,
    arrays: _Arrays,
    count: int,
    group: Mapping[str, float],
    switches: Mapping[str, bool],
) -> None:
    """Do step number `count` of torch's SGD on a piece of the weights, in place."""
    momentum = _F(group["momentum"])
    if switches["maximize"]:
        gradient = -gradient
    if group["weight_decay"]:
        gradient = gradient + _F(group["weight_decay"]) * theta
    if momentum and "momentum_buffer" in arrays:
        buffer = arrays["momentum_buffer"]
        # Torch's first buffer is the gradient itself, without dampening.
        if count == 1:
            buffer[:] = gradient
        else:
            buffer *= momentum
            buffer += _F(1 - group["dampening"]) * gradient
        gradient = gradient + momentum * buffer if switches["nesterov"] else buffer
    theta -= _F(group["lr"]) * gradient


def _adam(
    theta: Float32,
    gradient: Float32,
    arrays: _Arrays,
    count: int,
    group: Mapping[str, float],
    switches: Mapping[str, bool],
) -> None:
    """Do step number `count` of torch's Adam or AdamW on a piece of the weights, in place."""
    beta_1, beta_2, rate = group["beta_1"], group["beta_2"], group["lr"]
    if switches["maximize"]:
        gradient = -gradient
    if switches["decoupled_weight_decay"]:
        theta *= _F(1 - rate * group["weight_decay"])
    elif group["weight_decay"]:
        gradient = gradient + _F(group["weight_decay"]) * theta
    mean, square = arrays["exp_avg"], arrays["exp_avg_sq"]
    mean += _F(1 - beta_1) * (gradient - mean)
    square *= _F(beta_2)
    square += _F(1 - beta_2) * (gradient * gradient)
    if switches["amsgrad"]:
        square = np.maximum(arrays["max_exp_avg_sq"], square, out=arrays["max_exp_avg_sq"])
    # Python's numbers have 64 bits, as in torch: 1 - beta_2 ** count has few digits in float32.
    root = _F((1 - beta_2**count) ** 0.5)
    denominator: Any = np.sqrt(square) / root + _F(group["eps"])
    theta -= _F(rate / (1 - beta_1**count)) * (mean / denominator)
