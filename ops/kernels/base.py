"""Interface of the kernels: one function for each array operation that policies need.

The kernels have four implementations: numpy functions, `tf.function`s, and functions of JAX and of
torch, which run on any device. A conformance test checks that the results are numpy's. With the
kernels of a framework, a codec's residuals (values not sent yet) are arrays on its device: a
`thinwire.ops.kernels.device.DeviceArray` of TensorFlow, or a
`thinwire.ops.kernels.framework_array.FrameworkArray` of JAX or torch. Gradients may be such arrays,
too. Residuals and gradients stay on the device, and selected entries are returned as numpy arrays.
An array on a device has the operators that codecs use, so codecs handle it like a numpy array.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from thinwire.ops.types import (
    Array,
    Bool,
    CodedValues,
    Float32,
    Generator,
    Int32,
    Int64,
    State,
    UInt8,
)

#: Selected gradient entries: ascending positions [m], and the values [m] at these positions.
Selected = tuple[Int64, Float32]
#: Selected gradient entries: positions [m], values [m], and the magnitude threshold for the next
#: selection.
SelectedWithThreshold = tuple[Int64, Float32, float]
#: Positions of the weights that a merged update changed; None means all weights.
HitSet = Int32 | Int64 | None


#: Function (residual, addend, k, factor, threshold) that does ``residual += factor * addend``, then
#: removes and returns the k largest entries.
SelectWithFeedback = Callable[[Float32, Float32, int, float, float], SelectedWithThreshold]
#: Function that applies a `SelectWithFeedback` function to several residuals, each with its own
#: addend, k, factor and threshold.
SelectOfEach = Callable[
    [Sequence[Float32], Sequence[Float32], Sequence[int], Sequence[float], Sequence[float]],
    list[SelectedWithThreshold],
]


@dataclasses.dataclass(frozen=True)
class Kernels:
    """One implementation of the kernels (array operations), in numpy or in a framework.

    The docstrings of the numpy functions document each kernel (array operation). The selection
    kernels are in `thinwire.ops.kernels.numpy_select` and `numpy_chunks`. The kernels for values
    quantized to few bits are in `few_bits`. All kernels except selection and few-bit quantization
    are in `thinwire.ops.kernels.numpy_ops`.

    Attributes:
        name: Name of the kernels' implementation: "numpy", "tf" (TensorFlow), "jax" or "torch".
        top_k: Function (x [n], k) -> positions and values of the k entries of largest magnitude.
        feedback_top_k: Adds an addend (new gradient) to a residual, then removes and returns the k
            entries of largest magnitude.
        feedback_of_each: Applies `feedback_top_k` to several residuals, with one addend (new
            gradient) for each residual.
        carried_top_k: Function (x [n], k, magnitude threshold of the previous step) -> about k of
            the largest entries, and the threshold for the next step.
        feedback_carried: Applies `carried_top_k` to the sum of a residual and an addend (new
            gradient).
        chunk_top_k: Function (x [n], k, entries per chunk) -> the k largest entries of each chunk.
        feedback_chunk_top_k: Applies `chunk_top_k` to the sum of a residual and an addend (new
            gradient).
        random_k: Function (n, k, random generator) -> k random positions below n.
        accumulate: Function (target, addend, factor, decay) that computes ``target = decay * target
            + factor * addend`` for arrays in place.
        zeros: Function (sizes) -> one array of zeros for each size, for a codec's state.
        joined: Function (arrays) -> one array with the entries of all arrays, in order.
        first_not_finite: Function (tensors) -> index of the first tensor with NaN or infinity, or
            None.
        norm: Function (x [n]) -> L2 norm of the array x.
        as_saved: Function (codec state) -> the codec state for a checkpoint, with numpy arrays
            only.
        as_kept: Function (saved codec state, fresh codec state) -> the saved state; it has arrays
            on the device where the fresh state has device arrays.
        quantise: Function (values [k], dtype) -> values coded in the dtype.
        quantise_chunks: Function (values [k], edges [c + 1] of chunks, dtype of few bits) -> (codes
            [k], scales [c, m] of the chunks).
        dequantise: Function (values coded by `quantise`) -> decoded float32 values [k].
        apply_sparse: Function (weights theta [n], indices [k], values [k], rate) that subtracts
            rate * values from theta at the indices, in place.
        apply_dense: Function (weights theta [n], values [n], rate) that subtracts rate * values
            from theta in place.
        scale: Function (values, rate) -> rate * values, with one rate or a rate for each value.
        hits: Function (sets of positions, one per update, indices or None for all, scratch [n]) ->
            sigma [k] int32, the number of updates that changed each entry.
        damp: Function (staleness sigma [k] of the weights) -> 1 / max(1, sigma) float32, a factor
            on the learning rate.
        compensate: Function (gradient values [k], weights theta [k], weights base [k], strength) ->
            gradient values corrected for the change of the weights from base to theta.
        adapt: Function (mean of squared gradients [k], gradient values [k], decay, strength) ->
            (next mean of squared gradients [k], strengths of the compensation for delay [k]).
        contribution: Function (values [size], entries per gradient block, averages [n], weight
            alpha of the averages) -> (new averages of the blocks' mean magnitudes [n], sums of
            magnitudes [n]).
        to_levels: Function (gradient blocks [m, e], bits) -> (quantization levels [m, e], lowest
            values [m], step widths [m]).
        best_first: Function (arrays with m scores of gradient blocks, classes [m]) -> positions of
            the scores, sorted by class, then by descending score.
        block_flags: Function (sums of the magnitudes of each gradient block [n]) -> (flags of sums
            that are not 0, flags of infinite or NaN sums).
        take_blocks: Function (values [size], block numbers [m], rows [m, e]) that copies m blocks
            of e gradient values each into rows.
        code_blocks: Function (values [size], block numbers [m], entries per block, bits) ->
            (quantization levels [m, e], lowest values [m], step widths [m], coding errors [size]).
        power_step: Function (matrix [rows * columns], Q [columns, rank]) -> (P [rows, rank], new Q)
            of PowerSGD, or None if the result leaves the range of float32.
        entries: Function (P [rows, rank], Q [columns, rank], first, size) -> `size` entries of P
            Q^T, from entry `first` on.
    """

    name: str
    top_k: Callable[[Float32, int], Selected]
    feedback_top_k: SelectWithFeedback
    feedback_of_each: SelectOfEach
    carried_top_k: Callable[[Float32, int, float], SelectedWithThreshold]
    feedback_carried: SelectWithFeedback
    chunk_top_k: Callable[[Float32, int, int], Selected]
    feedback_chunk_top_k: Callable[[Float32, Float32, int, int, float], Selected]
    random_k: Callable[[int, int, Generator], Int64]
    accumulate: Callable[[Float32, Float32, float, float], None]
    zeros: Callable[[Sequence[int]], list[Float32]]
    joined: Callable[[Sequence[Float32]], Float32]
    first_not_finite: Callable[[Sequence[Float32]], int | None]
    norm: Callable[[Float32], float]
    as_saved: Callable[[State], State]
    as_kept: Callable[[State, State], State]
    quantise: Callable[[Float32, str], CodedValues]
    quantise_chunks: Callable[[Float32, Int64, str], tuple[UInt8, Float32]]
    dequantise: Callable[[CodedValues], Float32]
    apply_sparse: Callable[[Float32, Int64, Float32, float | Float32], None]
    apply_dense: Callable[[Float32, Float32, float | Float32], None]
    scale: Callable[[Float32, float | Float32], Float32]
    hits: Callable[[Sequence[HitSet], Int64 | None, Array], Int32]
    damp: Callable[[Array], Float32]
    compensate: Callable[[Float32, Float32, Float32, float | Float32], Float32]
    adapt: Callable[[Float32, Float32, float, float], tuple[Float32, Float32]]
    contribution: Callable[[Float32, int, Float32, float], tuple[Float32, Float32]]
    to_levels: Callable[[Float32, int], tuple[Array, Float32, Float32]]
    best_first: Callable[[Sequence[Float32], UInt8], Int64]
    block_flags: Callable[[Float32], tuple[Bool, Bool]]
    take_blocks: Callable[[Array, Int64, Array], None]
    code_blocks: Callable[[Float32, Int64, int, int], tuple[Array, Float32, Float32, Float32]]
    power_step: Callable[[Float32, Float32], tuple[Float32, Float32] | None]
    entries: Callable[[Float32, Float32, int, int], Float32]

    @classmethod
    def of(cls, name: str, *owners: object) -> Kernels:
        """Return the kernels of an implementation: functions named as the fields of this class.

        Args:
            name: Name of the kernels' implementation.
            owners: Modules with the functions, or objects with methods. The first one that has a
                function counts.
        """
        fields = [field.name for field in dataclasses.fields(cls) if field.name != "name"]
        functions: dict[str, Any] = {}
        for owner in reversed(owners):
            functions |= {field: getattr(owner, field) for field in fields if hasattr(owner, field)}
        return cls(name, **functions)

    @property
    def has_device(self) -> bool:
        """True if arrays of these kernels may be in the memory of a device, such as a GPU."""
        return self.name != "numpy"

    def apply(
        self, theta: Float32, indices: Int64 | None, values: Float32, rate: float | Float32
    ) -> None:
        """Subtract ``rate * values`` in place from the weights at `indices` (None: from all)."""
        if indices is None:
            self.apply_dense(theta, values, rate)
        else:
            self.apply_sparse(theta, indices, values, rate)
