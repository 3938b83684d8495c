"""The codec that sends the entries of largest magnitude of each chunk of a tensor."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

from thinwire.ops.codecs.base import EncodeContext, kept_entries
from thinwire.ops.codecs.dense import FusedSparsifier
from thinwire.ops.types import CHUNK_ENTRIES, ConfigurationError, State

if TYPE_CHECKING:
    from thinwire.ops.kernels.base import Selected
    from thinwire.ops.types import Float32


@dataclasses.dataclass(frozen=True)
class ChunkedTopK(FusedSparsifier):
    """Send of each chunk the k entries of largest magnitude; the rest is dropped.

    Chunks are runs of consecutive entries of a flattened tensor. The last one of a tensor, of m
    entries, keeps ceil(k m / chunk). Ties go to the lowest index, zeros are never sent. With k =
    chunk every entry is sent. Values of few bits have the scales of these chunks.

    Attributes:
        compression_rate: c, above 0: k = max(1, floor(c chunk)), where `chunk_k` is not given.
        value_dtype: How values travel, one of VALUE_DTYPES and FEW_BITS.
        chunk: Entries of a chunk, at least 1.
        chunk_k: k, 1 to `chunk`; None: by `compression_rate`.

    Source: Wang et al., "SparseLoCo" (arXiv 2508.15706); docs/methods/local_steps.md.
    """

    chunk: int = CHUNK_ENTRIES
    chunk_k: int | None = None

    def __post_init__(self) -> None:
        """Refuse chunks of nothing, and to keep nothing or more than there is."""
        super().__post_init__()
        if self.chunk < 1:
            raise ConfigurationError(f"--chunk={self.chunk}: expected 1 or more entries.")
        if self.chunk_k is not None and not 1 <= self.chunk_k <= self.chunk:
            raise ConfigurationError(
                f"--chunk_k={self.chunk_k}: expected 1 to {self.chunk} entries, the length of a "
                "chunk (--chunk)."
            )

    @property
    def kept_fraction(self) -> float:
        """The fraction of entries to send, unless the context has another."""
        return self.compression_rate if self.chunk_k is None else self.chunk_k / self.chunk

    @property
    def value_chunk(self) -> int:
        """Entries whose values have scales of their own, where values are of few bits."""
        return self.chunk

    def take(
        self,
        residuals: Sequence[Float32],
        tensors: Sequence[Float32],
        rate: float,
        state: State,
        ctx: EncodeContext,
    ) -> list[Selected]:
        """Add tensors to residuals and take out what to send: its positions, the values there."""
        del state
        kept, factors = kept_entries(rate, self.chunk), ctx.factors or (1.0,) * len(tensors)
        return [
            ctx.kernels.feedback_chunk_top_k(residual, tensor, kept, self.chunk, factor)
            for residual, tensor, factor in zip(residuals, tensors, factors, strict=True)
        ]

    def select(
        self, tensors: Sequence[Float32], rate: float, state: State, ctx: EncodeContext
    ) -> list[Selected]:
        """Return of each tensor the positions to send and the values there."""
        del state
        kept = kept_entries(rate, self.chunk)
        return [ctx.kernels.chunk_top_k(tensor, kept, self.chunk) for tensor in tensors]
