"""What a shard keeps of the weights that its workers hold.

A **replica** is a dense copy of one worker's weights, for replies that leave something out
(`thinwire.ops.downlink.sparse`). It holds the very floats that the worker holds: both do the same
float32 operation with the same decoded values. What a reply leaves out stays in the difference
between the shard and the replica, so nothing is ever lost. The functions here work on this state:

    replicas: worker -> {"weights": [n] float32, "version": of the shard at the worker's last reply}
    resync: "iterations": of worker 1, the last at its "step"; "snapshot": [n] float32, or
        [0] while nobody waits for it; "pending": the workers that have yet to receive it
    scratch: not saved. "difference": [largest slice] float32, "last": worker -> its `LastReply`

`BackupWeights` are copies by version of the shard, for weightings that compare a gradient with the
weights it was computed from (w_bak of DC-ASGD). Workers that received the same version share one.

Source: the server of DGS, Yan et al. (ICPP 2020); docs/methods/compression.md.
"""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from thinwire.ops.codecs.base import kept_entries
from thinwire.ops.downlink.sizes import block_bytes, reply_bytes
from thinwire.ops.downlink.types import ModelReply, ModelRequest, Operation, ShardView
from thinwire.ops.types import Block, CodedValues, State, Update

if TYPE_CHECKING:
    from thinwire.ops.types import Float32, Int64

#: A worker sends the checksum of its model with each push whose step is a multiple of this.
CHECKSUM_INTERVAL = 1000
#: The worker whose iterations decide when to resynchronise.
_PACEMAKER = 1


@dataclasses.dataclass(frozen=True)
class LastReply:
    """A worker's last sparse reply, which a retry of the same push receives again."""

    step: int
    base_version: int  # of the worker before it
    reply: ModelReply


def keep(worker: int, shard: ShardView, state: State) -> None:
    """Keep a replica of a worker that is about to receive the whole of the shard."""
    replicas = state["replicas"]
    if str(worker) not in replicas:
        replicas[str(worker)] = {"weights": np.empty_like(shard.theta)}
    replica = replicas[str(worker)]
    shard.before_change(replica["weights"], None)
    np.copyto(replica["weights"], shard.theta)
    replica["version"] = shard.version
    _settle(worker, state)


def drop(worker: int, state: State) -> None:
    """Drop the replica of a worker."""
    state["replicas"].pop(str(worker), None)
    _settle(worker, state)


def _settle(worker: int, state: State) -> None:
    """Drop what was to be sent to a worker: its replica is new or gone."""
    state["scratch"]["last"].pop(str(worker), None)
    resync = state["resync"]
    if str(worker) in resync["pending"]:
        resync["pending"].remove(str(worker))
        if not resync["pending"]:
            resync["snapshot"] = np.empty(0, np.float32)


def count_iteration(request: ModelRequest, every: int, shard: ShardView, state: State) -> None:
    """Count the iterations of worker 1; take the snapshot in each `every`-th of them.

    The original takes it in the iterations 151, 301 and so on; its first iteration is a gradient of
    the start that it discards. So these are the pushes 150, 300 and so on. All workers with a
    replica are to receive the snapshot; one that a worker still waits for is replaced.
    """
    resync = state["resync"]
    if request.worker != _PACEMAKER or request.step <= resync["step"]:  # a retry counts once
        return
    resync["step"] = request.step
    resync["iterations"] += 1
    if resync["iterations"] % every == 0:
        resync["pending"] = sorted(state["replicas"], key=int)
        resync["snapshot"] = shard.theta.copy()


def send_snapshot(worker: int, shard: ShardView, state: State) -> ModelReply:
    """Return a reply with the snapshot, which becomes the worker's replica.

    What the shard has learned since is the difference to the replica, which later replies bring.
    """
    replica = state["replicas"][str(worker)]
    snapshot = state["resync"]["snapshot"]
    shard.before_change(replica["weights"], None)
    np.copyto(replica["weights"], snapshot)
    replica["version"] = shard.version
    _settle(worker, state)
    return ModelReply(Operation.FULL, Update(None, snapshot.copy()), shard.version, "full", True)


def send_all(worker: int, shard: ShardView, state: State, is_resync: bool = False) -> ModelReply:
    """Return a reply with the whole shard, and keep a replica of it."""
    keep(worker, shard, state)
    update = Update(None, shard.keep(shard.theta))
    return ModelReply(Operation.FULL, update, shard.version, "full", is_resync)


def send_replica(worker: int, shard: ShardView, state: State) -> ModelReply:
    """Return a reply with the worker's whole replica: it continues where it was interrupted.

    Later replies bring what the replica lacks. A shard that was restored from a snapshot replies
    like this, and the run continues bit for bit.
    """
    replica = state["replicas"][str(worker)]
    state["scratch"]["last"].pop(str(worker), None)
    update = Update(None, shard.keep(replica["weights"]))
    return ModelReply(Operation.FULL, update, replica["version"], "full")


