"""The Router interface: which blocks of a packet travel reliably, and which in datagrams.

`Router` is the contract, `Routed` what a router makes of one shard's part of a packet. The rest is
vocabulary that both ends of the path share: `UnreliableBlocks` become datagrams, a `Manifest`
announces them on the stream, `LostEntries` names what did not arrive. `Transport` holds those
settings of the path that may differ between nodes, because they do not change what the method
computes. The module imports neither numpy nor TensorFlow.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from thinwire.ops.codecs.base import Codec
from thinwire.ops.types import ConfigurationError, Policy

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from thinwire.ops.kernels.base import Kernels
    from thinwire.ops.types import Block, Float32, Int64, ShardLayout, State


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
    kernels: Kernels


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
    k: float = 1.0  # requested fraction of reliable blocks
    num_blocks: int = 0  # of all slots in this push, skipped ones included
    num_skipped: int = 0  # of zeros only: sent on no channel
    num_reliable: int = 0
    num_dropped: int = 0  # by the sender itself, for --dgt_send_drop
    num_nonfinite: int = 0  # blocks with NaN or infinity: reliable, and first


@dataclasses.dataclass(frozen=True)
class AnnouncedDatagrams:
    """The datagrams of one channel in one step, or of one slot in it."""

    channel: int  # 1 to 7
    first: int  # sequence number per channel and session, from 0, modulo 2**32
    count: int


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a reliable part announces of the datagrams beside it."""

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


class ReassemblyRules(Protocol):
    """How a shard joins datagrams and reliable parts again; a router's settings."""

    @property
    def dgt_channels(self) -> int:
        """C, channels beside the stream."""

    @property
    def dgt_block_size(self) -> int:
        """Bytes of a block of float32 entries."""

    @property
    def dgt_reception(self) -> str:
        """Late datagrams: "diff" adds them to the next step, "drop" does not."""

    @property
    def dgt_wait_ms(self) -> float:
        """How long to wait, from an end marker on, for what is missing."""

    @property
    def dgt_max_late(self) -> int:
        """Steps that a datagram may be late."""

    @property
    def dgt_late_decay(self) -> float:
        """Factor on a datagram's values for each step that it is late."""

    @property
    def dgt_error_feedback(self) -> bool:
        """Whether the worker is sent a list of what did not arrive."""


class Router(Policy, Protocol):
    """Decides by which class of service each block of a packet travels.

    A router is a frozen dataclass of hyper-parameters. Its state is plain arrays and numbers that
    the caller owns. In each exchange `begin` is called once, then `cut` for every shard, and later
    `undelivered` for every shard, with what became of its part.
    """

    @property
    def uses_datagrams(self) -> bool:
        """Whether shards open ports for datagrams and reassemble pushes."""

    @property
    def reassembly_rules(self) -> ReassemblyRules | None:
        """How shards reassemble pushes; None: the router never sends datagrams."""

    @property
    def channels(self) -> int:
        """Channels for datagrams, beside the stream."""

    @property
    def max_late(self) -> int:
        """Steps after which a sender drops datagrams that are still queued."""

    @property
    def needs_datagrams_first(self) -> bool:
        """Whether datagrams are useless once the reliable part has arrived."""

    @property
    def marks_slots(self) -> bool:
        """Whether each slot's reliable part announces its own datagrams."""

    @property
    def delivers_all(self) -> bool:
        """Whether what arrives is what was sent, to the last bit."""

    @property
    def joins_slots(self) -> bool:
        """Whether a block may span several slots."""

    @property
    def takes_device_arrays(self) -> bool:
        """Whether values of dense blocks may lie on a device."""

    def init(self, layouts: tuple[ShardLayout, ...]) -> State:
        """Return the state before a worker's first exchange."""

    def begin(self, state: State, context: RouteContext) -> State:
        """Return the state with which the shards' parts of one exchange are cut."""

    def cut(
        self, shard: int, blocks: tuple[Block, ...], state: State, context: RouteContext
    ) -> tuple[Routed, State]:
        """Return one shard's part of a packet by class of service, and the new state.

        Args:
            shard: Its number.
            blocks: Its part of the packet, slots ascending; they are not changed.
            state: As `begin` returned it.
            context: Of this exchange.
        """

    def undelivered(self, shard: int, lost: Sequence[LostEntries] | None, state: State) -> State:
        """Return the state once the fate of the last push to a shard is known.

        Args:
            shard: Its number.
            lost: What did not arrive. None: the shard refused the push and used nothing of it.
            state: As the push left it.
        """

    def check(self, codec: Codec) -> list[str]:
        """Return warnings about settings that cannot make a difference with this codec.

        Raises:
            ConfigurationError: The router cannot carry the codec's values as they are set.
        """


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
    """Settings of the datagram path that need not be the same on every node.

    Attributes:
        dgt_mtu: Most bytes of UDP payload in a datagram.
        dgt_transport: udp; or grpc, where the unreliable part follows on the reliable stream.
        dgt_dscp: How priorities are marked: cs, the class selectors, 32 (C - i) as TOS byte of
            channel i; compact, none above CS5; off.
        dgt_pace_mbps: Rate to which a worker limits its datagrams; 0: none.
        dgt_drop_rate: Fraction of arriving datagrams that a shard drops, for tests.
        dgt_drop_seed: Seed of the choice which ones.
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
