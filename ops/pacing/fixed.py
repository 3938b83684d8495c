"""Pacers with which workers push after a fixed number of local steps."""

from __future__ import annotations

import dataclasses

from thinwire.ops.options import integer
from thinwire.ops.pacing.base import Pacer
from thinwire.ops.policy import OWN, setting
from thinwire.ops.types import Kind


@dataclasses.dataclass(frozen=True)
class Every(Pacer):
    """Pacer that pushes the gradient of every mini-batch."""

    @property
    def kind(self) -> Kind:
        """Kind of the pushed updates: the pacer `every` always pushes gradients."""
        return Kind.GRADIENT

    @property
    def longest_round(self) -> int:
        """Number of local steps between two pushes: 1, because every step is pushed."""
        return 1

    def push_now(self, local_steps: int) -> bool:
        """Return True if the worker must push after `local_steps` steps since the last exchange."""
        return local_steps >= 1


@dataclasses.dataclass(frozen=True)
class Fixed(Pacer):
    """Pacer that pushes the change of weights after a fixed number of local steps or epochs.

    With one local step per round, the worker pushes the gradient itself, so that the pacer `fixed`
    equals the pacer `every`.

    Attributes:
        local_steps: Number of local steps that a worker takes between two pushes.
        local_epochs: Number of passes over the worker's examples between two pushes. 0 means that
            `local_steps` determines when the worker pushes.
        pass_steps: Number of mini-batches in one pass over the worker's examples. 0 means that the
            number is unknown, and that the training loop must end the round of local steps.
    """

    local_steps: int = setting(
        integer(
            "local_steps",
            1,
            "Number of local steps in a round of --pacer=fixed (H in papers).",
            "steps",
            low=1,
        ),
        shown=True,
    )
    local_epochs: int = setting(
        integer(
            "local_epochs",
            0,
            "Length of a round as the number of passes of a worker over its own examples; 0: the "
            "length is --local_steps.",
            "epochs",
            low=0,
        )
    )
    pass_steps: int = dataclasses.field(default=0, metadata=OWN)

    def of_part(self, num_examples: int, batch_size: int) -> Fixed:
        """Return the pacer for a worker with `num_examples` examples in batches of `batch_size`."""
        return dataclasses.replace(self, pass_steps=-(-num_examples // batch_size))

    @property
    def kind(self) -> Kind:
        """Kind of the pushed updates: gradients for H = 1 local step, else changes of weights."""
        steps_once = self.local_steps == 1 and not self.local_epochs
        return Kind.GRADIENT if steps_once else Kind.DELTA

    @property
    def longest_round(self) -> int:
        """Number of local steps between two pushes; 0 if `local_epochs` determines the number."""
        return 0 if self.local_epochs else self.local_steps

    def push_now(self, local_steps: int) -> bool:
        """Return True if the worker must push after `local_steps` steps since the last exchange."""
        if not self.local_epochs:
            return local_steps >= self.local_steps
        return 0 < self.local_epochs * self.pass_steps <= local_steps
