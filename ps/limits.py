"""What one client may ask of a shard."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ops.run import Run
from proto.door import Door, Limits

if TYPE_CHECKING:
    from proto.channel_grpc import ServerStream

#: Streams beyond one of each worker and shard: of supervisors, and of clients that come back
#: before their old stream has been missed.
_SPARE_STREAMS = 16
#: Streams that one address cannot take, however many it opens.
_STREAMS_OF_OTHERS = 64
#: What is answered with the model or a part of it.
_ASKING = ("pull", "push")


def door_of(run: Run) -> Door:
    """Return the door of a run's shard; all its clients may be of one address."""
    return Door(run.credentials, Limits(streams_per_address=_streams_of(run)))


def most_streams(run: Run) -> int:
    """Return how many streams a shard holds at a time."""
    return _streams_of(run) + _STREAMS_OF_OTHERS


def _streams_of(run: Run) -> int:
    return run.nb_workers + run.nb_ps + _SPARE_STREAMS


def unanswered(body: str | None, stream: ServerStream, limits: Limits) -> str | None:
    """Return why a client must not ask for more, if so.

    Args:
        body: What it says.
        stream: The client's.
        limits: Of every client.
    """
    waiting = stream.num_waiting
    if body not in _ASKING or waiting < limits.waiting_replies:
        return None
    return f"a {body} while {waiting} replies wait to be taken; expected one at a time."
