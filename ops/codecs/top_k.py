"""The codec that sends the largest entries, and the ways to find them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from thinwire.ops.codecs.dense import Sparsifier, feed_in_turn, kept_entries
from thinwire.ops.types import ConfigurationError, EncodeContext, ModelSpec, Packet, State

if TYPE_CHECKING:
    from thinwire.ops.types import Float32, Int64

    Chosen = tuple[Int64, Float32]  # ascending positions, and the values there

#: --threshold_scope values.
SCOPES = ("tensor", "global")


def _exact(x: Float32, k: int, place: int, state: State, ctx: EncodeContext) -> Chosen:
    del place, state
    chosen: Chosen = ctx.kernels.top_k(x, k)
    return chosen


def _sampled(x: Float32, k: int, place: int, state: State, ctx: EncodeContext) -> Chosen:
    del place, state
    chosen: Chosen = ctx.kernels.sampled_top_k(x, k, ctx.rng)
    return chosen


def _carried(x: Float32, k: int, place: int, state: State, ctx: EncodeContext) -> Chosen:
    thresholds = state["thresholds"]
    indices, values, thresholds[place] = ctx.kernels.carried_top_k(x, k, thresholds[place])
    return indices, values


def _expected(place: int, state: State) -> float:
    """Return the threshold to expect: that of the step before, or lower if thresholds fall."""
    last, earlier = float(state["thresholds"][place]), float(state["earlier"][place])
    state["earlier"][place] = last
    return last * min(1.0, last / earlier) if earlier > 0 else last


#: --selection value -> how the largest entries of one array are found.
SELECTIONS: dict[str, Callable[[Any, int, int, State, EncodeContext], Any]] = {
    "exact": _exact,
    "sampled": _sampled,
    "carried": _carried,
}


#: --selection value -> the kernel that adds to a residual and takes the largest out at once.
_AT_ONCE = {"exact": "feedback_top_k", "carried": "feedback_carried"}


@dataclasses.dataclass(frozen=True)
class TopK(Sparsifier):
    """AdaComp's selection: of each tensor the k entries of largest magnitude; the rest is dropped.

    ``k = max(1, floor(c * n + 1e-9))``, ties to the lowest index. Zeros are never sent: an
    all-zero tensor gives no block. With c >= 1 every entry is sent.

    Attributes:
        compression_rate: c, the fraction kept, above 0.
        value_dtype: How values travel, one of thinwire.ops.types.VALUE_DTYPES.
        selection: exact; sampled: those above a threshold estimated from a hundredth of the
            entries, 0.8 k to 1.3 k of them; carried: those above the threshold of the step before,
            which is adapted so that there are about k.
        threshold_scope: tensor: k of each tensor; global: k of all together.

    Source: Hardy et al. (arXiv 1702.04683) and their published code; docs/methods/adacomp.md.
    Sampling: Lin, Han et al., "Deep Gradient Compression", ICLR 2018, and its authors' program. One
    threshold for all: Aji and Heafield, EMNLP 2017.
    """

    selection: str = "exact"
    threshold_scope: str = "tensor"

    def __post_init__(self) -> None:
        """Refuse what no selection is."""
        super().__post_init__()
        for flag, value, legal in (
            ("selection", self.selection, tuple(SELECTIONS)),
            ("threshold_scope", self.threshold_scope, SCOPES),
        ):
            if value not in legal:
                raise ConfigurationError(f"--{flag}={value!r}: expected one of {', '.join(legal)}.")

    def init(self, spec: ModelSpec, kernels: Any) -> State:
        """Return the thresholds that are carried from step to step; 0 is none yet."""
        import numpy as np

        del kernels
        places = 1 if self.threshold_scope == "global" else len(spec.tensors)
        zeros = np.zeros(places, np.float32)
        return {"thresholds": zeros, "earlier": zeros.copy()}

    def feed(
        self,
        residuals: Sequence[Float32],
        tensors: Sequence[Float32],
        state: State,
        ctx: EncodeContext,
    ) -> tuple[Packet, State]:
        """See `ops.codecs.dense.feed`; where possible all is done in one pass over memory."""
        rate = self.fraction(ctx)
        if rate >= 1 or self.selection not in _AT_ONCE or self.threshold_scope != "tensor":
            return feed_in_turn(self, residuals, tensors, state, ctx)
        take_largest = getattr(ctx.kernels, _AT_ONCE[self.selection])
        factors = ctx.factors or (1.0,) * len(tensors)
        chosen = []
        for place, (residual, tensor) in enumerate(zip(residuals, tensors, strict=True)):
            count, hint = kept_entries(rate, tensor.size), _expected(place, state)
            indices, values, state["thresholds"][place] = take_largest(
                residual, tensor, count, factors[place], hint
            )
            chosen.append((indices, values))
        packet = self.coded(tensors, chosen, ctx)
        if self.value_dtype != "float32":
            for block in packet.blocks:
                indices, values = chosen[block.slot]
                residuals[block.slot][indices] = values - ctx.kernels.dequantise(block.values)
        return packet, state

    def select(
        self, tensors: Sequence[Float32], rate: float, state: State, ctx: EncodeContext
    ) -> list[Chosen]:
        """Return of each tensor the positions to send and the values there."""
        find = SELECTIONS[self.selection]
        if self.threshold_scope == "tensor":
            return [
                find(tensor, kept_entries(rate, tensor.size), place, state, ctx)
                for place, tensor in enumerate(tensors)
            ]
        import numpy as np

        flat = ctx.kernels.joined(tensors)
        indices, values = find(flat, kept_entries(rate, flat.size), 0, state, ctx)
        ends = list(itertools.accumulate((tensor.size for tensor in tensors), initial=0))
        cuts = np.searchsorted(indices, ends)
        return [
            (indices[first:last] - start, values[first:last])
            for first, last, start in zip(cuts, cuts[1:], ends, strict=False)
        ]
