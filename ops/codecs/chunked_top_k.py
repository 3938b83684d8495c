"""Gradient codec that sends the entries of largest magnitude of each chunk of a tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from thinwire.ops.codecs.base import EncodeContext, kept_entries
from thinwire.ops.codecs.dense import FusedSparsifier
from thinwire.ops.kernels.base import Selected
from thinwire.ops.options import integer
from thinwire.ops.policy import setting
from thinwire.ops.types import CHUNK_ENTRIES, ConfigurationError, Float32, State


@dataclasses.dataclass(frozen=True)
class ChunkedTopK(FusedSparsifier):
    """Codec that sends the k entries of largest magnitude in each chunk of a gradient tensor.

    A chunk is a range of consecutive entries of a flattened gradient tensor. The codec sends ceil(k
    m / chunk) entries of a tensor's last chunk, which has m entries. Among entries of equal
    magnitude the codec sends those with the lowest index, and it never sends zeros. If k equals the
    length of a chunk, the codec sends every entry, except zeros. If the codec quantizes values to a
    few bits, the entries of a chunk share their scales.

    Attributes:
        compression_rate: c, the fraction of gradient entries sent, above 0. If `chunk_k` is None, k
            = max(1, floor(c * chunk)).
        value_dtype: Dtype of the sent gradient values on the wire, for example float32, int8 or
            sign (VALUE_DTYPES, FEW_BITS).
        chunk: Number of gradient entries in a chunk, at least 1.
        chunk_k: k, the number of entries sent of each chunk, from 1 to `chunk`; None:
            `compression_rate` determines k.

    Source: Wang et al., "SparseLoCo" (arXiv 2508.15706); docs/methods/local_steps.md.
    """

    chunk: int = setting(
        integer(
            "chunk",
            CHUNK_ENTRIES,
            "Number of consecutive entries of a tensor in a chunk of --codec=chunked_topk.",
            "entries",
            low=1,
        )
    )
    chunk_k: int | None = setting(
        integer(
            "chunk_k",
            None,
            "Number of entries of each chunk that --codec=chunked_topk sends.",
            "entries",
            low=1,
            unset="--compression_rate of a chunk",
        )
    )

    def __post_init__(self) -> None:
        """Raise an error if a setting is out of range, or k is above a chunk's length."""
        super().__post_init__()
        if self.chunk_k is not None and self.chunk_k > self.chunk:
            raise ConfigurationError(
                f"--chunk_k={self.chunk_k}: expected 1 to {self.chunk} entries, the length of a "
                "chunk (--chunk)."
            )

    @property
    def kept_fraction(self) -> float:
        """The fraction of gradient entries to send if the caller sets no `EncodeContext.keep`."""
        return self.compression_rate if self.chunk_k is None else self.chunk_k / self.chunk

    @property
    def value_chunk(self) -> int:
        """Number of consecutive entries that share the scales of values quantized to few bits."""
        return self.chunk

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
        count, factors = kept_entries(rate, self.chunk), ctx.factors or (1.0,) * len(tensors)
        return [
            ctx.kernels.feedback_chunk_top_k(residual, tensor, count, self.chunk, factor)
            for residual, tensor, factor in zip(residuals, tensors, factors, strict=True)
        ]

    def select(
        self, tensors: Sequence[Float32], rate: float, state: State, ctx: EncodeContext
    ) -> list[Selected]:
        """Return the gradient entries to send, one (positions, values) pair per tensor."""
        count = kept_entries(rate, self.chunk)
        return [ctx.kernels.chunk_top_k(tensor, count, self.chunk) for tensor in tensors]
