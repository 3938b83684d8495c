"""The array work of the policies: select, quantise, apply, count hits.

One interface, two bodies: numpy, and `tf.function`s that run on any device. A conformance test
holds them equal. `bench/kernels.py` shows numpy ahead on CPU, so that is what "auto" takes there.

With the TensorFlow bodies a codec's residuals are `thinwire.ops.kernels.device.DeviceArray`s, and
gradients may be: both stay on the device, and what is selected comes back as numpy arrays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from thinwire.ops.types import ConfigurationError

KERNEL_CHOICES = ("auto", "tf", "numpy")


@dataclasses.dataclass(frozen=True)
class Kernels:
    """One set of bodies; each function is documented at its numpy body.

    Attributes:
        name: "numpy" or "tf".
        top_k: (x [n], k) -> (indices, values). See `thinwire.ops.kernels.numpy_select.top_k`.
        feedback_top_k: (residual [n] in place, addend [n], k, factor, hint) -> (indices, values,
            next hint).
        sampled_top_k: (x [n], k, rng) -> (indices, values). See
        `thinwire.ops.kernels.numpy_select`. carried_top_k: (x [n], k, threshold) -> (indices,
        values, next threshold). feedback_carried: (residual [n] in place, addend [n], k, factor,
        threshold) -> the same. random_k: (n, k, rng) -> indices.
        accumulate: (target [n] in place, addend [n], factor, decay). See
        `thinwire.ops.kernels.numpy_select`. zeros: (sizes) -> arrays for a codec's state. See
        `thinwire.ops.kernels.numpy_ops`. joined: (tensors) -> [n], one after the other.
        first_not_finite: (tensors) -> the number of the first with NaN or infinity, or None.
        norm: (x [n]) -> its L2 norm.
        as_saved: (state) -> the state with numpy arrays alone.
        as_kept: (saved, fresh state) -> the state, its arrays where those of the fresh one are.
        quantise: (values [k], dtype) -> CodedValues. See `thinwire.ops.kernels.numpy_ops`.
        dequantise: (CodedValues) -> values [k].
        apply_sparse: (theta [n] in place, indices, values, rate). See
        `thinwire.ops.kernels.numpy_ops`. apply_dense: (theta [n] in place, values [n], rate).
        scale: (values, rate) -> rate * values.
        hits: (window, indices, scratch [n]) -> sigma [k] int32.
        damp: (sigma) -> 1 / max(1, sigma) float32.
        compensate: (values [k], theta [k], base [k], strength) -> values carried on to theta.
            See `thinwire.ops.kernels.numpy_ops`.
        adapt: (mean square [k], values [k], decay, strength) -> (mean square, strengths [k]).
        contribution: (values [size], block entries, averages [n], alpha) -> (averages, sums of
            magnitudes). See `thinwire.ops.kernels.numpy_ops`.
        to_levels: (rows [m, e], bits) -> (levels [m, e], lows [m], steps [m]). See
            `thinwire.ops.kernels.numpy_ops`.
    """

    name: str
    top_k: Callable[..., Any]
    feedback_top_k: Callable[..., Any]
    sampled_top_k: Callable[..., Any]
    carried_top_k: Callable[..., Any]
    feedback_carried: Callable[..., Any]
    random_k: Callable[..., Any]
    accumulate: Callable[..., None]
    zeros: Callable[..., Any]
    joined: Callable[..., Any]
    first_not_finite: Callable[..., int | None]
    norm: Callable[..., float]
    as_saved: Callable[..., Any]
    as_kept: Callable[..., Any]
    quantise: Callable[..., Any]
    dequantise: Callable[..., Any]
    apply_sparse: Callable[..., None]
    apply_dense: Callable[..., None]
    scale: Callable[..., Any]
    hits: Callable[..., Any]
    damp: Callable[..., Any]
    compensate: Callable[..., Any]
    adapt: Callable[..., Any]
    contribution: Callable[..., Any]
    to_levels: Callable[..., Any]


def load_kernels(choice: str, on_gpu: bool = False) -> Kernels:
    """Return the bodies for a value of --kernels.

    Args:
        choice: auto, tf or numpy. TensorFlow is imported only if its bodies are taken.
        on_gpu: Whether the tensors live on a GPU; there auto means tf.

    Raises:
        ConfigurationError: Another choice.
    """
    if choice not in KERNEL_CHOICES:
        raise ConfigurationError(
            f"--kernels={choice!r}: expected one of {', '.join(KERNEL_CHOICES)}."
        )
    from thinwire.ops.kernels import numpy_ops

    _keep_freed_memory()
    bodies = Kernels(name="numpy", **numpy_ops.BODIES)
    if choice == "numpy" or (choice == "auto" and not on_gpu):
        return bodies
    from thinwire.ops.kernels import tensorflow_ops

    return dataclasses.replace(bodies, name="tf", **tensorflow_ops.BODIES)


def _keep_freed_memory() -> None:
    """Have temporary arrays reuse memory instead of asking the system for it again and again.

    The GNU C library hands blocks back, so that each new one is filled in page by page: of 25 M
    entries selecting 1 % took a third longer for it. It stops doing so for blocks up to the largest
    of at most 32 MiB that was ever freed, and keeps twice that much. The block here is never
    touched, so takes no memory; elsewhere this does nothing.
    """
    import numpy as np

    np.empty(31 << 20, np.uint8)
