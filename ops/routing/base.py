"""The Router interface: choose which blocks of a push are sent reliably, which in datagrams.

`Router` is the interface; `Routed` is its result for one shard's part of a push. Sender and
receiver share three more types: `UnreliableBlocks` become datagrams, a `Manifest` announces the
datagrams on the reliable stream, `LostEntries` lists entries that did not arrive. `Transport` has
the datagram settings that may differ between nodes, because these settings do not change the
training method. The module imports neither numpy nor TensorFlow.
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
    """Encoding of a datagram's values: the low four bits of its encoding byte.

    Codes 1 to 3 stand for quantized values: a level is an integer that stands for the value ``low +
    (level + 0.5) * scale``, or for ``low`` if scale is 0. Codes 4 to 6 stand for the value dtypes
    of codecs: the value is ``data * scale``, with low = 0.
    """

    FLOAT32 = 0
    UINT16 = 1  # codes 1 to 3 are for levels of 16, 8 and 4 bits (--dgt_low_bits)
    UINT8 = 2
    UINT4 = 3  # two levels per byte on the wire, one level per byte in memory
    BFLOAT16 = 4
    FLOAT16 = 5
    INT8 = 6


#: Flag in a datagram's encoding byte: the gaps between positions, [count] uint16, precede the
#: values.
SPARSE = 0x10


@dataclasses.dataclass(frozen=True)
class RouteContext:
    """Inputs of a router other than the gradient blocks. A router reads no clock and no globals."""

    step: int  # step number of the push
    loss: float | None  # mean training loss of the push's mini-batches; None: unknown
    seed: int  # seed of the run; with worker, tensor and step it seeds random orders of blocks
    worker: int  # id of the worker that pushes
    kernels: Kernels


@dataclasses.dataclass(frozen=True)
class UnreliableBlocks:
    """The blocks of one slot (slice of a variable on a shard) that are sent in datagrams."""

    slot: int  # number of the slice in the ShardLayout
    size: int  # number of entries of the slot
    block_entries: int  # number of entries of a block; the slot's last block may have fewer
    blocks: Int64  # [m] int64: numbers of the blocks sent in datagrams, best rank first
    channels: NDArray[np.uint8]  # [m] uint8: channel of each block, 1 to 7, ascending
    encoding: ValueEncoding
    indices: Int64 | None  # [k] int64: ascending positions of `data`; None: data has every entry
    data: NDArray[Any]  # [k], or [size] if dense: coded values of the whole slot, by position
    scales: Float32  # [number of blocks in the slot] float32: scale of each block's values
    lows: Float32  # [number of blocks in the slot] float32: value at level 0 of each block


@dataclasses.dataclass(frozen=True)
class Routed:
    """One shard's part of a push, divided into blocks on the stream and blocks in datagrams."""

    reliable: tuple[Block, ...]  # parts sent on the stream, slots ascending
    unreliable: tuple[UnreliableBlocks, ...] = ()  # parts sent in datagrams, slots ascending
    k: float = 1.0  # requested fraction of reliable blocks
    num_blocks: int = 0  # number of blocks of all slots in this push, including skipped blocks
    num_skipped: int = 0  # number of blocks of zeros, which are not sent
    num_reliable: int = 0  # number of blocks sent on the stream
    num_dropped: int = 0  # number of blocks that the sender drops for --dgt_send_drop
    num_nonfinite: int = 0  # number of blocks with NaN or infinity, which are sent on the stream


@dataclasses.dataclass(frozen=True)
class AnnouncedDatagrams:
    """The number range of one channel's datagrams in one step, for all slots or for one slot."""

    channel: int  # number of the channel (priority class), 1 to 7
    first: int  # first sequence number; counted per channel and session from 0, modulo 2**32
    count: int  # number of datagrams


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Announcement of datagrams; it is sent with the reliable part of the same slots."""

    channels: tuple[AnnouncedDatagrams, ...]  # channels with datagrams, ascending
    k: float  # requested fraction of reliable blocks
    num_blocks: int  # number of blocks of the slots, including skipped blocks
    num_skipped: int  # number of blocks of zeros, which are not sent
    num_reliable: int  # number of blocks sent on the stream
    num_dropped: int  # number of blocks that the sender drops for --dgt_send_drop


@dataclasses.dataclass(frozen=True)
class LostEntries:
    """Entries of one slot (slice of a variable) that were sent in datagrams and did not arrive.

    Exactly one of `ranges` and `positions` is given.
    """

    slot: int  # number of the slice in the ShardLayout
    ranges: NDArray[np.int64] | None  # [r, 2] int64: starts and stops of lost ranges (dense slot)
    positions: Int64 | None = None  # [k] int64: positions of lost entries (sparse slot)


class ReassemblyRules(Protocol):
    """Settings of a router by which a shard joins a push's datagrams and reliable parts."""

    @property
    def dgt_channels(self) -> int:
        """Number C of datagram channels. The reliable stream is not counted."""

    @property
    def dgt_block_size(self) -> int:
        """Size of a gradient block, in bytes of float32 entries."""

    @property
    def dgt_reception(self) -> str:
        """Use of late datagrams: "diff" adds their values to the next step, "drop" drops them."""

    @property
    def dgt_wait_ms(self) -> float:
        """Longest wait for missing datagrams after the reliable part has arrived, in ms."""

    @property
    def dgt_max_late(self) -> int:
        """Largest lateness of a datagram whose values a shard still uses, in steps."""

    @property
    def dgt_late_decay(self) -> float:
        """Factor on the values of a late datagram for each step of its lateness."""

    @property
    def dgt_error_feedback(self) -> bool:
        """True if the shard reports to the worker which datagrams were lost, for error feedback."""


