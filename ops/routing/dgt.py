"""Router DGT: send important gradient blocks over gRPC, all other blocks in prioritized datagrams.

A gradient block is important if its values are large on average over the training steps. The module
`dgt` has the router DGT, `dgt_choices` has DGT's settings, and `dgt_partition` has DGT's functions
on arrays.

Source: Zhou et al., "DGT: a contribution-aware differential gradient transmission mechanism for
distributed machine learning", Future Generation Computer Systems 121, 2021; docs/methods/dgt.md.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from thinwire.ops.codecs.base import Codec
from thinwire.ops.codecs.error_feedback import coding_of
from thinwire.ops.codecs.power_sgd import PowerSgd
from thinwire.ops.routing.base import LostEntries, RouteContext, Routed, Router
from thinwire.ops.routing.dgt_choices import DgtChoices, refuse_contradictions
from thinwire.ops.types import FEW_BITS, Block, ConfigurationError, ShardLayout, State


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dgt(DgtChoices, Router):
    """Router that sends a fraction k of a tensor's blocks, the most important ones, over gRPC."""

    def __post_init__(self) -> None:
        """Raise an error if settings of the router DGT are out of range or exclude each other."""
        super().__post_init__()
        refuse_contradictions(self)

    @property
    def uses_datagrams(self) -> bool:
        """True if some gradient blocks may be sent in UDP datagrams.

        Shard servers reassemble gradients even if workers drop all blocks for UDP. Of a gradient in
        device memory, DGT copies only the values to send to host memory.
        """
        has_channels = self.dgt_channels > 0 and self.dgt_enable_block
        return has_channels and (self.dgt_k < 1 or self.dgt_adaptive_k)

    @property
    def reassembly_rules(self) -> DgtChoices:
        """Settings by which shard servers reassemble gradients: the router object itself."""
        return self

    @property
    def channels(self) -> int:
        """Number C of UDP datagram channels (priority classes).

        Even if no UDP datagrams are sent, the number C of channels determines the priority mark
        (DSCP) of the gRPC stream.
        """
        return self.dgt_channels

    @property
    def max_late(self) -> int:
        """Number of training steps after which a worker drops its unsent UDP datagrams."""
        return self.dgt_max_late if self.dgt_reception == "diff" else 0

    @property
    def needs_datagrams_first(self) -> bool:
        """True if the shard server drops UDP datagrams that arrive after a push's gRPC messages."""
        return self.dgt_reception == "drop" and not self.dgt_wait_ms

    @property
    def marks_slots(self) -> bool:
        """True if a separate gRPC message per variable slice announces the UDP datagrams."""
        return self.dgt_marker == "tensor"

    @property
    def keeps(self) -> bool:
        """True if the worker adds lost values and rounding errors to its next pushed gradient."""
        return self.uses_datagrams and (self.dgt_error_feedback or self.dgt_low_bits < 32)

    def init(self, layouts: tuple[ShardLayout, ...]) -> State:
        """Return the initial state of the router, before a worker pushes its first gradient.

        The router's state has ``k`` (fraction of blocks sent over gRPC), ``first_loss`` (0.0 before
        the first loss), ``loss`` (smoothed loss) and ``shards``. For each shard server the state
        has ``averages`` (mean contribution of each gradient block, per variable slice [n] float32),
        ``places`` (tensor and start of each slice, int64) and, if residuals are kept, ``kept``
        (`thinwire.ops.routing.residuals`).
        """
        state: State = {"k": self.dgt_k, "first_loss": 0.0, "loss": 0.0}
        state["shards"] = (
            [self._shard_state(layout) for layout in layouts] if self.uses_datagrams else []
        )
        return state

    def _shard_state(self, layout: ShardLayout) -> State:
        import numpy as np

        from thinwire.ops.routing import residuals

        pieces = layout.slices
        shard: State = {
            "averages": [np.zeros(self.num_blocks(piece.size), np.float32) for piece in pieces],
            "places": [
                np.array([piece.tensor for piece in pieces], np.int64),
                np.array([piece.start for piece in pieces], np.int64),
            ],
        }
        if self.keeps:
            shard["kept"] = residuals.zeros([piece.size for piece in pieces])
        return shard

    def begin(self, state: State, context: RouteContext) -> State:
        """Return the state with k, the fraction of gradient blocks that a push sends over gRPC.

        The fraction of gradient blocks sent over gRPC is ``k = max(k_min, k0 L / L_first)``, at
        most 1, with the loss L, the first loss L_first and the settings k0 = `dgt_k` and k_min =
        `dgt_k_min`. The fraction k does not change if the loss is missing or not finite, or if the
        first loss is below 0.
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
        """Divide a shard server's gradient by contribution; `Router.cut` describes the arguments.

        If all gradient blocks are sent over gRPC, the result of `cut` has the unchanged objects of
        `blocks`. `cut` divides a sparse gradient of a variable slice by ranges of positions. DGT
        sends a low-rank gradient of a variable slice whole over gRPC.
        """
        from thinwire.ops.routing import dgt_partition

        if not self.uses_datagrams:
            return dgt_partition.all_reliable(self, blocks, state["k"]), state
        partition = dgt_partition.Partition(
            self, shard, state["shards"][shard], context, state["k"]
        )
        return partition.cut(blocks), state

    def undelivered(self, shard: int, lost: Sequence[LostEntries] | None, state: State) -> State:
        """Update the residuals (values to send later) after a push's arrived datagrams are known.

        `undelivered` must be called once for every push, because the residuals store the pushed
        values until the call. With `dgt_error_feedback`, gradient values lost in UDP datagrams are
        added to the next push. Without `dgt_error_feedback`, gradient values lost in UDP datagrams
        are discarded.
        """
        if not self.keeps:
            return state
        from thinwire.ops.routing import residuals

        shard_residuals = state["shards"][shard]["kept"]
        if lost is None:
            residuals.undo(shard_residuals)
        else:
            residuals.settle(shard_residuals, tuple(lost) if self.dgt_error_feedback else ())
        return state

    def check(self, codec: Codec) -> list[str]:
        """Return warnings about settings of DGT without an effect on the codec's gradients.

        Raises:
            ConfigurationError: UDP datagrams cannot send the gradient codec's values, or a setting
                of DGT would change values that the codec has already coded in fewer bits.
        """
        if codec.value_dtype in FEW_BITS:
            raise ConfigurationError(
                f"--value_dtype={codec.value_dtype} with --router=dgt: datagrams cannot carry the "
                "scale factors of chunks. Set --router=reliable, or another --value_dtype."
            )
        for name, applies in (
            (f"dgt_low_bits={self.dgt_low_bits}", self.dgt_low_bits < 32),
            ("dgt_error_feedback", self.dgt_error_feedback),
        ):
            if applies and codec.value_dtype != "float32":
                raise ConfigurationError(
                    f"--value_dtype={codec.value_dtype} with --{name}: both flags change the "
                    "values of updates. Leave one of the two flags out."
                )
        fixed_k = not self.dgt_adaptive_k
        fixed_k_min = fixed_k and self.dgt_k_min != DgtChoices.dgt_k_min
        warnings = (
            (
                isinstance(coding_of(codec), PowerSgd),
                "--router=dgt with --codec=powersgd: factors are sent "
                "reliably and whole; only tensors without factors are partitioned.",
            ),
            (self.dgt_channels == 0, "--dgt_channels=0: every block is sent reliably."),
            (
                not self.dgt_enable_block,
                "--dgt_enable_block=false: every tensor is one block, and a tensor's last block "
                "is sent reliably, so DGT has no effect.",
            ),
            (self.dgt_k >= 1 and fixed_k, f"--dgt_k={self.dgt_k:g}: every block is sent reliably."),
            (
                fixed_k_min,
                f"--dgt_k_min={self.dgt_k_min:g} without --dgt_adaptive_k: k never changes.",
            ),
            (
                fixed_k and self.dgt_loss_ema > 0,
                f"--dgt_loss_ema={self.dgt_loss_ema:g} without "
                "--dgt_adaptive_k: k does not follow the loss.",
            ),
        )
        return [text for applies, text in warnings if applies]
