"""Members of a sum, names of a sum's parts, and the mailbox that stores received parts.

A part of a sum has the same bytes each time that it is sent. So a member that repeats a sum sends
all parts again, and the parts in a mailbox stay valid until the round is over.
"""

from __future__ import annotations

import dataclasses
import threading

from thinwire.proto.framing import Malformed


@dataclasses.dataclass(frozen=True, order=True)
class CollectiveMember:
    """One incarnation of a worker that takes part in sums.

    Attributes:
        worker: Id of the worker.
        incarnation: Number of the incarnation.
        address: host:port of the worker's Peer service.
    """

    worker: int
    incarnation: int
    address: str = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True, order=True)
class RoundId:
    """Name of a round.

    Attributes:
        generation: Generation of shard 0's model.
        number: Version of the model after the round.
    """

    generation: int
    number: int


@dataclasses.dataclass(frozen=True)
class PartName:
    """Name of a part of a sum.

    Attributes:
        round: Round of the sum.
        view: Number that identifies the sum's algorithm and members.
        sender: Id of the worker that sends the part.
        number: Count of earlier parts from the sender to this worker in the sum.
    """

    round: RoundId
    view: int
    sender: int
    number: int


class Mailbox:
    """Store of received parts. A part is dropped when its round is over."""

    def __init__(self, limit_bytes: int) -> None:
        """Start empty; store at most `limit_bytes` bytes."""
        self._limit_bytes = limit_bytes
        self._parts: dict[PartName, memoryview] = {}
        self._num_bytes = 0
        self._over = RoundId(-1, 0)
        self._changed = threading.Condition()

    def put(self, name: PartName, payload: memoryview) -> None:
        """Store a part. A part of a finished round, and a repeated part, are dropped.

        Raises:
            Malformed: The mailbox would exceed its limit.
        """
        with self._changed:
            if name.round <= self._over or name in self._parts:
                return
            if self._num_bytes + len(payload) > self._limit_bytes:
                raise Malformed(
                    f"a part of {len(payload)} bytes does not fit: {self._num_bytes} bytes are "
                    f"waiting, and the limit is {self._limit_bytes}"
                )
            self._parts[name] = payload
            self._num_bytes += len(payload)
            self._changed.notify_all()

    def get(self, name: PartName, timeout_seconds: float) -> memoryview | None:
        """Return a part, or None if the part does not arrive within `timeout_seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: name in self._parts, timeout_seconds)
            return self._parts.get(name)

    def finish(self, name: RoundId) -> None:
        """Drop the parts of a finished round, and of all earlier rounds."""
        with self._changed:
            self._over = name
            self._parts = {key: part for key, part in self._parts.items() if key.round > name}
            self._num_bytes = sum(len(part) for part in self._parts.values())
