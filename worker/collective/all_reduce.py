"""Sums over workers, without the parameter server: each member of a sum makes the same call."""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from thinwire.ops.collectives import REGISTRY, Reduction
from thinwire.proto import peers_pb2 as peers
from thinwire.worker.collective.mailbox import CollectiveMember, Mailbox, PartName, RoundId
from thinwire.worker.collective.peers import PeerLost, Peers

if TYPE_CHECKING:
    from thinwire.ops.types import Float32

#: Shortest and longest wait for a late part of a sum, in seconds, before the receiver checks the
#: sender of the part. The wait doubles each time that a check finds no problem.
_FIRST_PATIENCE_SECONDS, _LAST_PATIENCE_SECONDS = 0.25, 2.0


class MembershipChanged(Exception):
    """Raised if a member of a sum over workers is lost; the sum must be repeated without it."""


@dataclasses.dataclass
class Aggregator:
    """Sums float32 buffers over the workers that are members of a round.

    Source: the collective sum that ESync's barrier needs, after Li, Zhou et al., IEEE TSC 15(4).

    Attributes:
        algorithm: Name of the algorithm that sums updates over workers, a key of
            thinwire.ops.collectives.REGISTRY.
        worker: Id of this worker.
        streams: gRPC streams from this worker to the other workers.
        mailbox: Store of the parts of sums that other workers send.
        on_late: Function that is called with the sender's worker id when a part of a sum is late.
            It raises MembershipChanged if the part will not arrive.
    """

    algorithm: str
    worker: int
    streams: Peers
    mailbox: Mailbox
    on_late: Callable[[int], None]

    def sum(
        self, name: RoundId, members: Sequence[CollectiveMember], buffers: Sequence[Float32]
    ) -> list[Float32]:
        """Return the sums of the buffers over all workers in the round, bitwise equal on each.

        To repeat an interrupted sum, call `sum` again with the same buffers. Do not write to the
        result of a sum before the round is over, because queued messages to peers are views of it.

        Args:
            name: Name of the round of sums, which every member of the sum passes equally.
            members: Workers that are members of the sum, in order of worker id, including this
                worker.
            buffers: float32 arrays to sum; every member passes arrays of equal shapes.

        Raises:
            MembershipChanged: A member of the sum is lost, or shard 0 lists members other than
                those of the sum.
        """
        flat = np.concatenate([buffer.ravel() for buffer in buffers])
        place = [member.worker for member in members].index(self.worker)
        reduction = Reduction(REGISTRY[self.algorithm](place, len(members), len(flat)), flat)
        view = self._view(members)
        try:
            self._carry_out(reduction, name, view, members)
        except PeerLost as error:
            raise MembershipChanged(str(error)) from error
        borders = np.cumsum([buffer.size for buffer in buffers])[:-1]
        parts = np.split(flat, borders)
        return [part.reshape(b.shape) for part, b in zip(parts, buffers, strict=True)]

    def _carry_out(
        self, reduction: Reduction, name: RoundId, view: int, members: Sequence[CollectiveMember]
    ) -> None:
        while True:
            for part in reduction.outgoing():
                start, stop = part.entries
                message = peers.Part(
                    view=view, generation=name.generation, round=name.number, number=part.number
                )
                self.streams.send(members[part.peer], message, reduction.buffer[start:stop])
            awaited = reduction.awaited
            if awaited is None:
                return
            sender = members[awaited.peer].worker
            payload = self._wait(PartName(name, view, sender, awaited.number))
            size = awaited.entries[1] - awaited.entries[0]
            if len(payload) != 4 * size:
                raise PeerLost(f"worker {sender} sent {len(payload)} bytes; expected {4 * size}")
            reduction.take(np.frombuffer(payload, "<f4"))

    def _wait(self, name: PartName) -> memoryview:
        patience = _FIRST_PATIENCE_SECONDS
        while (payload := self.mailbox.get(name, patience)) is None:
            self.streams.check()
            self.on_late(name.sender)
            patience = min(2 * patience, _LAST_PATIENCE_SECONDS)
        return payload

    def _view(self, members: Sequence[CollectiveMember]) -> int:
        """Return a 64-bit number that identifies a sum's algorithm and member incarnations."""
        # The name of each part of a sum holds this number, so that a member never merges a part
        # from different members or a different algorithm into this sum.
        words = struct.pack(
            f"<{2 * len(members)}Q", *(n for m in members for n in (m.worker, m.incarnation))
        )
        digest = hashlib.blake2b(self.algorithm.encode() + words, digest_size=8).digest()
        return int.from_bytes(digest, "little")
