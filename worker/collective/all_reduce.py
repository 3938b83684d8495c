"""Sums over workers without the parameter server: one call, made by every member."""

from __future__ import annotations

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

#: How late a part may be before the reason is looked for; it grows while nothing is wrong.
_FIRST_PATIENCE_SECONDS, _LAST_PATIENCE_SECONDS = 0.25, 2.0


class MembershipChanged(Exception):
    """The sum cannot be finished with these members; it is to be repeated with those who remain."""


class Aggregator:
    """Adds up buffers over the members of a round.

    Source: the primitive that ESync's barrier needs, after Li, Zhou et al., IEEE TSC 15(4).
    """

    def __init__(
        self,
        algorithm: str,
        worker: int,
        streams: Peers,
        mailbox: Mailbox,
        on_late: Callable[[int], None],
    ) -> None:
        """Keep the arguments.

        Args:
            algorithm: A name in thinwire.ops.collectives.REGISTRY.
            worker: This one.
            streams: To the other workers.
            mailbox: Holds the parts that they send.
            on_late: Called with the sender of a part that is late; raises MembershipChanged if the
                part will not arrive.
        """
        self._name, self._steps = algorithm, REGISTRY[algorithm]
        self._worker, self._streams = worker, streams
        self._mailbox, self._on_late = mailbox, on_late

    def sum(
        self, name: RoundId, members: Sequence[CollectiveMember], buffers: Sequence[Float32]
    ) -> list[Float32]:
        """Return the sums over all members, the same bits at each of them.

        An interrupted sum is repeated by a call with the same buffers. Peers may read the result
        until the round is over, so it must not be written to.

        Args:
            name: The round; all members give the same.
            members: In order of worker id, this one among them.
            buffers: float32, of the same shapes at all members.

        Raises:
            MembershipChanged: A member is lost, or the members are not these.
        """
        flat = np.concatenate([buffer.ravel() for buffer in buffers])
        place = [member.worker for member in members].index(self._worker)
        reduction = Reduction(self._steps(place, len(members), len(flat)), flat)
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
                self._streams.send(members[part.peer], message, reduction.buffer[start:stop])
            awaited = reduction.awaited
            if awaited is None:
                return
            sender = members[awaited.peer].worker
            payload = self._wait(PartName(name, view, sender, awaited.number))
            size = awaited.entries[1] - awaited.entries[0]
            if len(payload) != 4 * size:
                raise PeerLost(f"worker {sender} sent {len(payload)} bytes instead of {4 * size}")
            reduction.take(np.frombuffer(payload, "<f4"))

    def _wait(self, name: PartName) -> memoryview:
        patience = _FIRST_PATIENCE_SECONDS
        while (payload := self._mailbox.get(name, patience)) is None:
            self._streams.check()
            self._on_late(name.sender)
            patience = min(2 * patience, _LAST_PATIENCE_SECONDS)
        return payload

    def _view(self, members: Sequence[CollectiveMember]) -> int:
        """Return a number for the algorithm and these incarnations of these members."""
        words = struct.pack(
            f"<{2 * len(members)}Q", *(n for m in members for n in (m.worker, m.incarnation))
        )
        digest = hashlib.blake2b(self._name.encode() + words, digest_size=8).digest()
        return int.from_bytes(digest, "little")
