"""Pacers that push after a fixed number of local steps."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from thinwire.ops.types import ConfigurationError, Kind


@dataclasses.dataclass(frozen=True)
class Every:
    """Push the gradient of every mini-batch."""

    queries: ClassVar[bool] = False
    waits_for_answer: ClassVar[bool] = False

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
    """Push the change of weights after a fixed number of local steps H.

    With H = 1 the one gradient itself travels, so that `fixed` is `every`.
    """

    queries: ClassVar[bool] = False
    waits_for_answer: ClassVar[bool] = False
    local_steps: int = 1

    def __post_init__(self) -> None:
        """Refuse H < 1."""
        if self.local_steps < 1:
            raise ConfigurationError(
                f"--local_steps={self.local_steps}: expected 1 or more local steps per push."
            )

    @property
    def kind(self) -> Kind:
        """Gradients for H = 1, else changes of weights."""
        return Kind.GRADIENT if self.local_steps == 1 else Kind.DELTA

    @property
    def longest_round(self) -> int:
        """Return the most local steps of a round; 0 is no limit."""
        return self.local_steps

    def push_now(self, local_steps: int) -> bool:
        """Return whether `local_steps` since the last exchange are enough."""
        return local_steps >= self.local_steps
