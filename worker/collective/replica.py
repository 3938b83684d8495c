"""A worker's replica (copy) of model and optimizer, equal to all other members' replicas.

The class `Replica` holds a worker's model and optimizer state, and sends them to peers that query.
The class `Neighbours` queries peers and adopts their models.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import logging

from thinwire.ops.methods.method import Method
from thinwire.ops.optimizers.base import Moment
from thinwire.ops.types import ConfigurationError, State, Update
from thinwire.proto import peers_pb2 as peers
from thinwire.proto.framing import BytesLike
from thinwire.worker.collective.mailbox import CollectiveMember, RoundId
from thinwire.worker.collective.peers import PeerLost, Peers

if TYPE_CHECKING:
    from thinwire.ops.kernels.base import Kernels
    from thinwire.ops.types import Float32

_NOWHERE = RoundId(-1, 0)
_REPLY_SECONDS = 10.0  # longest time without a byte from a queried peer, in seconds


class Replica:
    """One worker's copy of the model: weights, optimizer state, and their version.

    Only the worker's training thread changes the replica (the worker's copy of the model). Threads
    of the Peer service read the replica (the worker's copy of the model).

    Attributes:
        theta: [n] float32 weights, which each step of the replica changes in place.
        at: Version of the replica's model, in the numbers by which shard 0 counts its versions.
        stepped: True if the model results from a step of this worker or of a peer. False if this
            worker fetched the model from the PS.
    """

    def __init__(self, theta: Float32, method: Method, kernels: Kernels) -> None:
        """Store the weights `theta` [n] float32 as a replica that has no version yet.

        Args:
            theta: [n] float32 weights that the replica changes in place.
            method: Training method of the run, whose server optimizer steps the replica.
            kernels: Set of array functions (`thinwire.ops.kernels`) that compute the steps of the
                optimizer.
        """
        self.theta, self._method, self._kernels = theta, method, kernels
        self._server = method.server.init(theta)
        # Saved state of an earlier incarnation (process), for the method `fetched`; None if there
        # is none.
        self._saved: State | None = None
        self._lock = threading.Lock()
        self.at, self.stepped = _NOWHERE, False

    @property
    def num_bytes(self) -> int:
        """Size of this worker's copy of the weights and optimizer slots, in bytes."""
        return sum(array.nbytes for array in self._arrays())

    def fetched(self, at: RoundId, weights: Float32) -> None:
        """Adopt weights [n] from the PS, and restored optimizer slots of an equal version."""
        with self._lock:
            np.copyto(self.theta, weights)
            slots = self._slots()
            if self._saved is not None and self._saved["version"] == at.number:
                slots = self._saved["slots"]
            self._saved = None
            self._set(slots)
            self.at, self.stepped = at, False

    def step(self, mean: Float32, rate: float, at: RoundId) -> None:
        """Apply a round's mean update [n] with the method's optimizer; set the version to `at`."""
        with self._lock:
            method = self._method
            # In runs in which workers sum, the learning rate of the server's optimizer is constant,
            # so any fraction of the training budget gives the same rate.
            own_rate = method.server.rate(Moment(rate, method.kind), self._server).value
            _, self._server = method.server.step(
                self.theta, Update(None, mean), method.kind, own_rate, self._kernels, self._server
            )
            self.at, self.stepped = at, True

    def adopt(self, payload: memoryview, at: RoundId) -> None:
        """Adopt the model and the optimizer state of a peer.

        Args:
            payload: The peer's weights and optimizer slots; empty if the peer's replica equals this
                worker's replica.
            at: Version of the peer's model, as shard 0 counts versions.

        Raises:
            ValueError: The size of the payload does not fit this worker's model and optimizer.
        """
        with self._lock:
            if len(payload):
                self._fill(payload)
            self.at, self.stepped = at, True

    def digest(self) -> bytes:
        """Return a hash of weights and optimizer slots; replicas with equal hashes are equal."""
        code = hashlib.blake2b(digest_size=16)
        for array in self._arrays():
            code.update(array.tobytes())
        return code.digest()

    def answer(self, query: peers.ModelQuery) -> tuple[peers.Holding, Sequence[BytesLike]]:
        """Return this worker's model version, and the model if a peer queries this version.

        The method `answer` of a replica may be called from any thread. The returned model is empty
        if the query's digest shows that the peer's replica equals this worker's replica.
        """
        with self._lock:
            holding = peers.Holding(version=self.at.number, generation=max(0, self.at.generation))
            if self.at != RoundId(query.generation, query.version):
                return holding, []
            holding.standing = peers.STANDING_STEPPED if self.stepped else peers.STANDING_FETCHED
            holding.same = bool(query.digest) and query.digest == self.digest()
            return holding, [] if holding.same else [a.tobytes() for a in self._arrays()]

    def save(self) -> State:
        """Return the replica's version and optimizer slots, for a later process of this worker."""
        with self._lock:
            return {"version": self.at.number, "slots": self._slots()}

    def restore(self, state: State) -> None:
        """Store a state that `save` returned, for the next call of `fetched`."""
        self._saved = state

    def _slots(self) -> State:
        return self._method.server.save(self._server)

    def _set(self, slots: State) -> None:
        self._server = self._method.server.restore(slots, self.theta, self._server)

    def _arrays(self) -> list[Any]:
        return [self.theta, *(np.asarray(slot) for slot in self._slots().values())]

    def _fill(self, payload: memoryview) -> None:
        slots = self._slots()
        expected = self.theta.nbytes + sum(np.asarray(slot).nbytes for slot in slots.values())
        if len(payload) != expected:
            raise ValueError(
                f"a peer's model and optimizer have {len(payload)} bytes, but the model and "
                f"optimizer of this worker have {expected} bytes; give all workers the same "
                "--network, --server_optimizer and --momentum"
            )
        end = self.theta.nbytes
        np.copyto(self.theta, np.frombuffer(payload[:end], "<f4"))
        for name, slot in slots.items():
            start, end = end, end + np.asarray(slot).nbytes
            piece = np.frombuffer(payload[start:end], np.asarray(slot).dtype)
            slots[name] = piece.reshape(np.shape(slot))
        self._set(slots)


class Neighbours:
    """Updates this worker's replica (copy of the model) from the replicas of its peers.

    Attributes:
        ahead: True if a peer has finished the next training round already, and waits until this
            worker reports the round, too.
    """

    def __init__(self, streams: Peers, replica: Replica) -> None:
        """Store the arguments.

        Args:
            streams: Streams to peers that carry no parts of sums, so that queries do not wait
                behind parts.
            replica: This worker's replica, its copy of the model and the optimizer state.
        """
        self._streams, self._replica = streams, replica
        self.ahead = False

    def take_over(self, goal: RoundId, others: Sequence[CollectiveMember]) -> bool:
        """Adopt the model of a peer that has finished a given round of sums.

        Args:
            goal: Training round whose sum and step the peer must have finished.
            others: All workers that are members of the round, except this worker.

        Returns:
            True if a peer had finished the round and this worker has adopted its model.
        """
        self.ahead = False
        query = peers.ModelQuery(generation=goal.generation, version=goal.number)
        for member in others:
            try:
                holding, payload = self._streams.query(member, query, _REPLY_SECONDS)
            except PeerLost:
                continue
            if holding.standing == peers.STANDING_STEPPED:
                self._adopt(payload, goal)
                return True
        return False

    def agree(self, others: Sequence[CollectiveMember], leads: bool) -> bool:
        """Adopt the model that all members of the round must have at this replica's version.

        All members of a round adopt the model of a member that has reached this replica's version
        by a step. If no member has taken a step, as at the start of a run, all members adopt the
        model of the member with the lowest id.

        Args:
            others: Workers that are members of the round, except this worker, in order of worker
                id.
            leads: True if this worker has the lowest worker id of all members of the round.

        Returns:
            True if this worker has the model that all members must have. False if a member did not
            reply or has an older version, so the caller must try again.
        """
        at = self._replica.at
        query = peers.ModelQuery(generation=at.generation, version=at.number)
        query.digest = self._replica.digest()
        fetched: dict[CollectiveMember, memoryview] = {}
        for member in others:
            try:
                holding, payload = self._streams.query(member, query, _REPLY_SECONDS)
            except PeerLost as error:
                logging.info("%s", error)
                continue
            if holding.standing == peers.STANDING_STEPPED:
                self._adopt(payload, at)
                return True
            if holding.standing == peers.STANDING_FETCHED:
                fetched[member] = payload
            elif RoundId(holding.generation, holding.version) > at:
                self.ahead = True
                return True
        # A member of the round that has not replied may have stepped, so decide only when all
        # members have replied.
        if len(fetched) < len(others):
            return False
        if not leads:
            self._adopt(fetched[others[0]], at)
        return True

    def _adopt(self, payload: memoryview, at: RoundId) -> None:
        try:
            self._replica.adopt(payload, at)
        except ValueError as error:
            raise ConfigurationError(str(error)) from error
