"""Interface of routers, which choose for gradient blocks whether they are sent over gRPC or UDP.

`Router` is the interface of routers, and `Routed` is a router's result for the gradient of one
shard server. Worker and shard server share three data types: `UnreliableBlocks` are sent in UDP
datagrams, a `Manifest` announces these datagrams over gRPC, and `LostEntries` lists gradient
entries that did not arrive. `Transport` has the UDP settings that may differ between nodes, because
these settings do not change the training method. The module `thinwire.ops.routing.base` imports
neither numpy nor TensorFlow.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Protocol

from thinwire.ops.codecs.base import Codec
from thinwire.ops.kernels.base import Kernels
from thinwire.ops.options import choice, fraction, integer, number, switch
from thinwire.ops.policy import Policy, setting
from thinwire.ops.routing.dgt_choices import DgtChoices
from thinwire.ops.types import Array, Block, Float32, Int64, ShardLayout, State, UInt8


class ValueEncoding(enum.IntEnum):
    """Encoding of the gradient values in a UDP datagram: the low four bits of the encoding byte.

    In a UDP datagram, encoding codes 1 to 3 stand for quantized values: an integer level stands for
    the value ``low + (level + 0.5) * scale``, or for ``low`` if scale is 0. In a UDP datagram,
    encoding codes 4 to 6 stand for dtypes of gradient codecs: the value is ``data * scale``.
    """

    FLOAT32 = 0
    # encoding codes 1 to 3 are for values quantized to 16, 8 and 4 bits (--dgt_low_bits)
    UINT16 = 1
    UINT8 = 2
    UINT4 = 3  # UINT4 has two quantized values per byte on the wire, one per byte in memory
    BFLOAT16 = 4
    FLOAT16 = 5
    INT8 = 6


#: Flag in a datagram's encoding byte: the payload begins with the gaps between positions, [count]
#: uint16.
SPARSE = 0x10


@dataclasses.dataclass(frozen=True)
class RouteContext:
    """Inputs of a router other than the gradient: training step, loss, random seed and worker id.

    A router does not read the clock or global variables.
    """

    step: int  # number of the training step whose gradient is pushed
    # mean training loss of the mini-batches of the pushed gradient; None: unknown
    loss: float | None
    # random seed of the run; seed, worker, tensor and step seed random orders of gradient blocks
    seed: int
    worker: int  # id of the worker that pushes the gradient
    kernels: Kernels


@dataclasses.dataclass(frozen=True)
class UnreliableBlocks:
    """The gradient blocks of one variable slice that are sent in UDP datagrams."""

    slot: int  # number of the variable slice in the shard server's layout (ShardLayout)
    size: int  # number of entries (weights) of the variable slice
    # number of entries of a gradient block; the last block of a variable slice may have fewer
    block_entries: int
    # [m] int64: numbers of the gradient blocks sent in datagrams, most important block first
    blocks: Int64
    # [m] uint8: datagram channel (priority class) of each gradient block, 1 to 7, ascending
    channels: UInt8
    encoding: ValueEncoding
    # [k] int64: ascending positions of the sparse gradient values in `data`; None: dense gradient
    indices: Int64 | None
    # [k], or [size] if dense: coded gradient values of the variable slice, ordered by position
    data: Array
    # [number of blocks in the variable slice] float32: scale factor of each gradient block's values
    scales: Float32
    # [number of blocks in the variable slice] float32: value at quantization level 0 of each block
    lows: Float32


@dataclasses.dataclass(frozen=True)
class Routed:
    """A gradient for one shard server, divided into blocks for gRPC and blocks for UDP."""

    reliable: tuple[Block, ...]  # gradient blocks sent over gRPC, ordered by variable slice
    # gradient blocks sent in UDP datagrams, ordered by variable slice
    unreliable: tuple[UnreliableBlocks, ...] = ()
    k: float = 1.0  # requested fraction of gradient blocks to send over gRPC, 0 to 1
    # number of gradient blocks of all variable slices in this push, including skipped blocks
    num_blocks: int = 0
    num_skipped: int = 0  # number of all-zero gradient blocks, which are not sent
    num_reliable: int = 0  # number of gradient blocks sent over gRPC
    # number of gradient blocks that the worker drops instead of sending, for --dgt_send_drop
    num_dropped: int = 0
    # number of gradient blocks with NaN or infinity, which are sent over gRPC
    num_nonfinite: int = 0


@dataclasses.dataclass(frozen=True)
class AnnouncedDatagrams:
    """Range of the sequence numbers of a step's UDP datagrams in one channel (priority class)."""

    channel: int  # number of the datagram channel (priority class), 1 to 7
    # first sequence number, which is counted per channel and session from 0, modulo 2**32
    first: int
    count: int  # number of datagrams


