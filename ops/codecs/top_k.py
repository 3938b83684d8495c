"""Gradient codec that sends the entries of largest magnitude in each tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from thinwire.ops.codecs.base import EncodeContext, kept_entries
from thinwire.ops.codecs.dense import FusedSparsifier
from thinwire.ops.kernels.base import Kernels, Selected
from thinwire.ops.options import FlagRule, words
from thinwire.ops.policy import setting
from thinwire.ops.types import Float32, ModelSpec, State


@dataclasses.dataclass(frozen=True)
class TopK(FusedSparsifier):
    """Codec that sends the k entries of largest magnitude in each gradient tensor, as in AdaComp.

    For a tensor of n entries and compression rate c, TopK sends ``k = max(1, floor(c * n + 1e-9))``
    entries. Among entries of equal magnitude, TopK sends those with the lowest index. TopK never
    sends zeros: an all-zero tensor gives no block. With compression rate c >= 1, TopK sends every
    non-zero entry.

    Attributes:
        compression_rate: c, the fraction of gradient entries sent, above 0.
        value_dtype: Dtype of the sent gradient values on the wire, for example float32, int8 or
            sign (VALUE_DTYPES and FEW_BITS in thinwire.ops.types).
        selection: "exact": send the k entries of largest magnitude. "carried": send the entries
            above the magnitude threshold of the last training step, which adapts so that about k
            entries (0.8 k to 1.3 k) are sent.

    Source: Hardy et al. (arXiv 1702.04683) and their published code; docs/methods/adacomp.md.
    """

    selection: str = setting(
        words(
            "selection",
            "exact",
            "Search of a sparsifying codec for the largest entries of a tensor: exact, or carried, "
            "with the adapted threshold of the previous step.",
            "exact|carried",
            rule=FlagRule(
                lambda value: value in ("exact", "carried"),
                "must be exact or carried. sampled has been removed: carried selects about as "
                "many entries for less work",
            ),
        )
    )

    def init(self, spec: ModelSpec, kernels: Kernels) -> State:
        """Return the codec's initial state: all magnitude thresholds are 0 (unknown)."""
        import numpy as np

        zeros = np.zeros(len(spec.tensors), np.float32)
        return {"thresholds": zeros, "earlier": zeros.copy()}

    def take(
        self,
        residuals: Sequence[Float32],
        tensors: Sequence[Float32],
        rate: float,
        state: State,
        ctx: EncodeContext,
    ) -> list[Selected]:
        """Add gradients to the residuals (unsent values); remove and return entries to send.

        Returns:
            One (positions, values) pair per tensor.
        """
        counts = [kept_entries(rate, tensor.size) for tensor in tensors]
        factors = ctx.factors or (1.0,) * len(tensors)
        hints = _expected(state)
        if self.selection == "exact":
            selected = ctx.kernels.feedback_of_each(residuals, tensors, counts, factors, hints)
        else:
            calls = zip(residuals, tensors, counts, factors, hints, strict=True)
            selected = [ctx.kernels.feedback_carried(*arguments) for arguments in calls]
        state["thresholds"][:] = [threshold for _, _, threshold in selected]
        return [(indices, values) for indices, values, _ in selected]

    def select(
        self, tensors: Sequence[Float32], rate: float, state: State, ctx: EncodeContext
    ) -> list[Selected]:
        """Return the gradient entries to send, one (positions, values) pair per tensor."""
        counts = [kept_entries(rate, tensor.size) for tensor in tensors]
        if self.selection == "exact":
            return [ctx.kernels.top_k(*pair) for pair in zip(tensors, counts, strict=True)]
        chosen, thresholds = [], state["thresholds"]
        for place, (tensor, count) in enumerate(zip(tensors, counts, strict=True)):
            selected = ctx.kernels.carried_top_k(tensor, count, thresholds[place])
            indices, values, thresholds[place] = selected
            chosen.append((indices, values))
        return chosen


def _expected(state: State) -> list[float]:
    """Return each tensor's expected magnitude threshold: the last one, or less if they fall."""
    last, earlier = state["thresholds"].tolist(), state["earlier"].tolist()
    state["earlier"][:] = last
    return [
        now * min(1.0, now / before) if before > 0 else now
        for now, before in zip(last, earlier, strict=True)
    ]
