"""What one client may ask of a shard."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ops.run import Run
from proto.door import Door, Limits
from proto.token_bucket import TokenBucket

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


class Allowance:
    """What is left to one stream; for its reader thread.

    Args:
        stream: The client's.
        limits: Of every client.
    """

    def __init__(self, stream: ServerStream, limits: Limits) -> None:
        self._stream, self._limits = stream, limits
        self._bucket = TokenBucket(limits.messages_per_second, limits.burst_messages)

    def exceeded(self, body: str | None) -> tuple[str, str] | None:
        """Count a message; return (reason, message) if it is one too many.

        Args:
            body: Which it is.
        """
        now, limits = time.monotonic(), self._limits
        if self._bucket.wait_seconds(now) > 0:
            return "rate", f"more than {limits.messages_per_second:g} messages a second."
        self._bucket.take(now, 1.0)
        waiting = self._stream.num_waiting
        if body in _ASKING and waiting >= limits.waiting_replies:
            return "unanswered", (
                f"a {body} while {waiting} replies wait to be taken; expected one at a time."
            )
        return None
