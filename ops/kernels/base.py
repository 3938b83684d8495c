"""The interface of the kernels: the array work of the policies, one function each.

Two implementations, numpy and `tf.function`s that run on any device; a conformance test holds them
equal. With TensorFlow's kernels a codec's residuals are `thinwire.ops.kernels.device.DeviceArray`s,
and gradients may be: both stay on the device, and what is selected comes back as numpy arrays. To
a codec a DeviceArray is an array: it has the operators that codecs use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from thinwire.ops.types import CodedValues, State

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from thinwire.ops.types import Float32, Int64

    #: Ascending positions [m], and the values there [m].
    Selected = tuple[Int64, Float32]
    #: The same, and a magnitude to begin with next time.
    SelectedWithThreshold = tuple[Int64, Float32, float]
    #: The positions that a release hit; None: all.
    HitSet = NDArray[np.integer] | None


class SelectWithFeedback(Protocol):
    """Selection from a residual plus an addend."""

    def __call__(
        self,
        residual: Float32,
        addend: Float32,
        k: int,
        factor: float = 1.0,
        threshold: float = 0.0,
        /,
    ) -> SelectedWithThreshold:
        """Do ``residual += factor * addend``, take the selected entries out, return them."""


class SelectOfEach(Protocol):
    """Selection from each of several residuals plus their addends."""

    def __call__(
        self,
        residuals: Sequence[Float32],
        addends: Sequence[Float32],
        counts: Sequence[int],
        factors: Sequence[float],
        hints: Sequence[float],
        /,
    ) -> list[SelectedWithThreshold]:
        """Do what the function for one residual does with each."""


class SelectOfChunks(Protocol):
    """Selection from each chunk of a residual plus an addend."""

    def __call__(
        self, residual: Float32, addend: Float32, k: int, chunk: int, factor: float = 1.0, /
    ) -> Selected:
        """Do ``residual += factor * addend``, take the selected entries out, return them."""


class Accumulate(Protocol):
    """Adding to an array in place."""

    def __call__(
        self, target: Float32, addend: Float32, factor: float = 1.0, decay: float = 1.0, /
    ) -> None:
        """Do ``target = decay * target + factor * addend`` in place."""


@dataclasses.dataclass(frozen=True)
class Kernels:
    """One implementation; each function is documented where numpy implements it.

    Selection is in `thinwire.ops.kernels.numpy_select` and `numpy_chunks`, values of few bits are
    in `few_bits`, the rest in `thinwire.ops.kernels.numpy_ops`.

    Attributes:
        name: "numpy" or "tf".
        top_k: (x [n], k).
        feedback_top_k: The k largest of a residual plus an addend, exactly.
        feedback_of_each: The same of several residuals plus their addends.
        carried_top_k: (x [n], k, threshold of the step before).
        feedback_carried: `carried_top_k` of a residual plus an addend.
        chunk_top_k: (x [n], k, entries of a chunk).
        feedback_chunk_top_k: The k largest of each chunk of a residual plus an addend.
        random_k: (n, k, rng) -> positions.
        accumulate: Adds to an array in place.
        zeros: (sizes) -> arrays for a codec's state.
        joined: (arrays) -> one array of all their entries.
        first_not_finite: (tensors) -> the number of the first with NaN or infinity, or None.
        norm: (x [n]) -> its L2 norm.
        as_saved: (state) -> the state with numpy arrays alone.
        as_kept: (saved, fresh state) -> the state, its arrays where those of the fresh one are.
        quantise: (values [k], dtype) -> coded values.
        quantise_chunks: (values [k], edges [c + 1], dtype of few bits) -> (codes [k], scales
            [c, m]).
        dequantise: (coded values) -> values [k].
        apply_sparse: (theta [n] in place, indices, values, rate).
        apply_dense: (theta [n] in place, values [n], rate).
        scale: (values, rate) -> rate * values.
        hits: (window, indices or None for all, scratch [n]) -> sigma [k] int32.
        damp: (sigma [k]) -> 1 / max(1, sigma) float32.
        compensate: (values [k], theta [k], base [k], strength) -> values carried on to theta.
        adapt: (mean square [k], values [k], decay, strength) -> (mean square, strengths [k]).
        contribution: (values [size], block entries, averages [n], alpha) -> (averages, sums of
            magnitudes).
        to_levels: (rows [m, e], bits) -> (levels [m, e], lows [m], steps [m]).
        best_first: (parts of scores [m], order of classes [m]) -> positions by class and score.
        block_flags: (sums [n]) -> (which are not 0, which are not finite).
        take_blocks: (values [size], numbers [m], rows [m, e] to be filled).
        code_blocks: (values [size], numbers [m], block entries, bits) -> (levels [m, e], lows [m],
            steps [m], errors [size]).
        power_step: (matrix [rows * columns], Q [columns, rank]) -> (P [rows, rank], Q), or None.
        entries: (P [rows, rank], Q [columns, rank], first, size) -> entries of P Q^T [size].
    """

    name: str
    top_k: Callable[[Float32, int], Selected]
    feedback_top_k: SelectWithFeedback
    feedback_of_each: SelectOfEach
    carried_top_k: Callable[[Float32, int, float], SelectedWithThreshold]
    feedback_carried: SelectWithFeedback
    chunk_top_k: Callable[[Float32, int, int], Selected]
    feedback_chunk_top_k: SelectOfChunks
    random_k: Callable[[int, int, np.random.Generator], Int64]
    accumulate: Accumulate
    zeros: Callable[[Sequence[int]], list[Float32]]
    joined: Callable[[Sequence[Float32]], Float32]
    first_not_finite: Callable[[Sequence[Float32]], int | None]
    norm: Callable[[Float32], float]
    as_saved: Callable[[State], State]
    as_kept: Callable[[State, State], State]
    quantise: Callable[[Float32, str], CodedValues]
    quantise_chunks: Callable[[Float32, Int64, str], tuple[NDArray[np.uint8], Float32]]
    dequantise: Callable[[CodedValues], Float32]
    apply_sparse: Callable[[Float32, Int64, Float32, float | Float32], None]
    apply_dense: Callable[[Float32, Float32, float | Float32], None]
    scale: Callable[[Float32, float | Float32], Float32]
    hits: Callable[[Sequence[HitSet], Int64 | None, NDArray[np.integer]], NDArray[np.int32]]
    damp: Callable[[NDArray[np.integer]], Float32]
    compensate: Callable[[Float32, Float32, Float32, float | Float32], Float32]
    adapt: Callable[[Float32, Float32, float, float], tuple[Float32, Float32]]
    contribution: Callable[[Float32, int, Float32, float], tuple[Float32, Float32]]
    to_levels: Callable[[Float32, int], tuple[NDArray[np.integer], Float32, Float32]]
    best_first: Callable[[Sequence[Float32], NDArray[np.uint8]], Int64]
    block_flags: Callable[[Float32], tuple[NDArray[np.bool_], NDArray[np.bool_]]]
    take_blocks: Callable[[NDArray[Any], Int64, NDArray[Any]], None]
    code_blocks: Callable[
        [Float32, Int64, int, int], tuple[NDArray[np.integer], Float32, Float32, Float32]
    ]
    power_step: Callable[[Float32, Float32], tuple[Float32, Float32] | None]
    entries: Callable[[Float32, Float32, int, int], Float32]

    def apply(
        self, theta: Float32, indices: Int64 | None, values: Float32, rate: float | Float32
    ) -> None:
        """Subtract ``rate * values`` from `theta` [n] in place, where `indices` are; None: all."""
        if indices is None:
            self.apply_dense(theta, values, rate)
        else:
            self.apply_sparse(theta, indices, values, rate)
