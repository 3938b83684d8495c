"""Settings of the router DGT and their legal values; docs/methods/dgt.md explains the settings."""

from __future__ import annotations

import dataclasses

from thinwire.ops.options import FlagRule, choice, fraction, integer, number, switch
from thinwire.ops.policy import Policy, setting
from thinwire.ops.types import ConfigurationError

MAX_CHANNELS = 7
# block sizes are in float32 entries of 4 bytes, for every value dtype of the gradient codec
BYTES_OF_ENTRY = 4
_IS_BLOCK = FlagRule(lambda size: size % 4 == 0, "must be a multiple of 4, the bytes of a float32")
_IS_BITS = FlagRule(lambda bits: bits in (32, 16, 8, 4), "must be 32, 16, 8 or 4")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DgtChoices(Policy):
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

    dgt_channels: int = setting(
        integer(
            "dgt_channels",
            3,
            "Number of UDP channels for DGT's datagrams; 0: send all blocks reliably.",
            "count",
            low=0,
            high=MAX_CHANNELS,
        )
    )
    dgt_k: float = setting(
        fraction(
            "dgt_k",
            0.8,
            "Fraction of a gradient's blocks that DGT (differential gradient transmission) sends "
            "reliably; DGT sends the remaining blocks in datagrams.",
        ),
        shown=True,
    )
    dgt_k_min: float = setting(
        fraction(
            "dgt_k_min",
            0.2,
            "Smallest fraction of reliable blocks to which --dgt_adaptive_k lowers --dgt_k.",
        )
    )
    dgt_adaptive_k: bool = setting(
        switch(
            "dgt_adaptive_k",
            "Lower the fraction of reliable blocks (--dgt_k) as the training loss falls.",
        )
    )
    dgt_enable_block: bool = setting(
        switch(
            "dgt_enable_block",
            "Cut tensors into blocks; if off, each tensor is one block that is sent reliably.",
            default=True,
        )
    )
    dgt_block_size: int = setting(
        integer(
            "dgt_block_size",
            4096,
            "Size of a block of consecutive float32 entries, which DGT ranks together.",
            "bytes",
            low=4,
            high=2**31 - 4,
            rule=_IS_BLOCK,
        )
    )
    dgt_alpha: float = setting(
        fraction(
            "dgt_alpha",
            0.3,
            "Weight of the past in the moving average of a block's contribution.",
        )
    )
    dgt_reception: str = setting(
        choice(
            "dgt_reception",
            "diff",
            "Use of gradient blocks whose datagrams arrive late at a shard: diff adds these "
            "blocks to the next step, drop discards them.",
            ("diff", "drop"),
        )
    )
    dgt_send_drop: bool = setting(
        switch("dgt_send_drop", "Control experiment: workers drop all of DGT's unreliable blocks.")
    )
    dgt_random: str = setting(
        choice(
            "dgt_random",
            "0",
            "Control experiment: DGT ranks blocks at random, with new ranks in each step (1) "
            "or with the same ranks in all steps (fixed); 0: DGT ranks blocks by contribution.",
            ("0", "1", "fixed"),
        )
    )
    dgt_clear_zero: bool = setting(
        switch("dgt_clear_zero", "Do not send gradient blocks of zeros.", default=True)
    )
    dgt_low_bits: int = setting(
        integer(
            "dgt_low_bits",
            32,
            "Number of bits of a value in the blocks that DGT sends in datagrams: 32, 16, 8 "
            "or 4; rounding errors are added to the next gradient.",
            "bits",
            low=4,
            rule=_IS_BITS,
        )
    )
    dgt_wait_ms: float = setting(
        number(
            "dgt_wait_ms",
            0.0,
            "Time that a shard waits for a push's datagrams after the reliable part.",
            "milliseconds",
            low=0.0,
            high=3_600_000.0,
        )
    )
    dgt_max_late: int = setting(
        integer(
            "dgt_max_late",
            5,
            "Largest lateness of a datagram block that a shard does not discard.",
            "steps",
            low=0,
            high=2**31 - 1,
        )
    )
    dgt_late_decay: float = setting(
        fraction(
            "dgt_late_decay",
            1.0,
            "Factor on a late datagram block for each step of lateness.",
            "factor",
        )
    )
    dgt_error_feedback: bool = setting(
        switch(
            "dgt_error_feedback",
            "Add values of lost datagrams to the next gradient; needs --dgt_reception=drop.",
        )
    )
    dgt_marker: str = setting(
        choice(
            "dgt_marker",
            "step",
            "Reliable part of a push that a shard must receive before the shard stops waiting "
            "for datagrams: step, the part of the whole step; tensor, the part of each tensor.",
            ("step", "tensor"),
        )
    )
    dgt_loss_ema: float = setting(
        number(
            "dgt_loss_ema",
            0.0,
            "Weight of the past in the training loss that --dgt_adaptive_k follows.",
            "fraction",
            low=0.0,
            high=0.9999,
        )
    )
    dgt_scope: str = setting(
        choice(
            "dgt_scope",
            "tensor",
            "Gradient blocks that DGT ranks together: tensor, the blocks of each tensor; "
            "model, all blocks of a shard.",
            ("tensor", "model"),
        )
    )

    @property
    def block_entries(self) -> int:
        """Number of entries of a gradient block."""
        return max(1, self.dgt_block_size // BYTES_OF_ENTRY)

    def num_blocks(self, size: int) -> int:
        """Return the number of gradient blocks of a tensor with `size` entries."""
        if not self.dgt_enable_block:
            return min(size, 1)
        return -(-size // self.block_entries)


def refuse_contradictions(choices: DgtChoices) -> None:
    """Raise an error if settings of the router DGT exclude each other.

    Raises:
        ConfigurationError: Two settings of the router DGT exclude each other.
    """
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