@dataclasses.dataclass(frozen=True)
class Manifest:
    """Announcement, in a gRPC message, of UDP datagrams for the message's variable slices."""

    # sequence numbers of each channel that has datagrams, ordered by channel
    channels: tuple[AnnouncedDatagrams, ...]
    k: float  # requested fraction of gradient blocks to send over gRPC, 0 to 1
    # number of gradient blocks of the announced variable slices, including skipped blocks
    num_blocks: int
    num_skipped: int  # number of all-zero gradient blocks, which are not sent
    num_reliable: int  # number of gradient blocks sent over gRPC
    # number of gradient blocks that the worker drops instead of sending, for --dgt_send_drop
    num_dropped: int


@dataclasses.dataclass(frozen=True)
class LostEntries:
    """Gradient entries of one variable slice that were sent in UDP datagrams and did not arrive.

    In `LostEntries`, exactly one of the fields `ranges` (dense gradient) and `positions` (sparse
    gradient) is not None.
    """

    slot: int  # number of the variable slice in the shard server's layout (ShardLayout)
    # [r, 2] int64: starts and stops of the lost ranges of a dense gradient
    ranges: Int64 | None
    positions: Int64 | None = None  # [k] int64: positions of the lost entries of a sparse gradient


class Router(Policy, Protocol):
    """A router chooses for each gradient block of a push whether it is sent in a UDP datagram.

    A router is a frozen dataclass of hyper-parameters. The state of a router consists of plain
    arrays and numbers that the caller owns. In each exchange (push and pull) the caller calls a
    router's method `begin` once, then `cut` for every shard server. After each exchange (push and
    pull) the caller calls a router's method `undelivered` for every shard server, with the gradient
    entries that were lost.
    """

    @property
    def uses_datagrams(self) -> bool:
        """True if shard servers open UDP ports and reassemble gradients from UDP datagrams.

        Such a router also accepts dense gradients in the memory of a device (GPU).
        """
        return False

    @property
    def reassembly_rules(self) -> DgtChoices | None:
        """Settings by which shard servers reassemble gradients; None without UDP datagrams."""
        return None

    @property
    def channels(self) -> int:
        """Number of UDP datagram channels (priority classes).

        The number of UDP channels does not count the gRPC stream.
        """
        return 0

    @property
    def max_late(self) -> int:
        """Number of training steps after which a worker drops its unsent UDP datagrams."""
        return 0

    @property
    def needs_datagrams_first(self) -> bool:
        """True if the shard server drops UDP datagrams that arrive after a push's gRPC messages."""
        return False

    @property
    def marks_slots(self) -> bool:
        """True if a separate gRPC message per variable slice announces the UDP datagrams."""
        return False

    @property
    def delivers_all(self) -> bool:
        """True if the shard server receives exactly the pushed gradient values, to the last bit."""
        return not self.uses_datagrams

    @property
    def joins_slots(self) -> bool:
        """True if a gradient block may span several variable slices."""
        return False

    def init(self, layouts: tuple[ShardLayout, ...]) -> State:
        """Return the initial state of the router, before a worker pushes its first gradient."""
        return {}

    def begin(self, state: State, context: RouteContext) -> State:
        """Return the router's state for dividing one gradient between gRPC and UDP."""
        return state

    def cut(
        self, shard: int, blocks: tuple[Block, ...], state: State, context: RouteContext
    ) -> tuple[Routed, State]:
        """Divide a shard server's gradient between gRPC and UDP; return the result and the state.

        Args:
            shard: Number of the shard server that receives the gradient.
            blocks: Gradient for the shard server, ordered by variable slice; `cut` does not change
                the blocks.
            state: State of the router, as `begin` returned it.
            context: Training step, loss, random seed and worker of the pushed gradient.
        """

    def undelivered(self, shard: int, lost: Sequence[LostEntries] | None, state: State) -> State:
        """Return the router's state after the shard server has reported which datagrams arrived.

        Args:
            shard: Number of the shard server that received the gradient.
            lost: Gradient entries that did not arrive. None: the shard server refused the gradient,
                and used no value of it.
            state: The router's state after the worker has sent the gradient.
        """
        return state

    def check(self, codec: Codec) -> list[str]:
        """Return warnings about router settings without an effect on the codec's gradients.

        Raises:
            ConfigurationError: The router cannot send the gradient codec's values with the given
                settings.
        """
        return []


