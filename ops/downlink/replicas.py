"""Copies of workers' weights on a shard server: replicas for sparse replies, backups by version.

A **replica** is a dense copy of one worker's weights on the shard server, for replies that omit
some differences (`thinwire.ops.downlink.sparse`). The replica (the shard server's copy of a
worker's weights) equals the worker's weights bit for bit: shard server and worker do the same
float32 operation with the same decoded values. If a sparse reply omits a weight's difference, the
difference between the shard server's weight and the replica (copy of the worker's weights) remains
for a later reply, so no difference is lost. The functions of `replicas` work on a state, a dict
with the keys:

    replicas: worker -> {"weights": [n] float32 copy of the worker's weights, "version": version of
        the shard's weights at the last reply}
    resync: "iterations": number of worker 1's iterations; "step": step of the last counted
        iteration; "snapshot": the shard's weights [n] float32, or [0] while no worker waits for the
        snapshot; "pending": workers that have yet to receive the snapshot
    scratch: arrays not saved in checkpoints. "difference": [largest slice] float32, memory for the
        differences of one slice; "last": worker -> `LastReply`

`BackupWeights` holds copies of the shard's weights by version, for weightings that compare a
gradient with the weights from which it was computed (w_bak in DC-ASGD). Workers that received equal
versions of the weights share one backup copy of the weights.

Source: the server of DGS, Yan et al. (ICPP 2020); docs/methods/compression.md.
"""

from __future__ import annotations

import dataclasses
import itertools
import zlib
from collections.abc import Iterable, Mapping

import numpy as np

from thinwire.ops.codecs.base import kept_entries
from thinwire.ops.downlink.sizes import block_bytes, reply_bytes
from thinwire.ops.downlink.types import ModelReply, ModelRequest, Operation, ShardView
from thinwire.ops.types import Block, CodedValues, Float32, Int64, State, Update

#: A worker sends its model's checksum with its push in every step divisible by this number.
CHECKSUM_INTERVAL = 1000
#: Number of the worker that sets the pace: its iterations determine when a shard server takes a
#: snapshot of the weights for all workers.
_PACEMAKER = 1


@dataclasses.dataclass(frozen=True)
class LastReply:
    """A shard server's last sparse reply to a worker, sent again if the worker retries its push."""

    step: int  # the worker's step of the push that the reply answered
    base_version: int  # version of the worker's weights before it applied the reply
    reply: ModelReply


def keep(worker: int, shard: ShardView, state: State, weights: Float32) -> None:
    """Copy weights into the replica of a worker that will receive all these weights."""
    replicas = state["replicas"]
    if str(worker) not in replicas:
        replicas[str(worker)] = {"weights": np.empty_like(shard.theta)}
    replica = replicas[str(worker)]
    shard.before_change(replica["weights"], None)
    np.copyto(replica["weights"], weights)
    replica["version"] = shard.version
    _settle(worker, state)


def drop(worker: int, state: State) -> None:
    """Drop the shard server's copy of a worker's weights (its replica)."""
    state["replicas"].pop(str(worker), None)
    _settle(worker, state)


def _settle(worker: int, state: State) -> None:
    """Drop a worker's last reply and pending model snapshot after its whole replica changed."""
    state["scratch"]["last"].pop(str(worker), None)
    resync = state["resync"]
    if str(worker) in resync["pending"]:
        resync["pending"].remove(str(worker))
        if not resync["pending"]:
            resync["snapshot"] = np.empty(0, np.float32)


def count_iteration(request: ModelRequest, every: int, shard: ShardView, state: State) -> None:
    """Count worker 1's iterations; copy the shard's weights (snapshot) every `every` iterations.

    The published DGS program takes its snapshot of the model in iterations 151, 301 and so on. The
    DGS program discards its first iteration, so its snapshots are taken at pushes 150, 300 and so
    on. All workers with a replica (copy of their weights) on the shard server receive each snapshot
    of the model's weights. A new snapshot of the model's weights replaces an older snapshot that
    some workers have not received yet. If `every` is 0, no iterations are counted.
    """
    resync = state["resync"]
    # The comparison of steps prevents that a retry of a counted push is counted again.
    if not every or request.worker != _PACEMAKER or request.step <= resync["step"]:
        return
    resync["step"] = request.step
    resync["iterations"] += 1
    if resync["iterations"] % every == 0:
        resync["pending"] = sorted(state["replicas"], key=int)
        resync["snapshot"] = shard.theta.copy()


def send_snapshot(worker: int, shard: ShardView, state: State) -> ModelReply:
    """Return a reply with the snapshot of the model's weights, which becomes the worker's replica.

    Changes of the shard server's weights since the snapshot become differences from the worker's
    replica, which later replies send.
    """
    snapshot = state["resync"]["snapshot"]
    keep(worker, shard, state, snapshot)
    return ModelReply(Operation.FULL, Update(None, snapshot.copy()), shard.version, "full", True)


def send_all(worker: int, shard: ShardView, state: State, is_resync: bool = False) -> ModelReply:
    """Return a reply with all weights of the shard, which become the worker's replica."""
    keep(worker, shard, state, shard.theta)
    update = Update(None, shard.keep(shard.theta))
    return ModelReply(Operation.FULL, update, shard.version, "full", is_resync)


def send_replica(worker: int, shard: ShardView, state: State) -> ModelReply:
    """Return a reply with a worker's whole replica, from which the worker continues to train.

    After the worker has received its replica, later replies send the differences between the
    replica and the shard server's weights. A shard server that was restored from a checkpoint sends
    each worker its replica, so that the run continues bit for bit.
    """
    replica = state["replicas"][str(worker)]
    state["scratch"]["last"].pop(str(worker), None)
    update = Update(None, shard.keep(replica["weights"]))
    return ModelReply(Operation.FULL, update, replica["version"], "full")


