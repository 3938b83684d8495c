"""Downlink codec that relays (forwards) the workers' coded updates to the other workers.

If a shard server adds the plain mean of the workers' updates to the weights, every worker can
compute the same addition. A worker decodes the relayed updates of other workers, sums all updates
in order of worker number and adds their mean to its weights, with the functions that the shard
server uses. After a worker has added relayed updates, its weights equal the shard server's weights,
bit for bit. Coded updates of coarse (few-bit) values take fewer bytes than the new weights in
float32. The shard server never codes relayed updates: it forwards the bytes that it received.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable
from typing import TYPE_CHECKING, ClassVar

from thinwire.ops.downlink.exact import DownDelta
from thinwire.ops.downlink.sizes import block_bytes, reply_bytes
from thinwire.ops.downlink.types import (
    ModelChange,
    ModelReply,
    ModelRequest,
    Operation,
    RelayedRound,
    RelayedRounds,
    ShardView,
)
from thinwire.ops.types import Block, Int32, Int64, State

if TYPE_CHECKING:
    from thinwire.ops.wire.blocks import WireBlock

#: Limits of the rounds that a shard server stores for relaying: the first is the bytes of updates
#: per weight of the shard (the last round is stored even above this limit); the second is the
#: number of rounds, which also caps the ages in `_KeptRound.at_least`.
_KEPT_BYTES, _MOST_ROUNDS = 0.5, 64
#: The first number is how many bytes describe one block in a message's header, the second is the
#: limit of these bytes in a message.
_DESCRIPTION_BYTES, _MOST_DESCRIPTIONS = 20, 256 << 10
#: Limit of the entries that a worker decodes from several relayed rounds, per weight of the shard
#: server.
_MOST_DECODED = 2
#: Approximate bytes of a float32 weight on the wire, with its exponent deflated.
_WEIGHT_BYTES = 3.5
#: Limit of a relayed reply's bytes while other requests wait, as a multiple of the bytes of a delta
#: reply (new values of the changed weights). The shard server must merge, gather and code each
#: entry of a delta reply, but sends relayed bytes unchanged.
_MOST_MORE = 1.25


@dataclasses.dataclass(frozen=True)
class _KeptRound:
    """A round (set of workers' updates merged together) that a shard server can relay to workers.

    Attributes:
        version: Version of the shard server's weights after the round's updates were applied.
        round: Copies of the workers' coded updates that were merged in the round.
        num_bytes: Approximate size of each worker's coded update in bytes, with the descriptions of
            the update's blocks.
        num_entries: Total number of entries of the workers' decoded updates in the round.
        changed_at: [k] int32: for each weight that the round changed, the version at which the
            weight changed last before the round. An int instead of an array is the number of
            weights, if the round changed all weights.
    """

    version: int
    round: RelayedRound
    num_bytes: tuple[float, ...]
    num_entries: int
    changed_at: Int32 | int

    @functools.cached_property
    def at_least(self) -> Int64:
        """[_MOST_ROUNDS + 1] int64: entry i counts weights that changed i or more versions ago.

        The age of a weight's last change is counted back from the version after the round, and
        ignores the round's own changes. The property `at_least` is computed on first use, when a
        worker's weights lack the round's updates; a run with one worker never computes it.
        """
        import numpy as np

        if isinstance(self.changed_at, int):
            return np.full(_MOST_ROUNDS + 1, self.changed_at)
        ages = np.minimum(self.version - self.changed_at, _MOST_ROUNDS)
        return np.bincount(ages, minlength=_MOST_ROUNDS + 1)[::-1].cumsum()[::-1]


@dataclasses.dataclass(frozen=True)
class DownRelay(DownDelta):
    """Downlink codec like `DownDelta`, but relays workers' coded updates that take fewer bytes.

    A shard server relays coded updates if the reply takes no more bytes than a delta reply (new
    values of the changed weights), or at most 1.25 times as many bytes while other requests wait
    for the shard server.

    A shard server can relay the workers' updates of a round if the weights changed only by the
    plain mean of the updates, times one factor. A relayed reply omits the receiving worker's own
    update, which the worker already has.
    """

    relays: ClassVar[bool] = True

    def record_update(self, change: ModelChange, state: State) -> State:
        """Record which weights changed, and store the workers' updates if they can be relayed."""
        rounds = state["scratch"].setdefault("rounds", [])
        kept_round = _keep(change, state)
        # The list of rounds must hold consecutive versions: a worker that skips a round has wrong
        # weights.
        if kept_round is None or (rounds and rounds[-1].version != change.version - 1):
            rounds.clear()
        if kept_round is not None:
            rounds.append(kept_round)
        num_bytes = sum(sum(earlier.num_bytes) for earlier in rounds)
        most = _KEPT_BYTES * state["last_changed"].size
        while len(rounds) > 1 and (num_bytes > most or len(rounds) > _MOST_ROUNDS):
            num_bytes -= sum(rounds.pop(0).num_bytes)
        # `_keep` reads `last_changed` as it was before this version; the call of
        # `super().record_update` overwrites it.
        return super().record_update(change, state)

    def sharing_key(self, request: ModelRequest, state: State) -> Hashable:
        """Return the request if updates are relayed, because each reply omits another push."""
        return super().sharing_key(request, state) if _to_relay(request, state) is None else request

    def gather(self, request: ModelRequest, shard: ShardView, state: State) -> ModelReply:
        """Return the updates that a worker's weights lack, or, if cheaper, the changed weights."""
        rounds = _to_relay(request, state)
        if rounds is None:
            return super().gather(request, shard, state)
        return ModelReply(Operation.RELAY, rounds, shard.version, "relay")


def _keep(change: ModelChange, state: State) -> _KeptRound | None:
    """Return the updates of a round, copied; None if no reply can relay them."""
    relayed, indices = change.relayed, change.indices
    if relayed is None:
        return None
    size = state["last_changed"].size
    num_bytes = tuple(
        sum(block_bytes(block) + _DESCRIPTION_BYTES for block in update.blocks)
        for update in relayed.updates
    )
    # A reply omits at most one update, the update of its receiver, so the largest update is
    # subtracted.
    if sum(num_bytes) - max(num_bytes) > _MOST_MORE * _WEIGHT_BYTES * size:
        return None
    counts = [sum(map(_num_values, update.blocks)) for update in relayed.updates]
    num_entries = size * len(counts) if indices is None else sum(counts)
    copies = tuple(
        dataclasses.replace(update, blocks=tuple(map(_copied, update.blocks)))
        for update in relayed.updates
    )
    changed_at = size if indices is None else state["last_changed"][indices]
    return _KeptRound(
        change.version, RelayedRound(copies, relayed.rate), num_bytes, num_entries, changed_at
    )


def _num_values(block: Block | WireBlock) -> int:
    return len(block.values.data) if isinstance(block, Block) else block.count


def _copied(block: Block | WireBlock) -> Block | WireBlock:
    """Copy a coded block out of the received message so that the message's buffer can be freed."""
    if isinstance(block, Block):
        return block
    index_bytes, value_bytes = bytes(block.index_bytes), bytes(block.value_bytes)
    return dataclasses.replace(block, index_bytes=index_bytes, value_bytes=value_bytes)


def _to_relay(request: ModelRequest, state: State) -> RelayedRounds | None:
    """Return the rounds that a worker's weights lack; None if they are missing or too large."""
    base, stored = request.base_version, state["scratch"].get("rounds")
    if base is None or not stored or not stored[0].version <= base + 1 <= stored[-1].version:
        return None
    lacking: list[_KeptRound] = stored[base + 1 - stored[0].version :]
    size = state["last_changed"].size
    if len(lacking) > 1 and sum(lacked.num_entries for lacked in lacking) > _MOST_DECODED * size:
        return None
    rounds = RelayedRounds(
        tuple(lacked.round for lacked in lacking), request.worker, request.step, 0.0, 0
    )
    num_bytes, num_entries, num_blocks, most_blocks = 0.0, 0, 0, 0
    for lacked in lacking:
        is_sent = [not rounds.is_own(update) for update in lacked.round.updates]
        num_bytes += sum(
            count for count, sent in zip(lacked.num_bytes, is_sent, strict=True) if sent
        )
        for update in lacked.round.updates:
            num_blocks += len(update.blocks)
            most_blocks = max(most_blocks, len(update.blocks))
        # Count an entry in the first lacking round that changed it, because a delta reply holds the
        # entry once.
        if any(is_sent):
            num_entries += int(lacked.at_least[min(lacked.version - base, _MOST_ROUNDS)])
    if not num_bytes or num_blocks * _DESCRIPTION_BYTES > _MOST_DESCRIPTIONS:
        return None
    num_entries = min(num_entries, size)
    rounds = dataclasses.replace(rounds, num_bytes=num_bytes, num_entries=num_entries)
    delta = reply_bytes(num_entries, size) - num_entries * (4 - _WEIGHT_BYTES)
    most = min(delta, size * _WEIGHT_BYTES) + most_blocks * _DESCRIPTION_BYTES
    pays = num_bytes <= most * (_MOST_MORE if request.is_urgent else 1)
    return rounds if pays else None
