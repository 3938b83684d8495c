"""What an assembler is asked to do, and what comes out of it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

from ops.types import Block

if TYPE_CHECKING:
    from ops.types import Float32


class Rules(Protocol):
    """What an assembler asks of the router."""

    @property
    def dgt_channels(self) -> int:
        """C, beside the stream."""

    @property
    def dgt_block_size(self) -> int:
        """Bytes of a block of float32 entries."""

    @property
    def dgt_reception(self) -> str:
        """Late datagrams: "diff" adds them to the next step, "drop" does not."""

    @property
    def dgt_wait_ms(self) -> float:
        """From an end marker on for what is still missing."""

    @property
    def dgt_max_late(self) -> int:
        """Steps that a datagram may be late."""

    @property
    def dgt_late_decay(self) -> float:
        """Weight of a datagram for each step it is late."""

    @property
    def dgt_error_feedback(self) -> bool:
        """Whether the worker hears what did not arrive."""


@dataclasses.dataclass(frozen=True)
class Assembled:
    """One step of one worker, put together."""

    step: int
    blocks: tuple[Block, ...]  # float32, dense or sparse, slots ascending; low rank as it came
    flat: Float32 | None  # [shard] float32: all of them, if every slot is there and dense
    fresh: float  # share of the blocks sent or meant to be sent that came in time
    fill: float  # the same with places where only something late came
    mean_lateness: float  # in steps, of the late datagrams that were taken in; 0 without
    num_late: int  # late datagrams that were taken in
    announced: int  # datagrams
    arrived: int  # of those, in time; the others are lost or late
    bitmap: bytes | None  # which ones, with --dgt_error_feedback; see Sealed.lost
