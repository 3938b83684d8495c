"""Settings of the router DGT and their legal values; docs/methods/dgt.md explains the settings."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from thinwire.ops.types import ConfigurationError

RECEPTIONS = ("diff", "drop")
RANDOM = ("0", "1", "fixed")
MARKERS = ("step", "tensor")
SCOPES = ("tensor", "model")
LOW_BITS = (32, 16, 8, 4)
MAX_CHANNELS = 7
# block sizes are in float32 entries of 4 bytes, for every value dtype of the gradient codec
BYTES_OF_ENTRY = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class DgtChoices:
    """Settings of the router DGT, with one field per --dgt_... flag of the training method.

    Attributes:
        dgt_channels: Number of UDP datagram channels (priority classes), 0 to 7; 0: all gradient
            blocks are sent over gRPC.
        dgt_k: Fraction k of gradient blocks that are sent over gRPC; with `dgt_adaptive_k` the
            fraction at the first loss.
        dgt_k_min: Smallest fraction k of gradient blocks that are sent over gRPC with
            `dgt_adaptive_k`.
        dgt_adaptive_k: True if the fraction k of gradient blocks sent over gRPC falls with the
            training loss.
        dgt_enable_block: True if gradient tensors are cut into blocks. False: each tensor is one
            block, and as the last block of a tensor is always sent over gRPC, there are no
            datagrams. The published code of DGT has this setting.
        dgt_block_size: Size of a gradient block, in bytes of float32 entries.
        dgt_alpha: Weight of past gradients in the moving average of a gradient block's
            contribution, 0 to 1.
        dgt_reception: Use of late UDP datagrams. diff: their values are added to the next step.
            drop: late datagrams are dropped.
        dgt_send_drop: True if the worker drops all gradient blocks not sent over gRPC, as a control
            experiment.
        dgt_random: Random importance ranks of gradient blocks, as a control experiment. 0: ranks by
            contribution (mean magnitude). 1: new random ranks in each training step. fixed: the
            same random ranks in all training steps.
        dgt_clear_zero: True if all-zero gradient blocks are not sent.
        dgt_low_bits: Bits of a gradient value in UDP datagrams. Below 32, the rounding errors are
            added to the next gradient.
        dgt_wait_ms: Longest wait of a shard server for announced UDP datagrams after the gRPC part
            of the gradient has arrived, in milliseconds.
        dgt_max_late: Largest delay, in training steps, of a late UDP datagram whose values a shard
            server uses.
        dgt_late_decay: Factor on the gradient values of a late UDP datagram, applied once for each
            training step of delay.
        dgt_error_feedback: True if gradient values that did not arrive are added to the next
            gradient.
        dgt_marker: gRPC message after which a shard server's wait for datagrams begins: the last
            message of the whole step, or the message of each tensor.
        dgt_loss_ema: Weight of past losses in the smoothed loss that k (the fraction of gradient
            blocks sent over gRPC) follows; 0: only the latest loss.
        dgt_scope: Gradient blocks that are ranked together by importance. tensor: the blocks of
            each tensor. model: all blocks of a shard server.
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

    @property
    def block_entries(self) -> int:
        """Number of entries of a gradient block."""
        return max(1, self.dgt_block_size // BYTES_OF_ENTRY)

    def num_blocks(self, size: int) -> int:
        """Return the number of gradient blocks of a tensor with `size` entries."""
        if not self.dgt_enable_block:
            return min(size, 1)
        return -(-size // self.block_entries)


#: Field of `DgtChoices` -> its smallest and largest legal value.
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
    """Raise an error if settings of the router DGT are out of range or exclude each other.

    Raises:
        ConfigurationError: A setting of the router DGT is out of range, or two settings exclude
            each other.
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
            f"--dgt_error_feedback with --dgt_reception={choices.dgt_reception}: a late value "
            "would count twice: on arrival and as error feedback. Set --dgt_reception=drop."
        )
    if choices.dgt_send_drop and (choices.dgt_error_feedback or choices.dgt_low_bits < 32):
        raise ConfigurationError(
            "--dgt_send_drop drops unreliable blocks before they are coded, so errors are lost; "
            "leave out --dgt_error_feedback and --dgt_low_bits."
        )


def _list(values: Sequence[Any]) -> str:
    return ", ".join(map(str, values[:-1])) + f" or {values[-1]}"


def _refusal(name: str, value: Any, expected: str) -> ConfigurationError:
    return ConfigurationError(f"--{name}={value}: {expected}.")
