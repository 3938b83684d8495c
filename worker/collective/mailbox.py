"""Names the members and the parts (messages) of a sum over workers, and stores received parts.

A part of a sum over workers has the same bytes each time that it is sent. So a member that repeats
a sum sends equal parts again, and the parts in a mailbox stay valid until the round is over.
"""

from __future__ import annotations

import dataclasses
import threading

from thinwire.proto.framing import Malformed


@dataclasses.dataclass(frozen=True, order=True)
class CollectiveMember:
    """One incarnation (process) of a worker whose updates enter the workers' sums.

    Attributes:
        worker: Id of the worker.
        incarnation: Number of the worker's incarnation (process).
        address: Address host:port of the worker's Peer service.
    """

    worker: int
    incarnation: int
    address: str = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True, order=True)
class RoundId:
    """Name of a round of the workers' sums, by which workers compare versions of the model.

    Attributes:
        generation: Number of restarts of shard 0's model from a checkpoint.
        number: Version of the model after this round of the workers' sums.
    """

    generation: int
    number: int


@dataclasses.dataclass(frozen=True)
class PartName:
    """Name of one part (message) of a sum over workers.

    Attributes:
        round: Training round for which the workers compute the sum.
        view: Number that identifies the algorithm and the members of the sum.
        sender: Id of the worker that sends the part.
        number: Number of earlier parts that the sender has sent to this worker for the same sum.
    """

    round: RoundId
    view: int
    sender: int
    number: int


class Mailbox:
    """Store of received parts of sums over workers, each kept until the part's round is over."""

    def __init__(self, limit_bytes: int) -> None:
        """Create an empty mailbox that stores at most `limit_bytes` bytes of parts."""
        self._limit_bytes = limit_bytes
        self._parts: dict[PartName, memoryview] = {}
        self._num_bytes = 0
        self._over = RoundId(-1, 0)
        self._changed = threading.Condition()

    def put(self, name: PartName, payload: memoryview) -> None:
        """Store a part of a sum; drop a repeated part, and a part of a finished round.

        Raises:
            Malformed: With this part, the stored parts would exceed the mailbox's limit in bytes.
        """
        with self._changed:
            if name.round <= self._over or name in self._parts:
                return
            if self._num_bytes + len(payload) > self._limit_bytes:
                raise Malformed(
                    f"an all-reduce part of {len(payload)} bytes does not fit: {self._num_bytes} "
                    f"bytes are waiting, and the limit is {self._limit_bytes}"
                )
            self._parts[name] = payload
            self._num_bytes += len(payload)
            self._changed.notify_all()

    def get(self, name: PartName, timeout_seconds: float) -> memoryview | None:
        """Return a part of a sum; None if the part does not arrive within `timeout_seconds`."""
        with self._changed:
            self._changed.wait_for(lambda: name in self._parts, timeout_seconds)
            return self._parts.get(name)

    def finish(self, name: RoundId) -> None:
        """Drop the stored parts of a finished round, and of all earlier rounds."""
        with self._changed:
            self._over = name
            self._parts = {key: part for key, part in self._parts.items() if key.round > name}
            self._num_bytes = sum(len(part) for part in self._parts.values())
