"""A worker's exchanges where the workers sum and step among themselves.

To the training loop it is an Exchange like any other. Each round is summed over the live members,
every member applies the same step to its own copy of the model, and reports the round to shard 0,
which releases it when all have; the lowest live worker hands in the weights now and then. Shard 0
says with each release who does the next round. A member that has missed a round, or has just come,
takes the model and the optimizer's state from one that has not.

The model between a worker, which holds it flat, and shard 0, which holds it in slices.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from absl import logging

from thinwire.ops.downlink.types import Operation
from thinwire.ops.run.settings import Diverged
from thinwire.ops.types import Block, CodedValues, ConfigurationError, Kind, State
from thinwire.ops.wire.blocks import all_finite
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import chunk_bytes_for
from thinwire.proto.grpc import PortInUse, Unreachable
from thinwire.proto.grpc.common import host_and_port
from thinwire.proto.grpc.session import RequestRejected
from thinwire.worker.client.exchange import Exchange
from thinwire.worker.client.shard_client import ShardGone
from thinwire.worker.collective.all_reduce import Aggregator, MembershipChanged
from thinwire.worker.collective.mailbox import CollectiveMember, Mailbox, RoundId
from thinwire.worker.collective.peers import Peers, listening_address
from thinwire.worker.collective.replica import Neighbours, Replica
from thinwire.worker.collective.service import PeerServer, guard_of, pace_of
from thinwire.worker.core.core import WorkerCore
from thinwire.worker.core.messages import PushRequest, ShardReply
from thinwire.worker.flags import WorkerFlags

if TYPE_CHECKING:
    from thinwire.ops.types import Float32


class ModelCopy:
    """The base model of a worker's core, as shard 0 sends and takes it."""

    def __init__(self, core: WorkerCore) -> None:
        """Look at `core` whenever asked."""
        self._core = core

    def with_blocks(self, blocks: Iterable[Block]) -> Float32:
        """Return the present model [n] with some dense blocks of shard 0 in their places."""
        flat = self._core.base.copy()
        for block in blocks:
            flat[self._place(block.slot)] = block.values.data
        return flat

    def blocks(self) -> tuple[Block, ...]:
        """Return the model as the PS holds it; it must not change before it is answered."""
        return tuple(
            Block(
                slot, piece.size, None, CodedValues("float32", self._core.base[self._place(slot)])
            )
            for slot, piece in enumerate(self._core.layouts[0].slices)
        )

    def alone(self, at: RoundId) -> PushRequest:
        """Return an exchange that brings the weights of version `at`, and no round."""
        return PushRequest(
            step=self._core.step + 1,
            kind=Kind.VALUES,
            shards=[self.blocks()],
            base_versions=[at.number],
            generations=[at.generation],
            samples=0,
            local_steps=0,
            learning_rate=self._core.learning_rate,
            loss=0.0,
        )

    def _place(self, slot: int) -> slice:
        piece = self._core.layouts[0].slices[slot]
        start = self._core.spec.offsets[piece.tensor] + piece.start
        return slice(start, start + piece.size)


_SLACK_BYTES = 1 << 20
#: Models of rounds, views and members that may wait in the mailbox at a time.
_MODELS_KEPT = 8
_PAUSE_SECONDS = 0.2  # between two looks for a way on
_STALL_SECONDS = 30.0


