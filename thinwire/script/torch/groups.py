"""Describes an optimizer of torch, with its parameter groups, for the parameter server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from thinwire.ops.methods.method import Method
from thinwire.ops.optimizers.torch_groups import (
    MOST_GROUPS,
    RULES,
    TorchGroups,
    is_legal,
    limits_of,
)
from thinwire.ops.types import ConfigurationError
from thinwire.script.torch.optimizers import SteppedOptimizer

#: Ways out for an optimizer that the parameter server cannot step.
_WAYS_OUT = (
    "Take a method whose workers step themselves, with any optimizer: --method=dgs, "
    "--method=diloco, --method=sparseloco or --method=esync."
)
#: Rate below 0 that a scheduler's rounding may leave, which counts as 0.
_ROUNDING = 1e-9


def check_for_server(optimizer: Any, kind: type) -> None:
    """Reject an optimizer whose steps the PS must take but cannot.

    Args:
        optimizer: Optimizer of torch.
        kind: Class with which the script made the optimizer.

    Raises:
        ConfigurationError: The class is not torch's SGD, Adam or AdamW.
    """
    if kind not in [getattr(torch.optim, name) for name in RULES]:
        raise ConfigurationError(
            f"the optimizer is a {kind.__module__}.{kind.__qualname__}, which a PS cannot step: "
            f"expected {', '.join(f'torch.optim.{name}' for name in RULES)}. {_WAYS_OUT}"
        )
    if len(optimizer.param_groups) > MOST_GROUPS:
        raise ConfigurationError(
            f"{kind.__name__} has {len(optimizer.param_groups)} parameter groups; expected at most "
            f"{MOST_GROUPS}, which a PS keeps apart. Join groups with equal settings. {_WAYS_OUT}"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ConfigurationError(
            f"{kind.__name__}(differentiable=True) cannot be stepped by a PS, which records no "
            f"gradients of its steps; expected differentiable=False. {_WAYS_OUT}"
        )


def groups_of_optimizer(optimizer: Any, kind: type, shared: Sequence[Any]) -> TorchGroups:
    """Return the description of an optimizer's parameter groups.

    Args:
        optimizer: Optimizer of torch.
        kind: Class with which the script made the optimizer.
        shared: Parameters of the optimizer that all workers train.
    """
    steps = tuple(_num_steps(optimizer.state.get(parameter, {})) for parameter in shared)
    name = kind.__name__
    group_of = {
        id(parameter): number
        for number, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    switches = tuple(
        {switch: _switch(group, switch, name) for switch in RULES[name][1]}
        for group in optimizer.param_groups
    )
    numbers = tuple(group_of[id(parameter)] for parameter in shared)
    return TorchGroups(name, switches, numbers_now(optimizer, name), numbers, steps)


def numbers_now(optimizer: Any, name: str) -> tuple[float, ...]:
    """Return the present numbers of all parameter groups, in the order of `torch_groups.RULES`.

    Args:
        optimizer: Optimizer of torch.
        name: Name of its class in torch.optim.

    Raises:
        ConfigurationError: The script has set a number that the PS does not accept.
    """
    values = []
    for number, group in enumerate(optimizer.param_groups):
        for setting in RULES[name][0]:
            value = _number(group, setting)
            low, high = limits_of(setting)
            value = low if low - _ROUNDING < value < low else value
            if not is_legal(value, (low, high)):
                raise ConfigurationError(
                    f"{name}: parameter group {number} has {setting}={value:g}; expected a number "
                    f"from {low:g} to {high:g}."
                )
            values.append(value)
    return tuple(values)


def check_numbers(groups: TorchGroups, settings: Sequence[float]) -> None:
    """Reject numbers of groups that begin to need arrays or decay after the first step.

    The PS has decided by the first numbers which arrays the optimizer needs, and whether its steps
    keep sparse pushes sparse.

    Raises:
        ConfigurationError: SGD's momentum, or its weight decay without momentum, was 0 in all
            groups before the first step and is not any more.
    """
    if groups.kind != "SGD" or groups.roles:
        return
    for name in ("momentum", "weight_decay"):
        if any(groups.named(name, settings)) and not any(groups.named(name)):
            raise ConfigurationError(
                f"the script has set SGD's {name} after the first step, but it was 0 for that "
                "step; expected another number than 0 in at least one group from the beginning."
            )


def momentum_for(steps: Sequence[SteppedOptimizer], method: Method) -> float:
    """Return SGD's momentum if the training method applies it on the workers, else 0.

    Args:
        steps: All optimizers of the script.
        method: Training method of the run.

    Raises:
        ConfigurationError: The groups of SGD have different momenta.
    """
    is_sgd = len(steps) == 1 and steps[0].kind is torch.optim.SGD
    if not (is_sgd and method.takes_momentum):
        return 0.0
    groups = steps[0].optimizer.param_groups
    momenta = {float(group["momentum"]) for group in groups}
    if len(momenta) > 1:
        raise ConfigurationError(
            f"SGD's parameter groups have the momenta {sorted(momenta)}, but with this method the "
            "workers' codecs apply one momentum to all weights; expected equal momenta."
        )
    # the codecs' momentum knows neither Nesterov's step nor dampening
    is_other = any(group["nesterov"] or group["dampening"] for group in groups)
    return 0.0 if is_other else momenta.pop()


def _num_steps(state: dict[str, Any]) -> int:
    """Return how many steps a parameter has taken; SGD only knows whether there was one."""
    if "step" in state:
        return int(state["step"])
    return int(state.get("momentum_buffer") is not None)


def _number(group: dict[str, Any], name: str) -> float:
    """Return a number of a parameter group; torch has Adam's betas as one pair."""
    if name.startswith("beta_"):
        return float(group["betas"][int(name[-1]) - 1])
    return float(group[name])


def _switch(group: dict[str, Any], name: str, kind: str) -> bool:
    default = kind == "AdamW" and name == "decoupled_weight_decay"
    return bool(group.get(name, default))
