"""DGT: send the important gradient blocks reliably, all other blocks in prioritized datagrams.

A block is important if its values are large on average over the steps. This module has the router
and its state, `dgt_choices` has the settings, `dgt_partition` the functions on arrays.

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
from thinwire.ops.routing.base import LostEntries, ReassemblyRules, RouteContext, Routed
from thinwire.ops.routing.dgt_choices import DgtChoices, refuse_illegal
from thinwire.ops.types import FEW_BITS, Block, ConfigurationError, ShardLayout, State


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dgt(DgtChoices):
    """Router that sends a tensor's best blocks (fraction k) and its last block reliably."""

    def __post_init__(self) -> None:
        """Reject settings of DGT that are out of range or exclude each other."""
        refuse_illegal(self)

    @property
    def divides(self) -> bool:
        """True if some gradient blocks may be sent in datagrams."""
        has_channels = self.dgt_channels > 0 and self.dgt_enable_block
        return has_channels and (self.dgt_k < 1 or self.dgt_adaptive_k)

    @property
    def uses_datagrams(self) -> bool:
        """True if shards reassemble pushes, even if workers drop all unreliable blocks."""
        return self.divides

    @property
    def reassembly_rules(self) -> ReassemblyRules:
        """Settings by which shards reassemble pushes: this object."""
        return self

    @property
    def channels(self) -> int:
        """Number C of datagram channels. Also without datagrams, C sets the stream's DSCP mark."""
        return self.dgt_channels

    @property
    def max_late(self) -> int:
        """Number of steps after which a worker drops datagrams that it has not sent yet."""
        return self.dgt_max_late if self.dgt_reception == "diff" else 0

    @property
    def needs_datagrams_first(self) -> bool:
        """True if the shard drops datagrams that arrive after the push's reliable part."""
        return self.dgt_reception == "drop" and not self.dgt_wait_ms

    @property
    def marks_slots(self) -> bool:
        """True if each slot has a separate reliable part, which announces the slot's datagrams."""
        return self.dgt_marker == "tensor"

    @property
    def delivers_all(self) -> bool:
        """True if the shard receives exactly the values of the push, to the last bit."""
        return not self.divides

    @property
    def joins_slots(self) -> bool:
        """False: a block never spans two slots (slices of variables), whose blocks are counted."""
        return False

    @property
    def takes_device_arrays(self) -> bool:
        """True if dense values may be in device memory. Only the values to send are then copied."""
        return self.divides

    @property
    def keeps(self) -> bool:
        """True if lost values and rounding errors (residuals) are added to the next push."""
        return self.divides and (self.dgt_error_feedback or self.dgt_low_bits < 32)

    def init(self, layouts: tuple[ShardLayout, ...]) -> State:
        """Return the router's state before a worker's first push.

        The state has ``k`` (fraction of reliable blocks), ``first_loss`` (0.0 before the first
        loss), ``loss`` (smoothed loss) and ``shards``. Each shard has ``averages`` (mean
        contribution of each block, per slot [n] float32), ``places`` (tensor and start of each
        slot, int64) and, if residuals are kept, ``kept`` (`thinwire.ops.routing.residuals`).
        """
        state: State = {"k": self.dgt_k, "first_loss": 0.0, "loss": 0.0}
        state["shards"] = [self._shard_state(layout) for layout in layouts] if self.divides else []
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
        """Return the state with the fraction k of reliable blocks in one push to all shards.

        ``k = max(k_min, k0 L / L_first)``, at most 1, with the loss L and the first loss L_first. k
        does not change if the loss is missing or not finite, or if the first loss is below 0.
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
        """Divide a shard's part of a push by contribution; `Router.cut` describes the arguments.

        If everything is sent reliably, the result has the unchanged objects of `blocks`. A sparse
        slot is divided by ranges of positions. A low-rank slot is sent reliably and whole.
        """
        from thinwire.ops.routing import dgt_partition

        if not self.divides:
            return dgt_partition.all_reliable(self, blocks, state["k"]), state
        partition = dgt_partition.Partition(
            self, shard, state["shards"][shard], context, state["k"]
        )
        return partition.cut(blocks), state

    def undelivered(self, shard: int, lost: Sequence[LostEntries] | None, state: State) -> State:
        """Settle the residuals of the last push; `Router.undelivered` describes the arguments.

        Must be called once for every push: the residuals keep the pushed values until this call.
        With `dgt_error_feedback`, lost values are added to the next push. Without
        `dgt_error_feedback`, lost values are discarded.
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
        """Return warnings about settings of DGT that have no effect with this codec.

        Raises:
            ConfigurationError: Datagrams cannot send the codec's values, or a setting of DGT would
                change values that the codec has already coded in fewer bits.
        """
        if codec.value_dtype in FEW_BITS:
            raise ConfigurationError(
                f"--value_dtype={codec.value_dtype} with --router=dgt: datagrams cannot carry "
                "the scales of chunks. Set --router=reliable, or another --value_dtype."
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
