"""A worker's exchanges in a run in which workers sum and apply updates among themselves.

The class `CollectiveExchange` has the interface of `Exchange`, which exchanges with a PS. In each
training round, the workers that are alive sum their updates. Every member of a round applies the
same step to its copy of the model, and reports the round to shard 0. When all members have reported
a round, shard 0 sends every member a reply with the members of the next round. The live worker with
the lowest id is the leader, and sends the weights to shard 0 at intervals. A member that missed a
round or has just joined fetches the model and the optimizer's state from a peer.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from absl import logging

from thinwire.ops.downlink.types import Operation
from thinwire.ops.kernels.numpy_ops import all_finite
from thinwire.ops.push_head import PushHead, PushOrigin
from thinwire.ops.sharding.split import shard_positions
from thinwire.ops.types import Block, CodedValues, ConfigurationError, Kind, State
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import chunk_bytes_for
from thinwire.proto.grpc import PortInUse, Unreachable
from thinwire.proto.grpc.common import host_and_port
from thinwire.proto.grpc.session import RequestRejected
from thinwire.runtime.run.settings import Diverged
from thinwire.worker.client.exchange import Exchange
from thinwire.worker.client.shard_client import ShardGone
from thinwire.worker.collective.all_reduce import Aggregator, MembershipChanged
from thinwire.worker.collective.mailbox import CollectiveMember, Mailbox, RoundId
from thinwire.worker.collective.peers import Peers, listening_address
from thinwire.worker.collective.replica import Neighbours, Replica
from thinwire.worker.collective.service import PeerServer, guard_of
from thinwire.worker.core.core import WorkerCore
from thinwire.worker.core.messages import PushRequest, ShardReply
from thinwire.worker.flags import WorkerFlags

if TYPE_CHECKING:
    from thinwire.ops.types import Float32

_SLACK_BYTES = 1 << 20
#: Capacity of the mailbox, in multiples of the model's size. The mailbox holds parts of sums from
#: several rounds, sets of members and senders.
_MODELS_KEPT = 8
_PAUSE_SECONDS = 0.2  # pause between two queries to the peers, in seconds
# time without a byte from peers, in seconds, after which the peers are queried
_STALL_SECONDS = 30.0


class CollectiveExchange(Exchange):
    """Exchanges in which a worker sums updates with its peers and reports to shard 0."""

    def attach(self, own: WorkerFlags, core: WorkerCore) -> None:
        """Use the base weights of `core` as this worker's replica; create the streams to its peers.

        Args:
            own: Settings that only this worker reads from its flags.
            core: Training engine of this worker.
        """
        self._own, self._core = own, core
        # Place of each slice of shard 0's model in the flat weights.
        self._places = shard_positions(core.spec, core.layouts[0])
        method, size = core.method, core.base.nbytes
        self._replica = Replica(core.base, method, core.kernels)
        self._mailbox = Mailbox(_MODELS_KEPT * size + _SLACK_BYTES)
        link, me = own.device.link, own.id_worker
        self._guard = guard_of(self.credentials, self.nb_workers)
        self._server = PeerServer(
            self._mailbox, self._replica.answer, size + _SLACK_BYTES, link, self._guard
        )
        model_bytes = self._replica.num_bytes + _SLACK_BYTES
        chunk = chunk_bytes_for(link)
        to_peers = me, self.sender, chunk, model_bytes, self.credentials
        self._parts = Peers(*to_peers)
        # Queries have separate streams, so that they do not wait behind parts of sums.
        self._queries = Peers(*to_peers)
        self._ends = self._parts, self._queries, self._server
        self._aggregator = Aggregator(
            method.collective, me, self._parts, self._mailbox, self._on_late_part
        )
        self._neighbours = Neighbours(self._queries, self._replica)
        self._members: tuple[CollectiveMember, ...] = ()
        self._goal = self._replica.at
        # Pair (number of bytes received from peers, monotonic time of its last change).
        self._progress = -1, 0.0
        # Version of the weights that this worker sent to shard 0 last; -1 if it sent none.
        self._copied = -1
        self._mean = np.empty_like(core.base)

    @property
    def refused_peers(self) -> dict[str, int]:
        """Number of peers' streams that this worker refused or closed, by reason."""
        return self._guard.refused

    def join(self) -> list[pb.Welcome]:
        """Start the Peer service for connections of peers, then join the run at shard 0.

        Raises:
            ConfigurationError: Another process uses the peer port, or other machines could reach
                the port without protection.
        """
        protection = self.credentials.protection
        host = listening_address(self.shards[0].address, self._own.insecure, protection)
        try:
            port = self._server.listen(host, self._own.peer_port)
        except PortInUse as error:
            raise ConfigurationError(
                f"--worker_port={self._own.peer_port}: the worker cannot listen: {error}"
            ) from error
        self.shards[0].hello.peer_address = host_and_port(host, port)
        logging.info("this worker listens for other workers at %s:%d", host, port)
        welcomes = super().join()
        for end in self._ends:
            end.run_id = welcomes[0].run_id
        return welcomes

    def pull(self) -> list[ShardReply]:
        """Fetch the whole model from shard 0, and then from a peer if a peer's model is newer."""
        while True:
            (reply,) = super().pull()
            at = RoundId(reply.generation, reply.version)
            self._replica.fetched(at, self._with_blocks(reply.blocks))
            self._mailbox.finish(at)
            if reply.stop or self._agree():
                return [_without_weights(reply)]

    def send(self, request: PushRequest) -> None:
        """Store this worker's update for the next round's sum, which `replies` computes."""
        self._request = request

    def replies(self) -> list[ShardReply | None]:
        """Sum updates and step with all members; report the round to shard 0 and await its reply.

        Raises:
            Diverged: The weights after the optimizer step of the round hold NaN or infinity.
        """
        request, at = self._request, self._replica.at
        goal = self._goal = RoundId(at.generation, at.number + 1)
        outside_round = self._do_round(goal, self._with_blocks(request.shards[0]))
        if outside_round is not None:
            return [outside_round]
        self._mailbox.finish(goal)
        if not all_finite(self._replica.theta):
            raise Diverged(
                f"the weights of version {goal.number} are NaN or infinite. Lower --learning_rate "
                f"(now {self._core.learning_rate:g})."
            )
        return [self._report(goal, request)]

    def close(self, cause: str) -> None:
        """Send the newest weights if this worker is the leader, and leave the run."""
        if cause in ("done", "interrupted"):
            self._send_last_weights()
        super().close(cause)
        for end in self._ends:
            end.close()

    @property
    def bytes_up(self) -> int:
        """Total number of training bytes that this worker has sent to shard 0 and to peers."""
        return super().bytes_up + sum(end.bytes_sent for end in self._ends)

    @property
    def bytes_down(self) -> int:
        """Total number of bytes that this worker has received from shard 0 and from peers."""
        return super().bytes_down + sum(end.bytes_received for end in self._ends)

    def save(self) -> State:
        """Return the version and the optimizer's state of this worker's replica."""
        return self._replica.save()

    def restore(self, state: State) -> None:
        """Restore a state from `save` if the first fetched model has the version of the state."""
        self._replica.restore(state)

    # -- a round ----------------------------------------------------------------------------

    def _do_round(self, goal: RoundId, values: Float32) -> ShardReply | None:
        """Bring this worker's model to the version `goal`, together with its peers.

        Returns:
            None if the model has reached version `goal`. Shard 0's reply if the run has stopped or
            has continued without this worker.
        """
        # A peer may have finished the round already. Such a peer does not send its parts of the sum
        # again, but this worker can fetch the resulting model from it.
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
            reply = self._poll()
            if reply.stop:
                return _without_weights(reply)
            if not self._in_step(reply):
                return self.pull()[0]
            if not self._neighbours.take_over(goal, self._others):
                time.sleep(_PAUSE_SECONDS)
        return None

    def _report(self, goal: RoundId, request: PushRequest) -> ShardReply:
        """Report the finished round to shard 0, and wait for shard 0's reply."""
        is_last = self.iter_max is not None and goal.number >= self.iter_max
        is_due = goal.number % self._own.sync_every == 0 or is_last
        sends_weights = self._leads and is_due
        origin = dataclasses.replace(
            request.origins[0], base_version=goal.number - 1, generation=goal.generation
        )
        report = dataclasses.replace(
            request,
            origins=[origin],
            kind=Kind.VALUES,
            shards=[self._blocks() if sends_weights else ()],
            routed=(),
        )
        super().send(report)
        (reply,) = super().replies()
        if reply is None:
            raise Diverged(f"shard 0 found NaN or infinity in version {goal.number}.")
        if sends_weights:
            self._copied = goal.number
        if reply.stop or self._in_step(reply):
            return _without_weights(reply)
        return self.pull()[0]

    def _poll(self) -> ShardReply:
        """Fetch the list of live members and the version of the model from shard 0."""
        at = self._replica.at
        request = pb.Pull(base_version=at.number, has_base=True, generation=at.generation)
        self.shards[0].pull(request)
        return self._reply_of(0)

    def _on_late_part(self, sender: int) -> None:
        """Raise MembershipChanged if a late part of the sum from member `sender` cannot arrive."""
        before = self._members
        reply = self._poll()
        if reply.stop or not self._in_step(reply):
            raise MembershipChanged(f"shard 0 has version {reply.version}, run ends: {reply.stop}")
        if self._members != before:
            raise MembershipChanged(
                f"the members are now workers {[member.worker for member in self._members]}"
            )
        # A peer that has finished the round does not send its parts again. So if the stream of the
        # peer broke, fetch the model of the peer. While the stream is open, wait for the part,
        # which is smaller than the whole model.
        lost = not self._server.has_stream_of(sender) or self._is_stalled()
        if lost and self._neighbours.take_over(self._goal, self._others):
            raise MembershipChanged("adopted the model of a peer that had finished the round")

    def _is_stalled(self) -> bool:
        """Return True if no byte has arrived from other workers for `_STALL_SECONDS`."""
        received, now = self._server.bytes_received, time.monotonic()
        if received != self._progress[0]:
            self._progress = received, now
        return now - self._progress[1] > _STALL_SECONDS

    def _in_step(self, reply: ShardReply) -> bool:
        """Return True if shard 0 has this worker's version and lists this worker as a member."""
        is_member = any(member.worker == self._own.id_worker for member in self._members)
        return is_member and RoundId(reply.generation, reply.version) == self._replica.at

    def _with_blocks(self, blocks: Iterable[Block]) -> Float32:
        """Return a copy of the base weights [n], with dense blocks from shard 0 written over it."""
        flat = self._core.base.copy()
        for block in blocks:
            flat[self._places[block.slot]] = block.values.data
        return flat

    def _blocks(self) -> tuple[Block, ...]:
        """Return the base weights (the weights that all workers have) as blocks of shard 0's model.

        The blocks are views of the base weights, so the base weights must not change before shard
        0's reply arrives.
        """
        views = (self._core.base[place] for place in self._places)
        return tuple(
            Block(slot, view.size, None, CodedValues("float32", view))
            for slot, view in enumerate(views)
        )

    # -- members and weights ------------------------------------------------------------------

    def _agree(self) -> bool:
        """Make all members of the next round start from the same model.

        Returns:
            True if the members have the same model or the run has stopped. False if the caller must
            pull the model again.
        """
        while not self._neighbours.agree(self._others, self._leads):
            time.sleep(_PAUSE_SECONDS)
            reply = self._poll()
            if reply.stop or not self._in_step(reply):
                return reply.stop
        return True

    def _decode(self, number: int, reply: pb.Reply, payload: memoryview) -> ShardReply:
        members = tuple(CollectiveMember(m.worker, m.incarnation, m.address) for m in reply.members)
        if members != self._members:
            self._members = members
            self._parts.forget(members)
            self._queries.forget(members)
        return super()._decode(number, reply, payload)

    @property
    def _others(self) -> list[CollectiveMember]:
        return [member for member in self._members if member.worker != self._own.id_worker]

    @property
    def _leads(self) -> bool:
        """True if this worker is the leader: the member with the lowest id."""
        return bool(self._members) and self._members[0].worker == self._own.id_worker

    def _send_last_weights(self) -> None:
        """Send the last round's weights to shard 0; ignore the error if shard 0 has ended."""
        at = self._replica.at
        if not (self._leads and self._replica.stepped) or self._copied == at.number:
            return
        try:
            head = PushHead(self._core.step + 1, schedule_rate=self._core.learning_rate)
            origin = PushOrigin(at.number, at.generation)
            super().send(PushRequest(head, [origin], Kind.VALUES, [self._blocks()]))
            super().replies()
            self._copied = at.number
        except (Unreachable, RequestRejected, ShardGone, ConfigurationError) as error:
            logging.warning("shard 0 did not accept this worker's last weights: %s", error)


def _without_weights(reply: ShardReply) -> ShardReply:
    """Return shard 0's reply without its weights, as this worker has equal or newer ones."""
    return dataclasses.replace(reply, operation=Operation.NONE, blocks=())
