"""The nouns of routing: what a router makes of one shard's part of a packet. No logic.

How datagrams travel, where that makes no difference to what the method computes.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import TYPE_CHECKING, Any

from thinwire.ops.types import ConfigurationError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from thinwire.ops.types import Block, Float32, Int64


class ValueEncoding(enum.IntEnum):
    """How the values of a datagram travel: the low four bits of its encoding byte.

    Levels 1 to 3 stand for ``low + (level + 0.5) * scale``; where scale is 0, for ``low``.
    Codes 4 to 6 are the codec's own value dtypes: ``data * scale``, and low is 0.
    """

    FLOAT32 = 0
    UINT16 = 1  # levels of --dgt_low_bits 16, 8 and 4
    UINT8 = 2
    UINT4 = 3  # two levels in a byte on the wire; unpacked in memory
    BFLOAT16 = 4
    FLOAT16 = 5
    INT8 = 6


#: Flag in the same byte: positions travel as gaps [count] uint16 before the values.
SPARSE = 0x10


@dataclasses.dataclass(frozen=True)
class RouteContext:
    """What a router may know besides the blocks; no clocks, no globals."""

    step: int
    loss: float | None  # mean training loss of the mini-batches in this exchange, if known
    seed: int  # of the run; with worker, tensor and step it seeds random orders
    worker: int
    kernels: Any  # ops.kernels.Kernels


@dataclasses.dataclass(frozen=True)
class UnreliableBlocks:
    """What of one slot travels in datagrams: some blocks of `block_entries` entries."""

    slot: int  # slice number in the ShardLayout
    size: int  # entries of the slot
    block_entries: int  # of a block; the slot's last may have fewer
    blocks: Int64  # [m] int64: numbers of the blocks that travel, best rank first
    channels: NDArray[np.uint8]  # [m] uint8: 1 to 7, ascending
    encoding: ValueEncoding
    indices: Int64 | None  # [k] int64: ascending positions of `data`; None: every entry
    data: NDArray[Any]  # [k], or [size] if dense: the whole slot's coded values, in its order
    scales: Float32  # [blocks of the slot] float32, by number of the block
    lows: Float32  # [blocks of the slot] float32


@dataclasses.dataclass(frozen=True)
class Routed:
    """One shard's part of an exchange, cut by class of service; counts are over all its slots."""

    reliable: tuple[Block, ...]  # Block, LowRankBlock or RangedBlock, slots ascending
    unreliable: tuple[UnreliableBlocks, ...] = ()  # slots ascending
    k: float = 1.0  # fraction of blocks asked to travel reliably
    num_blocks: int = 0  # of all slots in this push, skipped ones included
    num_skipped: int = 0  # of zeros only: sent on no channel
    num_reliable: int = 0
    num_dropped: int = 0  # by the sender itself, as --dgt_send_drop asks
    num_nonfinite: int = 0  # blocks with NaN or infinity: reliable, and first


@dataclasses.dataclass(frozen=True)
class AnnouncedDatagrams:
    """The datagrams of one channel in one step, or of one slot in it."""

    channel: int  # 1 to 7
    first: int  # sequence number per channel and session, from 0, modulo 2**32
    count: int


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a reliable part says about the datagrams beside it."""

    channels: tuple[AnnouncedDatagrams, ...]  # ascending; only those with datagrams
    k: float
    num_blocks: int
    num_skipped: int
    num_reliable: int
    num_dropped: int


@dataclasses.dataclass(frozen=True)
class LostEntries:
    """Entries of one slot that were sent in datagrams and did not arrive."""

    slot: int
    ranges: NDArray[np.int64] | None  # [r, 2] int64: start and stop, of a dense slot
    positions: Int64 | None = None  # [k] int64: of a sparse slot; exactly one of both is given


TRANSPORTS = ("udp", "grpc")
CLASSES = ("cs", "compact", "off")
_RANGES: dict[str, tuple[float, float]] = {
    "dgt_mtu": (128, 65_507),  # the least leaves 12 values; the largest is UDP's
    "dgt_pace_mbps": (0, 1_000_000),
    "dgt_drop_rate": (0, 1),
    "dgt_drop_seed": (0, 2**31 - 1),
    "dgt_fallback_steps": (0, 1_000_000),
    "dgt_fallback_fill": (0, 1),
}


@dataclasses.dataclass(frozen=True)
class Transport:
    """What need not be the same on every node.

    Attributes:
        dgt_mtu: Most bytes of UDP payload in a datagram.
        dgt_transport: udp, or grpc: the unreliable part follows on the reliable stream.
        dgt_dscp: How priorities are marked: cs, the class selectors, 32 (C - i) as TOS byte of
            channel i; compact, none above CS5; off.
        dgt_pace_mbps: Rate to which a worker limits its datagrams; 0: none.
        dgt_drop_rate: Fraction of arriving datagrams that a shard throws away, for tests.
        dgt_drop_seed: Seeds which.
        dgt_info: Whether workers and shards log a line for each step.
        dgt_fallback_steps: Steps in a row with a fill ratio below `dgt_fallback_fill` after which
            a worker sends everything reliably; 0: never.
        dgt_fallback_fill: Fraction of announced datagrams. Small: a firewall lets none through,
            while a crowded link that lets a tenth through is what DGT is for.
    """

    dgt_mtu: int = 1472
    dgt_transport: str = "udp"
    dgt_dscp: str = "cs"
    dgt_pace_mbps: float = 0.0
    dgt_drop_rate: float = 0.0
    dgt_drop_seed: int = 0
    dgt_info: bool = False
    dgt_fallback_steps: int = 20
    dgt_fallback_fill: float = 0.01

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high or not math.isfinite(value):
                raise ConfigurationError(f"--{name}={value}: expected {low:g} to {high:g}.")
        for name, values in (("dgt_transport", TRANSPORTS), ("dgt_dscp", CLASSES)):
            if getattr(self, name) not in values:
                raise ConfigurationError(
                    f"--{name}={getattr(self, name)!r}: expected one of {', '.join(values)}."
                )
