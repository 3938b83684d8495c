"""Dense copies of what each worker has, for replies that leave something out.

A copy holds the very floats that its worker holds: both do the same float32 operation with the same
decoded values. What a reply leaves out is the difference between the shard and the copy, so nothing
is ever lost. The functions here work on the state of `thinwire.ops.downlink.registry.DownSparse`:

    held: worker -> {"weights": [n] float32, "version": of the shard when it was last handed out,
        "replies": since the worker was last sent the whole model}
    scratch: not saved. "difference" [largest slice] float32, "last": worker -> its last reply

Source: the server of DGS, Yan et al. (ICPP 2020); docs/methods/down.md.

What the workers were last handed: a dense copy per worker, for weightings that ask for it.

A copy belongs to a version of the shard, so that workers handed the same version share it. Only
a weighting whose `needs_copies` is true costs this memory.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import zlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from thinwire.ops.codecs.dense import kept_entries
from thinwire.ops.downlink.types import ModelReply, ModelRequest, Operation, ShardView
from thinwire.ops.types import VALUE_BYTES, Block, CodedValues, State, Update

if TYPE_CHECKING:
    from thinwire.ops.types import Float32, Int64

#: A worker sends the checksum of its model with each push whose step is a multiple of this.
CHECKSUM_INTERVAL = 1000


@dataclasses.dataclass(frozen=True)
class LastReply:
    """What a retry is answered with."""

    step: int
    base_version: int  # what the worker had before it
    handed: ModelReply


def keep(worker: int, shard: ShardView, state: State) -> None:
    """Note that a worker is being handed the whole of the shard as it is."""
    held = state["held"].setdefault(str(worker), {"weights": np.empty_like(shard.theta)})
    np.copyto(held["weights"], shard.theta)
    held |= {"version": shard.version, "replies": 0}
    state["scratch"]["last"].pop(str(worker), None)


def send_all(worker: int, shard: ShardView, state: State, is_resync: bool = False) -> ModelReply:
    """Hand a worker the whole shard, and keep a copy of it."""
    keep(worker, shard, state)
    update = Update(None, shard.theta.copy())
    return ModelReply(Operation.FULL, update, shard.version, "full", is_resync)


def send_copy(worker: int, state: State) -> ModelReply:
    """Hand a worker all of the copy that is kept for it: it goes on as if it had never been away.

    What the copy lacks will come with later replies. A shard that comes back from a snapshot
    answers so, and the run goes on bit for bit.
    """
    held = state["held"][str(worker)]
    state["scratch"]["last"].pop(str(worker), None)
    update = Update(None, held["weights"].copy())
    return ModelReply(Operation.FULL, update, held["version"], "full")


def send_largest(
    asked: ModelRequest, shard: ShardView, ratio: float, value_dtype: str, state: State
) -> ModelReply:
    """Hand a worker, of each slice, the entries that its copy differs most in.

    float32 values are the shard's own and overwrite (SET): such an entry is equal afterwards, bit
    for bit, where an addition would round. Others are differences (ADD), rounded; the copy takes
    the rounded ones as the worker does, so the rounding errors stay to be sent.

    Args:
        asked: By a worker that has what its copy has.
        shard: What it is to come nearer to.
        ratio: Of each slice's entries; at least one, and no zero difference.
        value_dtype: One of thinwire.ops.types.VALUE_DTYPES.
        state: The copy moves on.

    Returns:
        The blocks, or the whole shard where that is not more bytes.
    """
    held = state["held"][str(asked.worker)]
    blocks = []
    for slot, (start, stop) in enumerate(itertools.pairwise(shard.offsets)):
        copy, theta = held["weights"][start:stop], shard.theta[start:stop]
        indices = _farthest(theta, copy, ratio, shard, state)
        if indices.size:
            coded = _move(copy, theta, indices, value_dtype, shard)
            blocks.append(Block(slot, stop - start, indices, coded))
    if sum(map(_block_bytes, blocks)) >= shard.theta.nbytes:
        return send_all(asked.worker, shard, state)
    operation = Operation.SET if value_dtype == "float32" else Operation.ADD
    handed = ModelReply(
        operation if blocks else Operation.NONE, tuple(blocks), shard.version, "sparse"
    )
    before, held["version"] = held["version"], shard.version
    held["replies"] += 1
    state["scratch"]["last"][str(asked.worker)] = LastReply(asked.step, before, handed)
    return handed


def repeat(asked: ModelRequest, state: State) -> ModelReply | None:
    """Return the reply that was given to this very push, if it is asked for again."""
    last = state["scratch"]["last"].get(str(asked.worker))
    again = last is not None and (last.step, last.base_version) == (asked.step, asked.base_version)
    return last.handed if again else None


def reply_bytes(count: int, size: int, value_dtype: str = "float32") -> float:
    """Return about how many bytes so many of `size` entries take, with positions at their entropy.

    >>> round(reply_bytes(10, 1000)), reply_bytes(1000, 1000), reply_bytes(0, 1000)
    (50, 4000, 0)
    """
    position_bits = 0.0
    if 0 < count < size:
        share = count / size
        position_bits = -size * (share * math.log2(share) + (1 - share) * math.log2(1 - share))
    return count * VALUE_BYTES[value_dtype] + position_bits / 8


def sparse_bytes(shard: ShardView, ratio: float, value_dtype: str) -> float:
    """Return about how many bytes the largest entries of a shard take."""
    sizes = [stop - start for start, stop in itertools.pairwise(shard.offsets)]
    return sum(reply_bytes(kept_entries(ratio, size), size, value_dtype) for size in sizes)


def checksum(pieces: Iterable[Float32]) -> int:
    """Return the CRC-32 of some weights, little-endian, one piece after the other."""
    total = 0
    for piece in pieces:
        total = zlib.crc32(np.ascontiguousarray(piece, "<f4").data, total)
    return total


def _farthest(theta: Float32, copy: Float32, ratio: float, shard: ShardView, state: State) -> Int64:
    """Return where a slice differs most from its copy: ascending, ties to the lowest index."""
    scratch = state["scratch"]
    if scratch["difference"].size < theta.size:
        scratch["difference"] = np.empty(_largest_slice(shard), np.float32)
    difference = np.subtract(theta, copy, out=scratch["difference"][: theta.size])
    indices, _ = shard.kernels.top_k(difference, kept_entries(ratio, theta.size))
    return indices  # type: ignore[no-any-return]


def _move(
    copy: Float32, theta: Float32, indices: Int64, value_dtype: str, shard: ShardView
) -> CodedValues:
    """Move a copy on at these places as its worker will; return what the worker is sent."""
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


def _block_bytes(block: Block) -> float:
    return reply_bytes(len(block.values.data), block.size, block.values.dtype)


class BackupWeights:
    """The copies, and who holds which."""

    def __init__(self) -> None:
        """Start with nobody."""
        self._versions: dict[int, int] = {}  # worker -> version it was last handed
        self._copies: dict[int, Float32] = {}  # version -> [n] float32, read-only

    @property
    def copies(self) -> Mapping[int, Float32]:
        """Version -> the shard's weights [n] float32 as they were then."""
        return self._copies

    @property
    def num_bytes(self) -> int:
        """Memory of the copies."""
        return sum(copy.nbytes for copy in self._copies.values())

    def note(self, worker: int, version: int, theta: Float32) -> None:
        """Keep what a worker is being handed, `theta` [n] at `version`, instead of what it had."""
        if version not in self._copies:
            copy = theta.copy()
            copy.flags.writeable = False
            self._copies[version] = copy
        self._versions[worker] = version
        self._drop_unheld()

    def forget(self, worker: int) -> None:
        """Drop what a worker held that has left."""
        self._versions.pop(worker, None)
        self._drop_unheld()

    def save(self) -> State:
        """Return durable state; the arrays never change, so they are not copied."""
        return {
            "versions": {str(worker): version for worker, version in self._versions.items()},
            "copies": {str(version): copy for version, copy in self._copies.items()},
        }

    def restore(self, state: State) -> None:
        """Take back what `save` gave."""
        self._versions = {int(worker): version for worker, version in state["versions"].items()}
        self._copies = {int(version): copy for version, copy in state["copies"].items()}

    def _drop_unheld(self) -> None:
        held = set(self._versions.values())
        for version in [version for version in self._copies if version not in held]:
            del self._copies[version]
