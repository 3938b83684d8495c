"""DGT: blocks that contribute much travel reliably, the rest in datagrams by priority.

The policy and its state; `dgt_choices` has the settings, `dgt_partition` the work on arrays.

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
        """Whether shards reassemble pushes; also where a sender throws its datagrams away."""
        return self.divides

    @property
    def reassembly_rules(self) -> ReassemblyRules:
        """The settings themselves."""
        return self

    @property
    def channels(self) -> int:
        """C; also where none carries anything, because packets of the stream are marked by it."""
        return self.dgt_channels

    @property
    def max_late(self) -> int:
        """Steps after which a sender drops datagrams that are still queued."""
        return self.dgt_max_late if self.dgt_reception == "diff" else 0

    @property
    def needs_datagrams_first(self) -> bool:
        """Whether datagrams are useless once the reliable part has arrived."""
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
    def joins_slots(self) -> bool:
        """No: each slot has blocks of its own, which are counted."""
        return False

    @property
    def takes_device_arrays(self) -> bool:
        """Whether values of dense blocks may lie on a device: what is not sent stays there."""
        return self.divides

    @property
    def keeps(self) -> bool:
        """Whether something is kept back for the next step."""
        return self.divides and (self.dgt_error_feedback or self.dgt_low_bits < 32)

    def init(self, layouts: tuple[ShardLayout, ...]) -> State:
        """Return the state before a worker's first exchange.

        Its fields: ``k``; ``first_loss``, 0.0 until there is one; ``loss``, the smoothed one;
        ``shards``, per shard ``averages`` (per slot [n] float32), ``places`` (tensor and start of
        each slot, int64) and, where something is kept, ``kept`` (`thinwire.ops.routing.residuals`).
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
        """Partition a shard's blocks by what they contribute; see `Router.cut`.

        Where everything is reliable the same objects come back. Sparse blocks are partitioned by
        ranges of positions; what is a product of factors travels reliably and whole.
        """
        from thinwire.ops.routing import dgt_partition

        if not self.divides:
            return dgt_partition.all_reliable(self, blocks, state["k"]), state
        partition = dgt_partition.Partition(
            self, shard, state["shards"][shard], context, state["k"]
        )
        return partition.cut(blocks), state

    def undelivered(self, shard: int, lost: Sequence[LostEntries] | None, state: State) -> State:
        """Settle the residuals of the last push; see `Router.undelivered`.

        It is called once for every push, which is kept until then. What did not arrive is added to
        the next push with `dgt_error_feedback`, and given up without.
        """
        if not self.keeps:
            return state
        from thinwire.ops.routing import residuals

        kept = state["shards"][shard]["kept"]
        if lost is None:
            residuals.undo(kept)
        else:
            residuals.settle(kept, tuple(lost) if self.dgt_error_feedback else ())
        return state

    def check(self, codec: Codec) -> list[str]:
        """Return warnings about settings that cannot make a difference with this codec.

        Raises:
            ConfigurationError: Values would be changed that the codec has coded in fewer bits.
        """
        if codec.value_dtype in FEW_BITS:
            raise ConfigurationError(
                f"--value_dtype={codec.value_dtype} with --router=dgt: datagrams have no place for "
                "scales of chunks. Take --router=reliable, or another --value_dtype."
            )
        for name, applies in (
            (f"dgt_low_bits={self.dgt_low_bits}", self.dgt_low_bits < 32),
            ("dgt_error_feedback", self.dgt_error_feedback),
        ):
            if applies and codec.value_dtype != "float32":
                raise ConfigurationError(
                    f"--value_dtype={codec.value_dtype} with --{name}: both change values. Leave "
                    "one of them out."
                )
        fixed_k = not self.dgt_adaptive_k
        fixed_k_min = fixed_k and self.dgt_k_min != DgtChoices.dgt_k_min
        warnings = (
            (
                isinstance(coding_of(codec), PowerSgd),
                "--router=dgt with --codec=powersgd: factors travel "
                "reliably and whole; only tensors without are partitioned.",
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
        )
        return [text for applies, text in warnings if applies]
