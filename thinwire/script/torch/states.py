"""The state of a torch optimizer: for the PS, from the PS, and for checkpoints of a worker."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from thinwire.ops.offer import Offer, OptimizerOffer
from thinwire.ops.optimizers.slots import Slot
from thinwire.ops.optimizers.torch_groups import groups_of
from thinwire.ops.types import ShardLayout, State
from thinwire.script.torch.optimizers import DistributedStep

#: Role of the slot with a parameter's step count, in torch and on the PS.
_STEP = "step"


class TorchSlots:
    """Slots of a torch optimizer that the PS steps, by parameter and torch's name.

    Args:
        optimizer: Optimizer of torch.
        offer: Its description for the PS.
        variables: The optimizer's shared parameters, in the order of the offer.
    """

    def __init__(self, optimizer: Any, offer: OptimizerOffer, variables: Sequence[Any]) -> None:
        self._optimizer, self._variables = optimizer, list(variables)
        self._groups = groups_of(offer.optimizer)

    def collect(self) -> list[Slot]:
        """Return copies of the slots, numbered by parameter; zeros where torch has none yet."""
        slots = []
        for role in self._groups.roles:
            for number, variable in enumerate(self._variables):
                value = self._optimizer.state.get(variable, {}).get(role)
                value = torch.zeros_like(variable) if value is None else value
                slots.append(Slot(number, role, value.detach().cpu().float().numpy().copy()))
        return slots

    def fill(
        self,
        layouts: Sequence[ShardLayout],
        parts: Sequence[Sequence[Slot]],
        rate: float | None = None,
    ) -> None:
        """Overwrite the optimizer's state with the slots from the shard servers.

        Args:
            layouts: The layout (slices of parameters) of every shard server.
            parts: The slots of every shard server, numbered by slice of its layout.
            rate: Not used: the numbers of torch's parameter groups are the script's own.
        """
        counts: dict[int, int] = {}
        whole: dict[tuple[int, str], Any] = {}
        for layout, slots in zip(layouts, parts, strict=True):
            for slot in slots:
                if slot.slice is None:
                    continue
                piece = layout.slices[slot.slice]
                if slot.role == _STEP:
                    counts[piece.tensor] = max(counts.get(piece.tensor, 0), int(slot.values))
                    continue
                empty = np.zeros(self._variables[piece.tensor].numel(), np.float32)
                values = whole.setdefault((piece.tensor, slot.role), empty)
                values[piece.start : piece.start + piece.size] = np.ravel(slot.values)
        for number, variable in enumerate(self._variables):
            if counts.get(number, 0):
                self._set(variable, number, counts[number], whole)

    def _set(
        self, variable: Any, number: int, count: int, whole: dict[tuple[int, str], Any]
    ) -> None:
        state = self._optimizer.state[variable]
        for role in self._groups.roles:
            values = torch.from_numpy(whole[number, role]).view(variable.shape)
            state[role] = values.to(variable.device)
        if self._groups.kind != "SGD":
            state[_STEP] = torch.tensor(float(count))


def slots_of(offer: Offer, optimizers: Sequence[Any], variables: Sequence[Any]) -> list[TorchSlots]:
    """Return the slots of a script's torch optimizers that a PS runs."""
    return [
        TorchSlots(optimizer, described, [variables[number] for number in numbers])
        for optimizer, described, numbers in zip(
            optimizers, offer.optimizers, offer.groups(), strict=True
        )
    ]


class TorchState:
    """State of a torch optimizer; see `thinwire.script.kept_state.KeptOptimizer`.

    The numbers of the parameter groups are not part of it: a restarted script sets them again, by
    its own learning-rate scheduler.

    Args:
        optimizer: Optimizer of torch.
        name: Name of the class with which the script made it.
    """

    def __init__(self, optimizer: Any, name: str) -> None:
        self._optimizer, self.name = optimizer, name

    @property
    def _parameters(self) -> list[Any]:
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def values(self) -> State:
        """Return the state of the parameters, as bytes that torch loads without running code.

        Raises:
            OSError: torch cannot save the state: the optimizer keeps more than numbers and tensors.
        """
        saved = io.BytesIO()
        try:
            plain = _plain_state_dict(self._optimizer)["state"]
            torch.save(plain, saved)
            torch.load(io.BytesIO(saved.getvalue()), weights_only=True)
        except (pickle.PickleError, TypeError, RuntimeError, AttributeError) as error:
            reason = f"{error!s:.200}".splitlines()[0]
            raise OSError(f"torch cannot save the state of {self.name}: {reason}") from error
        return {
            "shapes": [list(parameter.shape) for parameter in self._parameters],
            "state": np.frombuffer(saved.getvalue(), np.uint8).copy(),
        }

    def fits(self, saved: State) -> bool:
        """Return True if a saved state is of parameters with the same shapes."""
        return saved.get("shapes") == [list(parameter.shape) for parameter in self._parameters]

    def load(self, saved: State, keeps_rate: bool) -> None:
        """Load a saved state; the numbers of the parameter groups stay the script's own."""
        state = torch.load(io.BytesIO(saved["state"].tobytes()), weights_only=True)
        own = _plain_state_dict(self._optimizer)
        _loader_of(self._optimizer)({"state": state, "param_groups": own["param_groups"]})


def _plain_state_dict(optimizer: Any) -> dict[str, Any]:
    """Return the state of the optimizer's own class, without a question to the PS."""
    state: dict[str, Any] = super(DistributedStep, optimizer).state_dict()
    return state


def _loader_of(optimizer: Any) -> Any:
    """Return the method load_state_dict of the optimizer's own class."""
    return super(DistributedStep, optimizer).load_state_dict