class Router(Policy, Protocol):
    """Chooses for each gradient block of a push whether the block is sent in a datagram.

    A router is a frozen dataclass of hyper-parameters. Its state is plain arrays and numbers that
    the caller owns. In each exchange (push and pull) the caller calls `begin` once, then `cut` for
    every shard. After the exchange the caller calls `undelivered` for every shard, with the entries
    that were lost.
    """

    @property
    def uses_datagrams(self) -> bool:
        """True if shards open UDP ports and reassemble pushes from datagrams."""

    @property
    def reassembly_rules(self) -> ReassemblyRules | None:
        """Settings by which shards reassemble pushes; None if the router sends no datagrams."""

    @property
    def channels(self) -> int:
        """Number of datagram channels. The reliable stream is not counted."""

    @property
    def max_late(self) -> int:
        """Number of steps after which a worker drops datagrams that it has not sent yet."""

    @property
    def needs_datagrams_first(self) -> bool:
        """True if the shard drops datagrams that arrive after the push's reliable part."""

    @property
    def marks_slots(self) -> bool:
        """True if each slot has a separate reliable part, which announces the slot's datagrams."""

    @property
    def delivers_all(self) -> bool:
        """True if the shard receives exactly the values of the push, to the last bit."""

    @property
    def joins_slots(self) -> bool:
        """True if a gradient block may span several slots (slices of variables)."""

    @property
    def takes_device_arrays(self) -> bool:
        """True if the router accepts dense blocks with values in device memory."""

    def init(self, layouts: tuple[ShardLayout, ...]) -> State:
        """Return the router's state before a worker's first push."""

    def begin(self, state: State, context: RouteContext) -> State:
        """Return the router's state for dividing the shards' parts of one push."""

    def cut(
        self, shard: int, blocks: tuple[Block, ...], state: State, context: RouteContext
    ) -> tuple[Routed, State]:
        """Divide one shard's part of a push into stream and datagrams; return it and the new state.

        Args:
            shard: Number of the shard.
            blocks: The shard's part of the push, slots ascending; the blocks are not changed.
            state: State that `begin` returned.
            context: Step, loss, seed and worker of the push.
        """

    def undelivered(self, shard: int, lost: Sequence[LostEntries] | None, state: State) -> State:
        """Return the router's state after the shard has reported the result of the last push.

        Args:
            shard: Number of the shard.
            lost: Entries that did not arrive. None: the shard refused the push and used no value.
            state: The router's state after the push.
        """

    def check(self, codec: Codec) -> list[str]:
        """Return warnings about router settings that have no effect with this codec.

        Raises:
            ConfigurationError: The router cannot send the codec's values with these settings.
        """


TRANSPORTS = ("udp", "grpc")
CLASSES = ("cs", "compact", "off")
_RANGES: dict[str, tuple[float, float]] = {
    "dgt_mtu": (128, 65_507),  # 128 bytes hold 12 values; 65,507 bytes is the limit of UDP
    "dgt_pace_mbps": (0, 1_000_000),
    "dgt_drop_rate": (0, 1),
    "dgt_drop_seed": (0, 2**31 - 1),
    "dgt_fallback_steps": (0, 1_000_000),
    "dgt_fallback_fill": (0, 1),
}


@dataclasses.dataclass(frozen=True)
class Transport:
    """Settings of the datagram path that may differ between nodes.

    Attributes:
        dgt_mtu: Largest UDP payload of a datagram, in bytes.
        dgt_transport: udp: datagrams are sent over UDP. grpc: the datagrams follow the reliable
            part on the gRPC stream.
        dgt_dscp: Priority marks (DSCP) in IP headers. cs: class selectors, with TOS byte 32 (C - i)
            on channel i of C. compact: no class above CS5. off: no marks.
        dgt_pace_mbps: Rate limit of a worker's datagrams, in Mbit/s; 0: no limit.
        dgt_drop_rate: Fraction of arriving datagrams that a shard drops, for tests.
        dgt_drop_seed: Seed of the random choice of dropped datagrams.
        dgt_info: True if workers and shards log a line about datagrams for each step.
        dgt_fallback_steps: Number of consecutive steps with a fill ratio below `dgt_fallback_fill`
            after which a worker sends everything reliably; 0: never.
        dgt_fallback_fill: Least fill ratio (fraction of announced datagrams that arrive) that
            counts as working. The default is small: a firewall lets no datagram through, while DGT
            is meant for crowded links that let a tenth of the datagrams through.
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
        """Reject values that are out of range."""
        for name, (low, high) in _RANGES.items():
            value = getattr(self, name)
            if not low <= value <= high or not math.isfinite(value):
                raise ConfigurationError(
                    f"--{name}={value}: expected a number from {low:g} to {high:g}."
                )
        for name, values in (("dgt_transport", TRANSPORTS), ("dgt_dscp", CLASSES)):
            if getattr(self, name) not in values:
                raise ConfigurationError(
                    f"--{name}={getattr(self, name)!r}: expected one of {', '.join(values)}."
                )
