"""Description of a torch optimizer for the parameter server: its class and parameter groups.

A torch optimizer divides its parameters into groups, which have numbers (for example the learning
rate) and switches (for example Nesterov's momentum) of their own. A script, or its learning-rate
scheduler, may change the numbers before each step. So each push carries all numbers of all groups,
as one list; the switches stay as they were before the first step.

Source: `torch.optim.SGD`, `torch.optim.Adam` and `torch.optim.AdamW` of torch 2.13.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from thinwire.ops.offer import MAX_VARIABLES, Described
from thinwire.ops.types import ConfigurationError

#: Prefix of the class names of torch's optimizers in a description.
PREFIX = "torch.optim."
#: Largest number of parameter groups of one optimizer, and largest number of a group.
MOST_GROUPS, LARGEST_NUMBER = 1024, 1e6
#: Smallest and largest legal value of a number of a group. With a beta of 1, Adam divides by 0.
_USUAL, _BELOW_ONE = (0.0, LARGEST_NUMBER), (0.0, math.nextafter(1.0, 0.0))
_LIMITS = {
    "beta_1": _BELOW_ONE,
    "beta_2": _BELOW_ONE,
    "dampening": (-LARGEST_NUMBER, LARGEST_NUMBER),
}
_SGD_NUMBERS = ("lr", "momentum", "dampening", "weight_decay")
_ADAM_NUMBERS = ("lr", "beta_1", "beta_2", "eps", "weight_decay")
_ADAM_SWITCHES = ("amsgrad", "maximize", "decoupled_weight_decay")
#: Name of a class of torch.optim -> names of a group's numbers, and names of its switches.
RULES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "SGD": (_SGD_NUMBERS, ("nesterov", "maximize")),
    "Adam": (_ADAM_NUMBERS, _ADAM_SWITCHES),
    "AdamW": (_ADAM_NUMBERS, _ADAM_SWITCHES),
}


@dataclasses.dataclass(frozen=True)
class TorchGroups:
    """The parameter groups of a torch optimizer that the parameter server steps.

    Attributes:
        kind: Name of the class in torch.optim.
        switches: For each group, name -> True or False.
        settings: Numbers of all groups before the first step, group by group, in the order of
            `RULES`.
        group_of: Number of the group of each parameter of the optimizer.
        steps: Number of steps that each parameter has taken before the phase. A phase is the time
            in which the run trains the same parameters.
    """

    kind: str
    switches: tuple[Mapping[str, bool], ...]
    settings: tuple[float, ...]
    group_of: tuple[int, ...]
    steps: tuple[int, ...]

    @property
    def numbers(self) -> tuple[str, ...]:
        """Names of a group's numbers."""
        return RULES[self.kind][0]

    @property
    def roles(self) -> tuple[str, ...]:
        """Names of the arrays that the optimizer keeps for each parameter, as torch names them."""
        if self.kind != "SGD":
            has_maximum = any(switches["amsgrad"] for switches in self.switches)
            return ("exp_avg", "exp_avg_sq", *["max_exp_avg_sq"] * has_maximum)
        return ("momentum_buffer",) if any(self.named("momentum")) else ()

    @property
    def limits(self) -> tuple[tuple[float, float], ...]:
        """Smallest and largest legal value of each number in a push's settings."""
        return tuple(limits_of(name) for name in self.numbers) * len(self.switches)

    def named(self, name: str, settings: Sequence[float] = ()) -> list[float]:
        """Return the values of a number in all groups.

        Args:
            name: Name of the number, for example "lr".
            settings: Numbers of all groups; empty for the numbers before the first step.
        """
        values = settings or self.settings
        return list(values[self.numbers.index(name) :: len(self.numbers)])

    def of_group(self, group: int, settings: Sequence[float]) -> dict[str, float]:
        """Return the numbers of one group by name."""
        width = len(self.numbers)
        own = settings[group * width : (group + 1) * width]
        return dict(zip(self.numbers, own, strict=True))

    def described(self) -> Described:
        """Return the description for an offer, from which `groups_of` makes an equal object."""
        rows = [
            {**self.of_group(number, self.settings), **switches}
            for number, switches in enumerate(self.switches)
        ]
        config = {"groups": rows, "group_of": list(self.group_of), "steps": list(self.steps)}
        return Described(PREFIX + self.kind, config)


def is_torch(described: Described) -> bool:
    """Return True if a description is of an optimizer of torch, not of Keras."""
    return described.name.startswith(PREFIX)


def groups_of(described: Described) -> TorchGroups:
    """Read the description of a torch optimizer, which comes from an untrusted worker.

    Raises:
        ConfigurationError: The class or a field of the description is not allowed.
    """
    kind, config = described.name.removeprefix(PREFIX), described.config
    if kind not in RULES:
        raise ConfigurationError(
            f"the optimizer {described.name:.100} is unknown; expected one of "
            f"{', '.join(PREFIX + known for known in RULES)}."
        )
    rows, group_of = config.get("groups", ()), config.get("group_of", ())
    steps = config.get("steps", ())
    if set(config) != {"groups", "group_of", "steps"} or not _is_list(rows, MOST_GROUPS):
        raise ConfigurationError(
            f"{described.name}: {len(rows) if isinstance(rows, list) else rows!r:.20} parameter "
            f"groups; expected 1 to {MOST_GROUPS}, and the group and the steps of each parameter."
        )
    numbers, switches = RULES[kind]
    for row in rows:
        _check_group(row, numbers, switches, described.name)
    if not _is_list(group_of, MAX_VARIABLES) or not all(
        type(number) is int and 0 <= number < len(rows) for number in group_of
    ):
        raise ConfigurationError(
            f"{described.name}: group_of names a parameter group that is not in the description."
        )
    if not _is_list(steps, len(group_of)) or not all(
        type(count) is int and 0 <= count < 1 << 62 for count in steps
    ):
        raise ConfigurationError(
            f"{described.name}: steps={steps!s:.50}; expected a number of steps of each parameter."
        )
    return TorchGroups(
        kind,
        tuple({name: row[name] for name in switches} for row in rows),
        tuple(float(row[name]) for row in rows for name in numbers),
        tuple(group_of),
        tuple(steps),
    )


def limits_of(name: str) -> tuple[float, float]:
    """Return the smallest and largest legal value of a number of a parameter group."""
    return _LIMITS.get(name, _USUAL)


def is_legal(value: Any, limits: tuple[float, float]) -> bool:
    """Return True if a value is a finite number within limits."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and limits[0] <= value <= limits[1]


def _is_list(value: Any, most: int) -> bool:
    return isinstance(value, list) and 0 < len(value) <= most


def _check_group(row: Any, numbers: Sequence[str], switches: Sequence[str], name: str) -> None:
    if not isinstance(row, dict) or set(row) != {*numbers, *switches}:
        raise ConfigurationError(
            f"{name}: a parameter group has {sorted(row) if isinstance(row, dict) else row!r:.200};"
            f" expected {', '.join((*numbers, *switches))}."
        )
    for number in numbers:
        low, high = limits_of(number)
        if not is_legal(row[number], (low, high)):
            raise ConfigurationError(
                f"{name}: {number}={row[number]!r:.50}; expected a number from {low:g} to {high:g}."
            )
    for switch in switches:
        if not isinstance(row[switch], bool):
            raise ConfigurationError(
                f"{name}: {switch}={row[switch]!r:.50}; expected true or false."
            )
