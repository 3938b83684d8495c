"""Pacers that push after a fixed number of local steps."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from thinwire.ops.types import OWN, ConfigurationError, Kind


@dataclasses.dataclass(frozen=True)
class Every:
    """Push the gradient of every mini-batch."""

    queries: ClassVar[bool] = False
    waits_for_answer: ClassVar[bool] = False
    local_epochs: ClassVar[int] = 0

    @property
    def kind(self) -> Kind:
        """Gradients travel."""
        return Kind.GRADIENT

    @property
    def longest_round(self) -> int:
        """Return the most local steps of a round; 0 is no limit."""
        return 1

    def push_now(self, local_steps: int) -> bool:
        """Return whether `local_steps` since the last exchange are enough."""
        return local_steps >= 1


@dataclasses.dataclass(frozen=True)
class Fixed:
    """Push the change of weights after a fixed number of local steps H, or of local epochs.

    With H = 1 the one gradient itself travels, so that `fixed` is `every`.

    Attributes:
        local_steps: H.
        local_epochs: In place of H: passes over the worker's own examples; 0: none.
        pass_steps: Mini-batches of a pass, where they count; see `of_part`. 0: not known; whoever
            trains ends the round.
    """

    queries: ClassVar[bool] = False
    waits_for_answer: ClassVar[bool] = False
    local_steps: int = 1
    local_epochs: int = 0
    pass_steps: int = dataclasses.field(default=0, metadata=OWN)

    def __post_init__(self) -> None:
        """Refuse H < 1."""
        if self.local_steps < 1:
            raise ConfigurationError(
                f"--local_steps={self.local_steps}: expected 1 or more local steps per push."
            )
        if self.local_epochs < 0 or self.pass_steps < 0:
            raise ConfigurationError(
                f"--local_epochs={self.local_epochs}, of {self.pass_steps} mini-batches: expected "
                "1 or more passes over a worker's examples, or 0 to count --local_steps."
            )

    def of_part(self, num_examples: int, batch_size: int) -> Fixed:
        """Return the pacer of a worker with so many examples, in mini-batches of a size."""
        return dataclasses.replace(self, pass_steps=-(-num_examples // batch_size))

    @property
    def kind(self) -> Kind:
        """Gradients for H = 1, else changes of weights."""
        steps_once = self.local_steps == 1 and not self.local_epochs
        return Kind.GRADIENT if steps_once else Kind.DELTA

    @property
    def longest_round(self) -> int:
        """Return the most local steps of a round; 0 is no limit, as that of others' passes."""
        return 0 if self.local_epochs else self.local_steps

    def push_now(self, local_steps: int) -> bool:
        """Return whether `local_steps` since the last exchange are enough."""
        if not self.local_epochs:
            return local_steps >= self.local_steps
        return 0 < self.local_epochs * self.pass_steps <= local_steps
