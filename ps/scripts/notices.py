"""What shard 0 must do for the scripts of a run, as data that `RunControl` performs.

`Barriers`, `EpochMeetings` and `Evaluations` change only their own state, and return outcomes.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from thinwire.proto import thinwire_pb2 as pb

#: Receivers of a notice in place of a worker's id, which is 1 or higher: the run's evaluator, and
#: all Supervisors that start evaluators.
EVALUATOR, SUPERVISORS = 0, -1


@dataclasses.dataclass(frozen=True)
class Notice:
    """A message that shard 0 sends to one worker's script, to `EVALUATOR` or to `SUPERVISORS`."""

    to: int
    message: pb.ToClient


@dataclasses.dataclass(frozen=True)
class ScriptsEnd:
    """End of the run for the scripts of all workers.

    The `message` explains the end of the run to users; it is empty after a normal end.
    """

    cause: str
    message: str = ""


Outcome = Notice | ScriptsEnd


def notice(to: int, **body: Any) -> Notice:
    """Return a notice with the given body of a `ToClient` message."""
    return Notice(to, pb.ToClient(**body))
