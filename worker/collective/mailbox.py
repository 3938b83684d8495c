"""Who takes part in a sum, how its parts are named, and where they wait when they have arrived.

Parts of one sum are the same bytes however often they are sent, so a member that begins a sum
again sends everything again, and what a mailbox holds stays valid until the round is over.
"""

from __future__ import annotations

import dataclasses
import threading

from thinwire.proto.framing import Malformed


@dataclasses.dataclass(frozen=True, order=True)
class CollectiveMember:
    """One life of a worker that takes part in sums."""

    worker: int
    incarnation: int
    address: str = dataclasses.field(compare=False)  # host:port of its Peer service


@dataclasses.dataclass(frozen=True, order=True)
class RoundId:
    """A round: the version it leads to, in one life of shard 0."""

    generation: int
    number: int


@dataclasses.dataclass(frozen=True)
class PartName:
    """A part: the `number`-th of `sender` to this worker, in a round of one set of members."""

    round: RoundId
    view: int
    sender: int
    number: int


class Mailbox:
    """Parts that have arrived; kept until their round is over."""

    def __init__(self, limit_bytes: int) -> None:
        """Hold at most so many bytes."""
        self._limit_bytes = limit_bytes
        self._parts: dict[PartName, memoryview] = {}
        self._num_bytes = 0
        self._over = RoundId(-1, 0)
        self._changed = threading.Condition()

    def put(self, name: PartName, payload: memoryview) -> None:
        """Take in a part; one of a round that is over is dropped.

        Raises:
            Malformed: There is no room for it.
        """
        with self._changed:
            if name.round <= self._over or name in self._parts:
                return
            if self._num_bytes + len(payload) > self._limit_bytes:
                raise Malformed(
                    f"a part of {len(payload)} bytes beside {self._num_bytes} that wait; at most "
                    f"{self._limit_bytes} are kept"
                )
            self._parts[name] = payload
            self._num_bytes += len(payload)
            self._changed.notify_all()

    def get(self, name: PartName, timeout_seconds: float) -> memoryview | None:
        """Return a part, or None if it does not come in time."""
        with self._changed:
            self._changed.wait_for(lambda: name in self._parts, timeout_seconds)
            return self._parts.get(name)

    def finish(self, name: RoundId) -> None:
        """Drop the parts of a round that is over, and of those before it; take those after it."""
        with self._changed:
            self._over = name
            self._parts = {key: part for key, part in self._parts.items() if key.round > name}
            self._num_bytes = sum(len(part) for part in self._parts.values())