@dataclasses.dataclass(frozen=True)
class Transport(Policy):
    """Settings of the UDP transport of gradients that may differ between nodes.

    Attributes:
        dgt_mtu: Largest UDP payload of a datagram, in bytes.
        dgt_transport: Transport of the datagrams. udp: datagrams are sent over UDP. grpc: datagrams
            are sent on the gRPC stream, after the reliable part of the gradient.
        dgt_dscp: Priority marks (DSCP) in IP headers of datagrams. cs: class selectors, with TOS
            byte 32 (C - i) on channel i of C. compact: no class above CS5. off: no marks.
        dgt_pace_mbps: Rate limit of a worker's UDP datagrams, in Mbit/s; 0: no limit.
        dgt_drop_rate: Fraction of the arriving UDP datagrams that a shard server drops on purpose,
            for tests.
        dgt_drop_seed: Random seed by which a shard server chooses the UDP datagrams to drop in
            tests.
        dgt_info: True if workers and shard servers log a line about UDP datagrams for each step.
        dgt_fallback_steps: Number of consecutive steps in which a smaller fraction of UDP datagrams
            than `dgt_fallback_fill` arrives, after which a worker sends all gradients over gRPC; 0:
            never.
        dgt_fallback_fill: Least fraction of announced UDP datagrams that must arrive for UDP to
            count as working. The default is small, because a firewall lets no datagram through, but
            crowded links, for which DGT is meant, let a tenth of the datagrams through.
    """

    dgt_mtu: int = setting(
        integer(
            "dgt_mtu",
            1472,
            "Largest size of DGT's UDP datagrams; use 1452 for IPv6.",
            "bytes",
            low=128,
            high=65_507,
        )
    )
    dgt_transport: str = setting(
        choice(
            "dgt_transport",
            "udp",
            "Transport of the blocks that DGT does not send reliably: udp, datagrams; grpc, "
            "the gRPC stream, after the reliable blocks.",
            ("udp", "grpc"),
        )
    )
    dgt_dscp: str = setting(
        choice(
            "dgt_dscp",
            "cs",
            "Priority marks (DSCP) in the IP headers of DGT's datagrams; off: no marks.",
            ("cs", "compact", "off"),
        )
    )
    dgt_pace_mbps: float = setting(
        number(
            "dgt_pace_mbps",
            0.0,
            "Largest rate at which a worker sends DGT's datagrams; 0: no limit.",
            "Mbit/s",
            low=0.0,
            high=1_000_000.0,
        )
    )
    dgt_drop_rate: float = setting(
        fraction(
            "dgt_drop_rate",
            0.0,
            "For tests: fraction of datagrams that a shard drops on arrival.",
        )
    )
    dgt_drop_seed: int = setting(
        integer(
            "dgt_drop_seed",
            0,
            "For tests: seed of the random choice of datagrams for --dgt_drop_rate.",
            "number",
            low=0,
            high=2**31 - 1,
        )
    )
    dgt_info: bool = setting(
        switch(
            "dgt_info",
            "Log DGT's fraction of reliable blocks, numbers of blocks, ratios of arrived "
            "blocks, lateness and bytes in each step.",
        )
    )
    dgt_fallback_steps: int = setting(
        integer(
            "dgt_fallback_steps",
            20,
            "Number of consecutive steps with few arrived datagrams (--dgt_fallback_fill) "
            "after which a worker sends all blocks reliably; 0: never.",
            "steps",
            low=0,
            high=1_000_000,
        )
    )
    dgt_fallback_fill: float = setting(
        fraction(
            "dgt_fallback_fill",
            0.01,
            "Smallest fraction of a step's DGT datagrams that must arrive; "
            "--dgt_fallback_steps counts the steps with a smaller fraction.",
        )
    )