def send_largest(
    request: ModelRequest, shard: ShardView, ratio: float, value_dtype: str, state: State
) -> ModelReply:
    """Return a reply with those entries of each slice in which the replica differs most.

    float32 values are the shard's own and overwrite (SET): such an entry is equal afterwards, bit
    for bit, where an addition would round. Others are rounded differences (ADD); the replica adds
    the rounded ones as the worker does, so the rounding errors remain to be sent.

    Args:
        request: Of a worker whose weights equal its replica.
        shard: The model to get nearer to.
        ratio: Fraction of each slice's entries; at least one is sent, and no zero difference.
        value_dtype: One of thinwire.ops.types.VALUE_DTYPES.
        state: Its replica is updated as the worker's weights will be.

    Returns:
        The blocks, or the whole shard where that is not more bytes.
    """
    replica = state["replicas"][str(request.worker)]
    blocks = []
    for slot, (start, stop) in enumerate(itertools.pairwise(shard.offsets)):
        copy, theta = replica["weights"][start:stop], shard.theta[start:stop]
        indices = _largest_differences(theta, copy, ratio, shard, state)
        if indices.size:
            shard.before_change(replica["weights"], indices + start)
            coded = _update_replica(copy, theta, indices, value_dtype, shard)
            blocks.append(Block(slot, stop - start, indices, coded))
    if sum(map(block_bytes, blocks)) >= shard.theta.nbytes:
        return send_all(request.worker, shard, state)
    operation = Operation.SET if value_dtype == "float32" else Operation.ADD
    reply = ModelReply(
        operation if blocks else Operation.NONE, tuple(blocks), shard.version, "sparse"
    )
    before, replica["version"] = replica["version"], shard.version
    state["scratch"]["last"][str(request.worker)] = LastReply(request.step, before, reply)
    return reply


def repeated_reply(request: ModelRequest, state: State) -> ModelReply | None:
    """Return the reply to this very push, if the request is a retry of it."""
    last: LastReply | None = state["scratch"]["last"].get(str(request.worker))
    if last is None or (last.step, last.base_version) != (request.step, request.base_version):
        return None
    return last.reply


def sparse_bytes(shard: ShardView, ratio: float, value_dtype: str) -> float:
    """Return about how many bytes a sparse reply with this fraction of a shard's entries takes."""
    sizes = [stop - start for start, stop in itertools.pairwise(shard.offsets)]
    return sum(reply_bytes(kept_entries(ratio, size), size, value_dtype) for size in sizes)


def checksum(pieces: Iterable[Float32]) -> int:
    """Return the CRC-32 of some weights, little-endian, one piece after the other."""
    total = 0
    for piece in pieces:
        total = zlib.crc32(np.ascontiguousarray(piece, "<f4").data, total)
    return total


def _largest_differences(
    theta: Float32, copy: Float32, ratio: float, shard: ShardView, state: State
) -> Int64:
    """Return where a slice differs most from its replica: ascending, ties to the lowest index."""
    scratch = state["scratch"]
    if scratch["difference"].size < theta.size:
        scratch["difference"] = np.empty(_largest_slice(shard), np.float32)
    difference = np.subtract(theta, copy, out=scratch["difference"][: theta.size])
    indices, _ = shard.kernels.top_k(difference, kept_entries(ratio, theta.size))
    return indices


def _update_replica(
    copy: Float32, theta: Float32, indices: Int64, value_dtype: str, shard: ShardView
) -> CodedValues:
    """Update a replica at these entries as its worker will; return the coded values to send."""
    values = theta[indices]
    if value_dtype == "float32":
        copy[indices] = values
        return CodedValues(value_dtype, values)
    values -= copy[indices]
    coded: CodedValues = shard.kernels.quantise(values, value_dtype)
    copy[indices] += shard.kernels.dequantise(coded)
    return coded


def _largest_slice(shard: ShardView) -> int:
    return max(stop - start for start, stop in itertools.pairwise(shard.offsets))


class BackupWeights:
    """The shard's weights at the versions that workers received last.

    Only a weighting whose `needs_copies` is true costs this memory.
    """

    def __init__(self) -> None:
        """Start without workers."""
        self._versions: dict[int, int] = {}  # worker -> version that it received last
        self._copies: dict[int, Float32] = {}  # version -> [n] float32, read-only

    @property
    def copies(self) -> Mapping[int, Float32]:
        """Version -> the shard's weights [n] float32 at that version."""
        return self._copies

    @property
    def num_bytes(self) -> int:
        """Memory of the copies."""
        return sum(copy.nbytes for copy in self._copies.values())

    def record(self, worker: int, version: int, theta: Float32) -> None:
        """Record that a worker receives `theta` [n] at `version`, instead of what it had."""
        if version not in self._copies:
            copy = theta.copy()
            copy.flags.writeable = False
            self._copies[version] = copy
        self._versions[worker] = version
        self._drop_unused()

    def forget(self, worker: int) -> None:
        """Drop the weights of a worker that has left."""
        self._versions.pop(worker, None)
        self._drop_unused()

    def save(self) -> State:
        """Return durable state; the arrays never change, so they are not copied."""
        return {
            "versions": {str(worker): version for worker, version in self._versions.items()},
            "copies": {str(version): copy for version, copy in self._copies.items()},
        }

    def restore(self, state: State) -> None:
        """Restore the state that `save` returned."""
        self._versions = {int(worker): version for worker, version in state["versions"].items()}
        self._copies = {int(version): copy for version, copy in state["copies"].items()}

    def _drop_unused(self) -> None:
        used = set(self._versions.values())
        for version in [version for version in self._copies if version not in used]:
            del self._copies[version]
