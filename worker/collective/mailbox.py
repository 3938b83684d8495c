"""The members of a sum, the names of its parts, and the mailbox for parts that have arrived.

A part of a sum has the same bytes however often it is sent. So a member that starts a sum again
sends everything again, and the parts in a mailbox stay valid until the round is over.
"""

from __future__ import annotations

import dataclasses
import threading

from thinwire.proto.framing import Malformed


@dataclasses.dataclass(frozen=True, order=True)
class CollectiveMember:
    """One incarnation of a worker that takes part in sums."""

    worker: int
    incarnation: int
    address: str = dataclasses.field(compare=False)  # host:port of its Peer service


@dataclasses.dataclass(frozen=True, order=True)
class RoundId:
    """A round: the version that it leads to, in one generation of shard 0."""

    generation: int
    number: int


@dataclasses.dataclass(frozen=True)
class PartName:
    """A part: the `number`-th from `sender` to this worker, in a round of one set of members."""

    round: RoundId
    view: int
    sender: int
    number: int


class Mailbox:
    """The parts that have arrived, until their round is over."""

    def __init__(self, limit_bytes: int) -> None:
        """Hold at most `limit_bytes`."""
        self._limit_bytes = limit_bytes
        self._parts: dict[PartName, memoryview] = {}
        self._num_bytes = 0
        self._over = RoundId(-1, 0)
        self._changed = threading.Condition()

    def put(self, name: PartName, payload: memoryview) -> None:
        """Accept a part; one of a round that is over is dropped.

        Raises:
            Malformed: It exceeds the limit.
        """
        with self._changed:
            if name.round <= self._over or name in self._parts:
                return
            if self._num_bytes + len(payload) > self._limit_bytes:
                raise Malformed(
                    f"a part of {len(payload)} bytes in addition to {self._num_bytes} that "
                    f"wait; at most {self._limit_bytes} are kept"
                )
            self._parts[name] = payload
            self._num_bytes += len(payload)
            self._changed.notify_all()

    def get(self, name: PartName, timeout_seconds: float) -> memoryview | None:
        """Return a part, or None if it does not arrive in time."""
        with self._changed:
            self._changed.wait_for(lambda: name in self._parts, timeout_seconds)
            return self._parts.get(name)

    def finish(self, name: RoundId) -> None:
        """Drop the parts of a round that is over, and of all rounds before it."""
        with self._changed:
            self._over = name
            self._parts = {key: part for key, part in self._parts.items() if key.round > name}
            self._num_bytes = sum(len(part) for part in self._parts.values())
