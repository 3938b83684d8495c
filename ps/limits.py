"""What one client may ask of a shard."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ops.run import Run
from ops.types import Link
from proto import thinwire_pb2 as pb
from proto.door import Door, Limits
from proto.framing import Malformed

if TYPE_CHECKING:
    from proto.channel_grpc import ServerStream

#: Streams beyond one of each worker and shard: of supervisors, and of clients that come back
#: before their old stream has been missed.
_SPARE_STREAMS = 16
#: Streams that one address cannot take, however many it opens.
_STREAMS_OF_OTHERS = 64
#: What is answered with the model or a part of it.
_ASKING = ("pull", "push")
#: Links that can be emulated: the flags' own limits, and no rate that stands still.
_SLOWEST_MBPS, _FASTEST_MBPS, _LONGEST_DELAY_MS, _HIGHEST_LOSS = 1e-3, 1e6, 60_000.0, 0.95


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


def checked_link(given: pb.EmulatedLink) -> Link:
    """Return a client's emulated link.

    Raises:
        Malformed: Of a link that nobody can have chosen by flags; NaN fails every comparison.
    """
    link = Link(given.mbps, given.delay_ms, given.loss)
    fast_enough = link.mbps == 0 or _SLOWEST_MBPS <= link.mbps <= _FASTEST_MBPS
    short_enough = 0 <= link.delay_ms <= _LONGEST_DELAY_MS
    if not (fast_enough and short_enough and 0 <= link.loss <= _HIGHEST_LOSS):
        raise Malformed(
            f"{link}: expected 0 (no limit) or {_SLOWEST_MBPS:g} to {_FASTEST_MBPS:g} Mbit/s, a "
            f"delay up to {_LONGEST_DELAY_MS:g} ms and a loss up to {_HIGHEST_LOSS:g}"
        )
    return link
