"""DGT: blocks that contribute much travel reliably, the rest in datagrams by priority.

Source: Zhou et al., "DGT: a contribution-aware differential gradient transmission mechanism for
distributed machine learning", Future Generation Computer Systems 121, 2021; docs/methods/dgt.md.

What the command line says about DGT, and which of it is legal.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from thinwire.ops.codecs.power_sgd import PowerSgd
from thinwire.ops.routing.base import LostEntries, RouteContext, Routed
from thinwire.ops.types import Block, ConfigurationError, ShardLayout, State

RECEPTIONS = ("diff", "drop")
RANDOM = ("0", "1", "fixed")
MARKERS = ("step", "tensor")
SCOPES = ("tensor", "model")
LOW_BITS = (32, 16, 8, 4)
MAX_CHANNELS = 7
BYTES_OF_ENTRY = 4  # the block size is in bytes of float32, whatever the codec's value dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class DgtChoices:
    """What the command line says about DGT: a field for each flag.

    Attributes:
        dgt_channels: C, channels for datagrams, 0 to 7; 0: everything is reliable.
        dgt_k: Fraction of blocks that are reliable; with `dgt_adaptive_k` at the first loss.
        dgt_k_min: Least fraction with `dgt_adaptive_k`.
        dgt_adaptive_k: Whether the fraction falls with the training loss.
        dgt_enable_block: False: one block per tensor, which is its last one; the original's
            switch, with which nothing travels in datagrams.
        dgt_block_size: Bytes of a block of float32.
        dgt_alpha: Weight of the past in the moving average of contributions.
        dgt_reception: diff: what comes late is added to the next step; drop: it is thrown away.
        dgt_send_drop: Whether unreliable blocks are thrown away at once, as a control.
        dgt_random: Rank at random, as a control: 1 anew each time, fixed always the same.
        dgt_clear_zero: Whether blocks of zeros stay unsent.
        dgt_low_bits: Of a value in unreliable blocks; below 32 rounding errors are kept.
        dgt_wait_ms: How long a shard waits for announced datagrams after the reliable part.
        dgt_max_late: Steps after which late blocks are not added any more.
        dgt_late_decay: Factor on late blocks for each step of lateness.
        dgt_error_feedback: Whether values that did not arrive are added to the next gradient.
        dgt_marker: Whose reliable part ends the wait: the whole step's, or each tensor's.
        dgt_loss_ema: Weight of the past in the loss that k follows; 0: the latest alone.
        dgt_scope: What k is a fraction of: each tensor's blocks, or all of a shard's.
    """

    dgt_channels: int = 3
    dgt_k: float = 0.8
    dgt_k_min: float = 0.2
    dgt_adaptive_k: bool = False
    dgt_enable_block: bool = True
    dgt_block_size: int = 4096
    dgt_alpha: float = 0.3
    dgt_reception: str = "diff"
    dgt_send_drop: bool = False
    dgt_random: str = "0"
    dgt_clear_zero: bool = True
    dgt_low_bits: int = 32
    dgt_wait_ms: float = 0.0
    dgt_max_late: int = 5
    dgt_late_decay: float = 1.0
    dgt_error_feedback: bool = False
    dgt_marker: str = "step"
    dgt_loss_ema: float = 0.0
    dgt_scope: str = "tensor"


#: Field -> least and largest value.
_RANGES: dict[str, tuple[float, float]] = {
    "dgt_channels": (0, MAX_CHANNELS),
    "dgt_k": (0, 1),
    "dgt_k_min": (0, 1),
    "dgt_block_size": (BYTES_OF_ENTRY, 2**31 - 4),
    "dgt_alpha": (0, 1),
    "dgt_wait_ms": (0, 3_600_000),
    "dgt_max_late": (0, 2**31 - 1),
    "dgt_late_decay": (0, 1),
    "dgt_loss_ema": (0, 0.9999),
}
_WORDS: dict[str, tuple[Any, ...]] = {
    "dgt_reception": RECEPTIONS,
    "dgt_random": RANDOM,
    "dgt_low_bits": LOW_BITS,
    "dgt_marker": MARKERS,
    "dgt_scope": SCOPES,
}


def refuse_illegal(choices: DgtChoices) -> None:
    """Refuse values out of range, and those that exclude each other.

    Raises:
        ConfigurationError: What is wrong, and what to set instead.
    """
    for name, (low, high) in _RANGES.items():
        value = getattr(choices, name)
        if not low <= value <= high:
            upper = f" to {high:g}" if high < math.inf else " or more"
            raise _refusal(name, value, f"expected {low:g}{upper}, and a finite number")
    for name, values in _WORDS.items():
        if getattr(choices, name) not in values:
            raise _refusal(name, getattr(choices, name), f"expected {_list(values)}")
    if choices.dgt_block_size % BYTES_OF_ENTRY:
        raise _refusal("dgt_block_size", choices.dgt_block_size, "expected a multiple of 4 bytes")
    if choices.dgt_error_feedback and choices.dgt_reception != "drop":
        raise ConfigurationError(
            f"--dgt_error_feedback with --dgt_reception={choices.dgt_reception}: what comes late "
            "would count twice, once by itself and once fed back. Set --dgt_reception=drop."
        )
    if choices.dgt_send_drop and (choices.dgt_error_feedback or choices.dgt_low_bits < 32):
        raise ConfigurationError(
            "--dgt_send_drop throws unreliable blocks away, without feedback and before they "
            "are coded; leave out --dgt_error_feedback and --dgt_low_bits with it."
        )


def _list(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values[:-1])) + f" or {values[-1]}"


def _refusal(name: str, value: Any, expected: str) -> ConfigurationError:
    return ConfigurationError(f"--{name}={value}: {expected}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dgt(DgtChoices):
    """Of each tensor the best fraction k of blocks is reliable, and its last block always."""

    def __post_init__(self) -> None:
        """Refuse values out of range, and those that exclude each other."""
        refuse_illegal(self)

    @property
    def divides(self) -> bool:
        """Whether anything may travel otherwise than reliably."""
        can = self.dgt_channels > 0 and self.dgt_enable_block
        return can and (self.dgt_k < 1 or self.dgt_adaptive_k)

    @property
    def uses_datagrams(self) -> bool:
        """Whether a shard puts a push together; also where a sender throws its datagrams away."""
        return self.divides

    @property
    def channels(self) -> int:
        """How many channels there are beside the reliable one; it is marked accordingly."""
        return self.dgt_channels

    @property
    def max_late(self) -> int:
        """Steps after which a sender drops datagrams that still wait."""
        return self.dgt_max_late if self.dgt_reception == "diff" else 0

    @property
    def needs_datagrams_first(self) -> bool:
        """Whether what comes behind the reliable part is never used."""
        return self.dgt_reception == "drop" and not self.dgt_wait_ms

    @property
    def marks_slots(self) -> bool:
        """Whether each slot's reliable part announces its own datagrams."""
        return self.dgt_marker == "tensor"

    @property
    def delivers_all(self) -> bool:
        """Whether what arrives is what was sent, to the last bit."""
        return not self.divides

    @property
    def keeps(self) -> bool:
        """Whether something is kept back for the next step."""
        return self.divides and (self.dgt_error_feedback or self.dgt_low_bits < 32)

    @property
    def entries(self) -> int:
        """Entries of a block."""
        return max(1, self.dgt_block_size // BYTES_OF_ENTRY)

    def num_blocks(self, size: int) -> int:
        """Return how many blocks a tensor of so many entries has."""
        if not self.dgt_enable_block:
            return min(size, 1)
        return -(-size // self.entries)

    def init(self, layouts: tuple[ShardLayout, ...]) -> State:
        """Return the state of a worker's first exchange.

        Its fields: ``k``; ``first_loss``, 0.0 until there is one; ``loss``, the smoothed one;
        ``shards``, per shard ``averages`` (per slot [n] float32), ``places`` (tensor and start of
        each slot, int64) and, where something is kept, ``kept`` (`thinwire.ops.routing.residuals`).
        """
        state: State = {"k": self.dgt_k, "first_loss": 0.0, "loss": 0.0}
        state["shards"] = [self._books(layout) for layout in layouts] if self.divides else []
        return state

    def _books(self, layout: ShardLayout) -> State:
        import numpy as np

        from thinwire.ops.routing import residuals

        pieces = layout.slices
        books: State = {
            "averages": [np.zeros(self.num_blocks(piece.size), np.float32) for piece in pieces],
            "places": [
                np.array([piece.tensor for piece in pieces], np.int64),
                np.array([piece.start for piece in pieces], np.int64),
            ],
        }
        if self.keeps:
            books["kept"] = residuals.books([piece.size for piece in pieces])
        return books

    def begin(self, state: State, context: RouteContext) -> State:
        """Return the state with the fraction k of one exchange, the same for all shards.

        ``k = max(k_min, k0 L / L_first)``, at most 1; a loss that is missing or not finite, or a
        first one below 0, leaves k as it is.
        """
        loss = context.loss
        if not self.dgt_adaptive_k or loss is None or not math.isfinite(loss):
            return state
        first, smooth = state["first_loss"], loss
        if not first:
            first = loss
        else:
            smooth = self.dgt_loss_ema * state["loss"] + (1 - self.dgt_loss_ema) * loss
        k = state["k"]
        if first > 0:
            k = min(1.0, max(self.dgt_k_min, self.dgt_k * smooth / first))
        return state | {"k": k, "first_loss": first, "loss": smooth}

    def cut(
        self, shard: int, blocks: tuple[Block, ...], state: State, context: RouteContext
    ) -> tuple[Routed, State]:
        """Part a shard's blocks by what they contribute.

        Where everything is reliable the same objects come back. Sparse blocks are parted by ranges
        of positions; what is a product of factors travels reliably and whole.

        Args:
            shard: Its number.
            blocks: Its part of the packet, slots ascending.
            state: As `begin` returned it.
            context: Of this exchange.
        """
        from thinwire.ops.routing import dgt_partition

        if not self.divides:
            return dgt_partition.whole(self, blocks, state["k"]), state
        books = state["shards"][shard]
        return dgt_partition.cut(self, shard, blocks, books, context, state["k"]), state

    def undelivered(self, shard: int, lost: Sequence[LostEntries] | None, state: State) -> State:
        """Hear what became of the last push to a shard.

        To be called once for every push; until then all of it is kept.

        Args:
            shard: Its number.
            lost: What did not arrive; kept for the next push with `dgt_error_feedback`, and else
                given up. None: the shard refused the push, and took nothing of it.
            state: As the push left it.
        """
        if not self.keeps:
            return state
        from thinwire.ops.routing import residuals

        kept = state["shards"][shard]["kept"]
        if lost is None:
            residuals.take_back(kept)
        else:
            residuals.settle(kept, tuple(lost) if self.dgt_error_feedback else ())
        return state

    def check(self, value_dtype: str) -> None:
        """Refuse to change values that a codec has coded in fewer bits already.

        Raises:
            ConfigurationError: The codec's values are not float32.
        """
        for name, applies in (
            (f"dgt_low_bits={self.dgt_low_bits}", self.dgt_low_bits < 32),
            ("dgt_error_feedback", self.dgt_error_feedback),
        ):
            if applies and value_dtype != "float32":
                raise ConfigurationError(
                    f"--value_dtype={value_dtype} with --{name}: both change values. Leave one of "
                    "them out."
                )

    def empty_choices(self, codec: Any) -> list[tuple[bool, str]]:
        """Return (applies, warning) for each choice that cannot make a difference."""
        fixed_k = not self.dgt_adaptive_k
        fixed_k_min = fixed_k and self.dgt_k_min != DgtChoices.dgt_k_min
        return [
            (
                isinstance(codec, PowerSgd),
                "--router=dgt with --codec=powersgd: factors travel "
                "reliably and whole; only tensors without are parted.",
            ),
            (self.dgt_channels == 0, "--dgt_channels=0: everything travels reliably."),
            (
                not self.dgt_enable_block,
                "--dgt_enable_block=false: every tensor is one block, and "
                "a tensor's last block is reliable, so DGT does nothing.",
            ),
            (self.dgt_k >= 1 and fixed_k, f"--dgt_k={self.dgt_k:g}: everything travels reliably."),
            (
                fixed_k_min,
                f"--dgt_k_min={self.dgt_k_min:g} without --dgt_adaptive_k: k never changes.",
            ),
            (
                fixed_k and self.dgt_loss_ema > 0,
                f"--dgt_loss_ema={self.dgt_loss_ema:g} without "
                "--dgt_adaptive_k: k does not follow the loss.",
            ),
        ]