class CollectivePeers(Exchange):
    """All peers and shard 0, as one worker sees them."""

    def attach(self, own: WorkerFlags, core: WorkerCore) -> None:
        """Take over the model of `core`: its base is this worker's copy."""
        self._own, self._core = own, core
        self._copy = ModelCopy(core)
        method, size = core.method, core.base.nbytes
        self._replica = Replica(core.base, method, core.kernels)
        self._mailbox = Mailbox(_MODELS_KEPT * size + _SLACK_BYTES)
        link, me = own.device.link, own.id_worker
        self._guard = guard_of(self.credentials, self.nb_workers)
        self._server = PeerServer(
            self._mailbox, self._replica.answer, size + _SLACK_BYTES, pace_of(link), self._guard
        )
        model_bytes = self._replica.num_bytes + _SLACK_BYTES
        chunk = chunk_bytes_for(link)
        to_peers = me, self.sender, chunk, model_bytes, self.credentials
        self._parts = Peers(*to_peers)
        self._asks = Peers(*to_peers)  # not behind what waits there
        self._rooms = self._parts, self._asks, self._server
        self._aggregator = Aggregator(
            method.collective, me, self._parts, self._mailbox, self._look_why
        )
        self._neighbours = Neighbours(self._asks, self._replica)
        self._members: tuple[CollectiveMember, ...] = ()
        self._goal = self._replica.at
        self._heard = -1, 0.0  # bytes received, and when that was last another number
        self._copied = -1  # version of the weights that shard 0 was last handed
        self._mean = np.empty_like(core.base)

    @property
    def refused_peers(self) -> dict[str, int]:
        """Streams of other workers that were refused or cut off, by reason."""
        return self._guard.refused

    def join(self) -> list[pb.Welcome]:
        """Listen to peers, then say Hello to shard 0.

        Raises:
            ConfigurationError: The port is taken, or others than this machine would reach it.
        """
        protection = self.credentials.protection
        host = listening_address(self.shards[0].address, self._own.insecure, protection)
        try:
            port = self._server.listen(host, self._own.peer_port, self.nb_workers)
        except PortInUse as error:
            raise ConfigurationError(
                f"--worker_port={self._own.peer_port}: {error} (here --worker_port)"
            ) from error
        self.shards[0].hello.peer_address = host_and_port(host, port)
        logging.info("listening to other workers at %s:%d", host, port)
        welcomes = super().join()
        for room in self._rooms:
            room.run_id = welcomes[0].run_id
        return welcomes

    def pull(self) -> list[ShardReply]:
        """Fetch the whole model, from shard 0 and then from a peer that holds a newer one."""
        while True:
            (reply,) = super().pull()
            at = RoundId(reply.generation, reply.version)
            self._replica.fetched(at, self._copy.with_blocks(reply.blocks))
            self._mailbox.finish(at)
            if reply.stop or self._agree():
                return [_without_weights(reply)]

    def send(self, outgoing: PushRequest) -> None:
        """Keep what this worker brings to the next round."""
        self._brought = outgoing

    def replies(self) -> list[ShardReply | None]:
        """Do one round with all members; report it, and wait until all have.

        Raises:
            Diverged: The weights are no longer finite.
        """
        outgoing, at = self._brought, self._replica.at
        goal = self._goal = RoundId(at.generation, at.number + 1)
        elsewhere = self._do_round(goal, self._copy.with_blocks(outgoing.shards[0]))
        if elsewhere is not None:
            return [elsewhere]
        self._mailbox.finish(goal)
        if not all_finite(self._replica.theta):
            raise Diverged(
                f"the weights of version {goal.number} are NaN or infinite. Lower --learning_rate "
                f"(now {self._core.learning_rate:g})."
            )
        return [self._report(goal, outgoing)]

    def close(self, cause: str) -> None:
        """Hand in the newest weights if that is this worker's to do, and say farewell."""
        if cause in ("done", "interrupted"):
            self._hand_in_last()
        super().close(cause)
        for room in self._rooms:
            room.close()

    @property
    def bytes_up(self) -> int:
        """Training bytes sent, to shard 0 and to peers."""
        return super().bytes_up + sum(room.bytes_sent for room in self._rooms)

    @property
    def bytes_down(self) -> int:
        """Bytes received, from shard 0 and from peers."""
        return super().bytes_down + sum(room.bytes_received for room in self._rooms)

    def save(self) -> State:
        """Return the optimizer's state."""
        return self._replica.save()

    def restore(self, state: State) -> None:
        """Take back what `save` gave, if the model turns out to be the one it belongs to."""
        self._replica.restore(state)

    # -- a round ----------------------------------------------------------------------------

    def _do_round(self, goal: RoundId, values: Float32) -> ShardReply | None:
        """Bring the model to `goal`; return None, or how shard 0 went on without this worker."""
        if self._neighbours.ahead and self._neighbours.take_over(goal, self._others):
            return None
        while self._replica.at != goal:
            try:
                (total,) = self._aggregator.sum(goal, self._members, [values])
                np.divide(total, np.float32(len(self._members)), out=self._mean)
                self._replica.step(self._mean, self._core.learning_rate, goal)
                return None
            except MembershipChanged as change:
                logging.info("round %d: %s", goal.number, change)
            if self._replica.at == goal:
                return None
            reply = self._look()
            if reply.stop:
                return _without_weights(reply)
            if not self._in_step(reply):
                return self.pull()[0]
            if not self._neighbours.take_over(goal, self._others):
                time.sleep(_PAUSE_SECONDS)
        return None

    def _report(self, goal: RoundId, outgoing: PushRequest) -> ShardReply:
        """Tell shard 0 that the round is done, and wait for its release."""
        hands_in = self._leads and (
            goal.number % self._own.sync_every == 0 or goal.number >= self.iter_max
        )
        report = dataclasses.replace(
            outgoing,
            kind=Kind.VALUES,
            shards=[self._copy.blocks() if hands_in else ()],
            base_versions=[goal.number - 1],
            generations=[goal.generation],
            routed=(),
        )
        super().send(report)
        (reply,) = super().replies()
        if reply is None:
            raise Diverged(f"shard 0 found NaN or infinity in version {goal.number}.")
        if hands_in:
            self._copied = goal.number
        if reply.stop or self._in_step(reply):
            return _without_weights(reply)
        return self.pull()[0]

    def _look(self) -> ShardReply:
        """Ask shard 0 who is live and what version it is at."""
        at = self._replica.at
        question = pb.Pull(base_version=at.number, has_base=True, generation=at.generation)
        self.shards[0].pull(question)
        return self._reply_of(0)

    def _look_why(self, sender: int) -> None:
        """A part of a member is late: find out whether it will ever come."""
        before = self._members
        reply = self._look()
        if reply.stop or not self._in_step(reply):
            raise MembershipChanged(f"shard 0 is at version {reply.version}, stop: {reply.stop}")
        if self._members != before:
            raise MembershipChanged(f"members are {[each.worker for each in self._members]}")
        # A peer that has finished may have lost the stream after that: it will not send again. But
        # where the stream stands, what is missing is on its way, and less than the whole model.
        lost = not self._server.hears(sender) or self._is_stalled()
        if lost and self._neighbours.take_over(self._goal, self._others):
            raise MembershipChanged("a peer had finished it")

    def _is_stalled(self) -> bool:
        """Whether nothing at all has come from peers for long."""
        received, now = self._server.bytes_received, time.monotonic()
        if received != self._heard[0]:
            self._heard = received, now
        return now - self._heard[1] > _STALL_SECONDS

    def _in_step(self, reply: ShardReply) -> bool:
        """Whether shard 0 is at this worker's version, and counts on it for the next round."""
        mine = any(member.worker == self._own.id_worker for member in self._members)
        return mine and RoundId(reply.generation, reply.version) == self._replica.at

    # -- members and weights ------------------------------------------------------------------

    def _agree(self) -> bool:
        """Make sure that all members start from the same model; False: pull again."""
        while not self._neighbours.agree(self._others, self._leads):
            time.sleep(_PAUSE_SECONDS)
            reply = self._look()
            if reply.stop or not self._in_step(reply):
                return reply.stop
        return True

    def _decode(self, number: int, reply: pb.Reply, payload: memoryview) -> ShardReply:
        members = tuple(CollectiveMember(m.worker, m.incarnation, m.address) for m in reply.members)
        if members != self._members:
            self._members = members
            self._parts.forget(members)
            self._asks.forget(members)
        return super()._decode(number, reply, payload)

    @property
    def _others(self) -> list[CollectiveMember]:
        return [member for member in self._members if member.worker != self._own.id_worker]

    @property
    def _leads(self) -> bool:
        """Whether this worker is the lowest of the members."""
        return bool(self._members) and self._members[0].worker == self._own.id_worker

    def _hand_in_last(self) -> None:
        """Give shard 0 the weights that it has not had yet; it may be gone already."""
        at = self._replica.at
        if not (self._leads and self._replica.stepped) or self._copied == at.number:
            return
        try:
            super().send(self._copy.alone(at))
            super().replies()
            self._copied = at.number
        except (Unreachable, RequestRejected, ShardGone, ConfigurationError) as error:
            logging.warning("shard 0 did not take the last weights: %s", error)


def _without_weights(reply: ShardReply) -> ShardReply:
    """Return a reply whose weights this worker has already, or has better."""
    return dataclasses.replace(reply, operation=Operation.NONE, blocks=())
