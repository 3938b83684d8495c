"""Final models of a run that trains several models one after the other, for late clients.

A phase is a period in which the run trains one model. From the models of ended phases, an evaluator
or a late worker gets the values of variables that the run does not train now, for example the
variables of a layer that is frozen in a later phase.
"""

from __future__ import annotations

import collections
import dataclasses

from thinwire.ops.types import ShardLayout, Slice, State, Update
from thinwire.ps.core import events
from thinwire.ps.core.serialization import from_plain, to_plain
from thinwire.runtime.persistence.checkpoint import Checkpoints

#: Number of the newest models of ended phases that are always stored, and size limit in bytes of
#: all stored models.
_LEAST_MODELS, _MOST_BYTES = 2, 256 << 20


@dataclasses.dataclass(frozen=True)
class EndedModel:
    """Final state of a model whose variables the run trained in one or more consecutive phases.

    Attributes:
        first: Number of the run's first phase (period with one model) that trained the variables of
            `EndedModel`.
        last: Number of the run's last phase (period with one model) that trained the variables of
            `EndedModel`.
        layout: Shard layout of the ended model: the slices of variables that the shard holds.
        generation: Number of restarts of the shard before the end of the last phase that trained
            this model.
        reply: Reply message with the final weights of the whole model.
    """

    first: int
    last: int
    layout: ShardLayout
    generation: int
    reply: events.Reply

    @property
    def num_bytes(self) -> int:
        """Size of an ended model's weights and averaged statistics, in bytes."""
        update, aux = self.reply.update, self.reply.aux
        weights = update.values.nbytes if isinstance(update, Update) else 0
        return weights + (0 if aux is None else aux.nbytes)

    def to_plain(self) -> State:
        """Return the model of an ended phase as plain data for a checkpoint; arrays are not
        copied.
        """
        return {
            "first": self.first,
            "last": self.last,
            "slices": [[piece.tensor, piece.start, piece.stop] for piece in self.layout.slices],
            "generation": self.generation,
            "reply": {
                field.name: to_plain(getattr(self.reply, field.name))
                for field in dataclasses.fields(self.reply)
            },
        }

    @classmethod
    def from_plain(cls, found: State) -> EndedModel:
        """Build the model of an ended phase from the plain data that `to_plain` returns."""
        reply = {name: from_plain(value) for name, value in found["reply"].items()}
        return cls(
            found["first"],
            found["last"],
            ShardLayout(tuple(Slice(*row) for row in found["slices"])),
            found["generation"],
            events.Reply(**reply),
        )


class EndedModels:
    """Final models of the run's newest ended phases, by phase number; used by the writer thread.

    Args:
        checkpoints: Storage of the ended models for a restart of the shard; None to save nothing.
        since: Number of the first phase (period with one model) that trained the current model's
            variables. The saved models of earlier phases are loaded.
    """

    def __init__(self, checkpoints: Checkpoints | None = None, since: int = 0) -> None:
        self._checkpoints = checkpoints
        states = [] if checkpoints is None else checkpoints.load_all()
        models = [EndedModel.from_plain(state) for state in states]
        self._kept = collections.deque(model for model in models if model.last < since)

    def add(self, ended: EndedModel) -> None:
        """Store and save a model, because the run trains another model from now on.

        Raises:
            OSError: The checkpoint of the ended model cannot be written.
        """
        models = self._kept
        models.append(ended)
        while len(models) > _LEAST_MODELS and sum(m.num_bytes for m in models) > _MOST_BYTES:
            models.popleft()
        if self._checkpoints is not None:
            self._checkpoints.log.keep = len(models)
            self._checkpoints.save(ended.first, ended.to_plain())

    def find(self, phase: int) -> EndedModel | None:
        """Return the final model of a phase (period with one model) of the run; None if it is not
        stored.
        """
        return next((model for model in self._kept if model.first <= phase <= model.last), None)
