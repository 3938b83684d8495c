"""What phases of a script have ended with, for an evaluator that comes there later.

It takes over the values of variables that are not shared any more, as those of a layer that was
trained and is frozen now.
"""

from __future__ import annotations

import collections
import dataclasses

from thinwire.ops.types import ShardLayout
from thinwire.ps.core import events

#: Models that are kept.
_MOST_MODELS = 2


@dataclasses.dataclass(frozen=True)
class EndedModel:
    """The last state of phases that had the same variables.

    Attributes:
        first: The first of these phases.
        last: The last of them.
        layout: Of the shard.
        generation: Of its core.
        reply: With the whole model.
    """

    first: int
    last: int
    layout: ShardLayout
    generation: int
    reply: events.Reply


class EndedModels:
    """The newest of them, by phase (writer thread).

    Attributes:
        since: The first phase that had the present variables.
    """

    def __init__(self) -> None:
        self.since = 0
        self._kept: collections.deque[EndedModel] = collections.deque(maxlen=_MOST_MODELS)

    def add(self, ended: EndedModel, phase: int) -> None:
        """Keep a model; from `phase` on the variables are others."""
        self._kept.append(ended)
        self.since = phase

    def find(self, phase: int) -> EndedModel | None:
        """Return what a phase has ended with; None: it is not known any more."""
        return next((each for each in self._kept if each.first <= phase <= each.last), None)
