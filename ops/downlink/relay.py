"""The down codec that relays updates as they were coded.

Where the server adds the plain mean of a round, every worker can do so itself: it decodes the
round's updates, sums them in order of worker id and adds the mean, by the functions that the shard
does it by. Then its floats equal the shard's, bit for bit. Of coarse values that takes fewer bytes
than the new weights in float32, and in any case the shard codes nothing: it passes on what came.
"""

from __future__ import annotations

import dataclasses
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
from thinwire.ops.types import State

if TYPE_CHECKING:
    from thinwire.ops.downlink.own_entries import OwnEntries
    from thinwire.ops.types import Int64

#: Bytes of updates that are kept to be relayed, for each entry of the shard.
_KEPT_BYTES = 0.5
#: The change before an entry's newest one is at most so many versions old, or counts as that.
_MOST_AGES = 64
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
        round: The updates.
        num_bytes: About, of each update.
        at_least: See `_ages`.
    """

    version: int
    round: RelayedRound
    num_bytes: tuple[float, ...]
    at_least: Int64


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
        if relayed is None or (rounds and rounds[-1].version != version - 1):
            rounds.clear()
        if relayed is not None:
            ages = _ages(indices, version, state)
            num_bytes = tuple(sum(map(block_bytes, each.blocks)) for each in relayed.updates)
            rounds.append(_KeptRound(version, relayed, num_bytes, ages))
            num_kept = sum(sum(each.num_bytes) for each in rounds)
            while num_kept > _KEPT_BYTES * state["last_changed"].size and len(rounds) > 1:
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


def _ages(indices: Int64 | None, version: int, state: State) -> Int64:
    """Return [_MOST_AGES + 1]: at how many changed entries the change before is at least so old."""
    import numpy as np

    last_changed = state["last_changed"]
    if indices is None:
        return np.full(_MOST_AGES + 1, last_changed.size)
    ages = version - last_changed[indices]
    counts = np.bincount(np.minimum(ages, _MOST_AGES), minlength=_MOST_AGES + 1)
    return counts[::-1].cumsum()[::-1]


def _to_relay(request: ModelRequest, state: State) -> RelayedRounds | None:
    """Return the rounds after the request's version, if they are to be had and that pays."""
    base, kept = request.base_version, state["scratch"].get("rounds")
    if base is None or not kept or not kept[0].version <= base + 1 <= kept[-1].version:
        return None
    lacking: list[_KeptRound] = kept[base + 1 - kept[0].version :]
    rounds = RelayedRounds(
        tuple(each.round for each in lacking), request.worker, request.step, 0.0, 0
    )
    num_bytes, num_entries = 0.0, 0
    for each in lacking:
        others = [not rounds.is_own(update) for update in each.round.updates]
        num_bytes += sum(size for size, other in zip(each.num_bytes, others, strict=True) if other)
        if any(others):  # entries that none of these rounds has changed before
            num_entries += int(each.at_least[min(each.version - base, _MOST_AGES)])
    rounds = dataclasses.replace(rounds, num_bytes=num_bytes, num_entries=num_entries)
    pays = num_bytes and _pays(rounds, request, state["last_changed"].size)
    return rounds if pays else None


def _pays(lacking: RelayedRounds, request: ModelRequest, size: int) -> bool:
    """Return whether relaying these takes no more bytes than new weights, or the shard needs it."""
    delta = reply_bytes(lacking.num_entries, size) - lacking.num_entries * (4 - _WEIGHT_BYTES)
    most = min(delta, size * _WEIGHT_BYTES)
    return lacking.num_bytes <= most * (_MOST_MORE if request.is_urgent else 1)