def send_largest(
    request: ModelRequest, shard: ShardView, ratio: float, value_dtype: str, state: State
) -> ModelReply:
    """Return a reply with the entries of each variable slice where shard and replica differ most.

    Values of dtype float32 in a sparse reply are the shard server's weights and overwrite the
    worker's weights (operation SET). A float32 entry of a sparse reply equals the shard server's
    weight bit for bit; adding a difference would round. Values in a sparse reply whose dtype is not
    float32 are rounded differences of weights (operation ADD). The shard server adds the rounded
    differences to the replica as the worker adds them to its weights, so the rounding errors remain
    as differences and are sent later.

    Args:
        request: Request of a worker whose weights equal its replica on the shard server.
        shard: Weights and version of the shard server that replies.
        ratio: Fraction of each variable slice's entries to send. At least one entry is sent, but no
            entry without a difference.
        value_dtype: Dtype of the sent values, for example float32 or int8 (VALUE_DTYPES in
            thinwire.ops.types).
        state: State of the downlink codec, with the worker's replica, which changes as the worker's
            weights will change.

    Returns:
        A reply with one block per slice, or with the whole shard if that takes no more bytes.
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
    """Return the earlier reply to a worker's push if the worker retries the push, else None."""
    last: LastReply | None = state["scratch"]["last"].get(str(request.worker))
    if last is None or (last.step, last.base_version) != (request.step, request.base_version):
        return None
    return last.reply


def sparse_bytes(shard: ShardView, ratio: float, value_dtype: str) -> float:
    """Estimate the bytes of a sparse reply with the fraction `ratio` of a shard's entries."""
    sizes = [stop - start for start, stop in itertools.pairwise(shard.offsets)]
    return sum(reply_bytes(kept_entries(ratio, size), size, value_dtype) for size in sizes)


def checksum(pieces: Iterable[Float32]) -> int:
    """Return the CRC-32 of an array's little-endian bytes, given the array's pieces in order."""
    total = 0
    for piece in pieces:
        total = zlib.crc32(np.ascontiguousarray(piece, "<f4").data, total)
    return total


def _largest_differences(
    theta: Float32, copy: Float32, ratio: float, shard: ShardView, state: State
) -> Int64:
    """Return ascending positions where a variable slice's weights differ most from the replica."""
    scratch = state["scratch"]
    if scratch["difference"].size < theta.size:
        scratch["difference"] = np.empty(np.diff(shard.offsets).max(), np.float32)
    difference = np.subtract(theta, copy, out=scratch["difference"][: theta.size])
    indices, _ = shard.kernels.top_k(difference, kept_entries(ratio, theta.size))
    return indices


def _update_replica(
    copy: Float32, theta: Float32, indices: Int64, value_dtype: str, shard: ShardView
) -> CodedValues:
    """Change a worker's replica at positions `indices` as the worker will change its weights.

    Returns:
        The coded values to send to the worker.
    """
    values = theta[indices]
    if value_dtype == "float32":
        copy[indices] = values
        return CodedValues(value_dtype, values)
    values -= copy[indices]
    # Add the decoded values, not the exact ones: the worker adds the decoded values, and a replica
    # that differs from the worker's weights would never be corrected.
    coded: CodedValues = shard.kernels.quantise(values, value_dtype)
    copy[indices] += shard.kernels.dequantise(coded)
    return coded


class BackupWeights:
    """Copies of the shard server's weights at the versions that workers received last.

    The shard server records copies of its weights only if the weighting policy (scaling of stale
    updates) has `needs_copies`.
    """

    def __init__(self) -> None:
        """Start without copies of the shard server's weights."""
        # Worker -> version of the weights that the worker received last.
        self._versions: dict[int, int] = {}
        # Version -> the shard's weights [n] float32 at that version, read-only.
        self._copies: dict[int, Float32] = {}

    @property
    def copies(self) -> Mapping[int, Float32]:
        """Version of the weights -> copy of the shard's weights [n] float32 at that version."""
        return self._copies

    @property
    def num_bytes(self) -> int:
        """Memory that the copies of the shard server's weights take, in bytes."""
        return sum(copy.nbytes for copy in self._copies.values())

    def record(self, worker: int, version: int, theta: Float32) -> None:
        """Record that a worker holds weights `theta` [n] of a version; drop unused copies."""
        if version not in self._copies:
            copy = theta.copy()
            copy.flags.writeable = False
            self._copies[version] = copy
        self._versions[worker] = version
        self._drop_unused()

    def forget(self, worker: int) -> None:
        """Forget the weights' version of a worker that has left, and a copy that no worker uses."""
        self._versions.pop(worker, None)
        self._drop_unused()

    def save(self) -> State:
        """Return the workers' versions and the copies of the weights (not copied again) to save."""
        return {
            "versions": {str(worker): version for worker, version in self._versions.items()},
            "copies": {str(version): copy for version, copy in self._copies.items()},
        }

    def restore(self, state: State) -> None:
        """Replace the workers' versions and all copies of the weights by the result of `save`."""
        self._versions = {int(worker): version for worker, version in state["versions"].items()}
        self._copies = {int(version): copy for version, copy in state["copies"].items()}

    def _drop_unused(self) -> None:
        used = set(self._versions.values())
        for version in [version for version in self._copies if version not in used]:
            del self._copies[version]
