"""What phases of a script have ended with, for an evaluator or a worker that comes there later.

It takes over the values of variables that are not shared any more, as those of a layer that was
trained and is frozen now, or of a model that another one has followed.
"""

from __future__ import annotations

import collections
import dataclasses

from thinwire.ops.types import ShardLayout, Slice, State, Update
from thinwire.ps.core import events
from thinwire.ps.core.serialization import from_plain, to_plain
from thinwire.runtime.persistence.checkpoint import CheckpointStore

#: Models that are kept in any case, and the bytes that they and older ones may take together.
_LEAST_MODELS, _MOST_BYTES = 2, 256 << 20


@dataclasses.dataclass(frozen=True)
class EndedModel:
    """The last state of phases that had the same model, with the same variables.

    Attributes:
        first: The first of these phases.
        last: The last number of a phase before another model's.
        layout: Of the shard.
        generation: Of its core.
        reply: With the whole model.
    """

    first: int
    last: int
    layout: ShardLayout
    generation: int
    reply: events.Reply

    @property
    def num_bytes(self) -> int:
        """Bytes of its weights and averaged statistics."""
        update, aux = self.reply.update, self.reply.aux
        weights = update.values.nbytes if isinstance(update, Update) else 0
        return weights + (0 if aux is None else aux.nbytes)

    def to_plain(self) -> State:
        """Return it as plain data; arrays are not copied."""
        return {
            "first": self.first,
            "last": self.last,
            "slices": [[each.tensor, each.start, each.stop] for each in self.layout.slices],
            "generation": self.generation,
            "reply": {
                field.name: to_plain(getattr(self.reply, field.name))
                for field in dataclasses.fields(self.reply)
            },
        }

    @classmethod
    def from_plain(cls, found: State) -> EndedModel:
        """Undo `to_plain`."""
        reply = {name: from_plain(value) for name, value in found["reply"].items()}
        return cls(
            found["first"],
            found["last"],
            ShardLayout(tuple(Slice(*row) for row in found["slices"])),
            found["generation"],
            events.Reply(**reply),
        )


class EndedModels:
    """The newest of them, by phase (writer thread).

    Attributes:
        since: The first phase that had the present model, with the present variables.

    Args:
        checkpoints: Where they are kept for a shard that is started again; None: nowhere.
    """

    def __init__(self, checkpoints: CheckpointStore | None = None) -> None:
        self.since = 0
        self._checkpoints = checkpoints
        self._kept: collections.deque[EndedModel] = collections.deque()

    def restore(self, since: int) -> None:
        """Take over those that are kept, of phases before the present model's.

        Args:
            since: As the shard was saved with.
        """
        self.since = since
        states = [] if self._checkpoints is None else self._checkpoints.load_all()
        found = [EndedModel.from_plain(state) for state in states]
        self._kept.extend(each for each in found if each.last < since)

    def add(self, ended: EndedModel, phase: int) -> None:
        """Keep a model; from `phase` on it is another one.

        Raises:
            OSError: The disk refused.
        """
        kept, self.since = self._kept, phase
        kept.append(ended)
        while len(kept) > _LEAST_MODELS and sum(each.num_bytes for each in kept) > _MOST_BYTES:
            kept.popleft()
        if self._checkpoints is not None:
            self._checkpoints.keep = len(kept)
            self._checkpoints.save(ended.first, ended.to_plain())

    def find(self, phase: int) -> EndedModel | None:
        """Return what a phase has ended with; None: it is not known any more."""
        return next((each for each in self._kept if each.first <= phase <= each.last), None)
