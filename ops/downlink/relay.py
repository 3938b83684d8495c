"""The down codec that relays updates as they were coded.

Where the server adds the plain mean of a round, every worker can do so itself: it decodes the
round's updates, sums them in order of worker id and adds the mean, by the functions that the shard
does it by. Then its floats equal the shard's, bit for bit. Of coarse values that takes fewer bytes
than the new weights in float32, and in any case the shard codes nothing: it passes on what came.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable
from typing import TYPE_CHECKING, ClassVar

from thinwire.ops.downlink.exact import DownDelta
from thinwire.ops.downlink.sizes import block_bytes, reply_bytes
from thinwire.ops.downlink.types import (
    ModelReply,
    ModelRequest,
    Operation,
    RelayedRound,
    RelayedRounds,
    ShardView,
)
from thinwire.ops.frozen import BeforeChange, unguarded
from thinwire.ops.types import Block, State

if TYPE_CHECKING:
    from thinwire.ops.downlink.own_entries import OwnEntries
    from thinwire.ops.types import Int32, Int64
    from thinwire.ops.wire.blocks import WireBlock

#: Bytes of updates that are kept to be relayed, for each entry of the shard; the last round is kept
#: beyond that. And the most rounds: an entry's change before the newest counts as so old at most.
_KEPT_BYTES, _MOST_ROUNDS = 0.5, 64
#: Bytes that describe a block in a message's header, and the most of them in one.
_DESCRIPTION_BYTES, _MOST_DESCRIPTIONS = 20, 256 << 10
#: Entries that a worker decodes of several rounds, for each of the shard.
_MOST_DECODED = 2
#: Bytes of a new weight, whose exponent is deflated.
_WEIGHT_BYTES = 3.5
#: How many times the bytes of a delta rounds may have where the shard is behind: it merges, gathers
#: and codes each entry of a delta, and passes rounds on as they are.
_MOST_MORE = 1.25


@dataclasses.dataclass(frozen=True)
class _KeptRound:
    """A round that can be relayed.

    Attributes:
        version: Of the shard after it.
        round: The updates, in memory of their own.
        num_bytes: About, of each update, with the descriptions of its blocks.
        num_entries: Of all updates, decoded.
        changed_at: [k] int32, the versions that had changed the round's entries last before it, or
            how many entries there are, where it has changed all.
    """

    version: int
    round: RelayedRound
    num_bytes: tuple[float, ...]
    num_entries: int
    changed_at: Int32 | int

    @functools.cached_property
    def at_least(self) -> Int64:
        """[_MOST_ROUNDS + 1]: at how many entries the change before is at least so old.

        Needed only where some worker lacks the round, so never with a single one.
        """
        import numpy as np

        if isinstance(self.changed_at, int):
            return np.full(_MOST_ROUNDS + 1, self.changed_at)
        ages = np.minimum(self.version - self.changed_at, _MOST_ROUNDS)
        return np.bincount(ages, minlength=_MOST_ROUNDS + 1)[::-1].cumsum()[::-1]


@dataclasses.dataclass(frozen=True)
class DownRelay(DownDelta):
    """Be ``delta``, but relay all rounds since a worker's version where that pays.

    It does where it takes no more bytes; or up to a quarter more, while others wait for the shard.

    A round can be relayed if a plain mean of updates as they came, times one factor, is all that
    has changed the weights. The update that the worker's own push has brought is left out: the
    worker has it.
    """

    relays: ClassVar[bool] = True

    def record_update(
        self,
        indices: Int64 | None,
        version: int,
        state: State,
        own: OwnEntries | None = None,
        relayed: RelayedRound | None = None,
        before_change: BeforeChange = unguarded,
    ) -> State:
        """Record the changed entries, and the round if it can be relayed."""
        rounds = state["scratch"].setdefault("rounds", [])
        kept = None if relayed is None else _keep(relayed, indices, version, state)
        if kept is None or (rounds and rounds[-1].version != version - 1):
            rounds.clear()
        if kept is not None:
            rounds.append(kept)
        num_kept = sum(sum(each.num_bytes) for each in rounds)
        most = _KEPT_BYTES * state["last_changed"].size
        while len(rounds) > 1 and (num_kept > most or len(rounds) > _MOST_ROUNDS):
            num_kept -= sum(rounds.pop(0).num_bytes)
        return super().record_update(indices, version, state, own, before_change=before_change)

    def sharing_key(self, request: ModelRequest, state: State) -> Hashable:
        """Return the request where rounds are relayed: each has its own left out."""
        return super().sharing_key(request, state) if _to_relay(request, state) is None else request

    def gather(self, request: ModelRequest, shard: ShardView, state: State) -> ModelReply:
        """Return all rounds that a worker lacks, if that pays; else what has changed."""
        rounds = _to_relay(request, state)
        if rounds is None:
            return super().gather(request, shard, state)
        return ModelReply(Operation.RELAY, rounds, shard.version, "relay")


def _keep(
    relayed: RelayedRound, indices: Int64 | None, version: int, state: State
) -> _KeptRound | None:
    """Return what is kept of a round; None of one that no reply would hold."""
    size = state["last_changed"].size
    num_bytes = tuple(
        sum(block_bytes(block) + _DESCRIPTION_BYTES for block in each.blocks)
        for each in relayed.updates
    )
    if sum(num_bytes) - max(num_bytes) > _MOST_MORE * _WEIGHT_BYTES * size:
        return None
    counts = [sum(map(_num_values, each.blocks)) for each in relayed.updates]
    num_entries = size * len(counts) if indices is None else sum(counts)
    own = tuple(
        dataclasses.replace(each, blocks=tuple(map(_copied, each.blocks)))
        for each in relayed.updates
    )
    changed_at = size if indices is None else state["last_changed"][indices]
    return _KeptRound(version, RelayedRound(own, relayed.rate), num_bytes, num_entries, changed_at)


def _num_values(block: Block | WireBlock) -> int:
    return len(block.values.data) if isinstance(block, Block) else block.count


def _copied(block: Block | WireBlock) -> Block | WireBlock:
    """Return a block that no longer holds the message, with all else in it, that it came in."""
    if isinstance(block, Block):
        return block
    index_bytes, value_bytes = bytes(block.index_bytes), bytes(block.value_bytes)
    return dataclasses.replace(block, index_bytes=index_bytes, value_bytes=value_bytes)


def _to_relay(request: ModelRequest, state: State) -> RelayedRounds | None:
    """Return the rounds after the request's version, if they are to be had and that pays."""
    base, kept = request.base_version, state["scratch"].get("rounds")
    if base is None or not kept or not kept[0].version <= base + 1 <= kept[-1].version:
        return None
    lacking: list[_KeptRound] = kept[base + 1 - kept[0].version :]
    size = state["last_changed"].size
    if len(lacking) > 1 and sum(each.num_entries for each in lacking) > _MOST_DECODED * size:
        return None
    rounds = RelayedRounds(
        tuple(each.round for each in lacking), request.worker, request.step, 0.0, 0
    )
    num_bytes, num_entries, num_blocks, most_blocks = 0.0, 0, 0, 0
    for each in lacking:
        others = [not rounds.is_own(update) for update in each.round.updates]
        num_bytes += sum(
            count for count, other in zip(each.num_bytes, others, strict=True) if other
        )
        for update in each.round.updates:
            num_blocks += len(update.blocks)
            most_blocks = max(most_blocks, len(update.blocks))
        if any(others):  # entries that none of these rounds has changed before
            num_entries += int(each.at_least[min(each.version - base, _MOST_ROUNDS)])
    if not num_bytes or num_blocks * _DESCRIPTION_BYTES > _MOST_DESCRIPTIONS:
        return None
    num_entries = min(num_entries, size)
    rounds = dataclasses.replace(rounds, num_bytes=num_bytes, num_entries=num_entries)
    delta = reply_bytes(num_entries, size) - num_entries * (4 - _WEIGHT_BYTES)
    most = min(delta, size * _WEIGHT_BYTES) + most_blocks * _DESCRIPTION_BYTES
    pays = num_bytes <= most * (_MOST_MORE if request.is_urgent else 1)
    return rounds if pays else None
