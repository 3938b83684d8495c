"""The kernels in numpy, by the names of the fields of `ops.kernels.Kernels`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ops.kernels import (
    accumulate,
    apply,
    arrays,
    compensate,
    contribution,
    levels,
    quantise,
    select,
    thresholds,
)

BODIES: dict[str, Callable[..., Any]] = {
    "top_k": select.top_k,
    "feedback_top_k": select.feedback_top_k,
    "sampled_top_k": thresholds.sampled_top_k,
    "carried_top_k": thresholds.carried_top_k,
    "feedback_carried": thresholds.feedback_carried,
    "random_k": select.random_k,
    "accumulate": accumulate.accumulate,
    "zeros": arrays.zeros,
    "joined": arrays.joined,
    "first_not_finite": arrays.first_not_finite,
    "norm": arrays.norm,
    "as_saved": arrays.as_saved,
    "as_kept": arrays.as_kept,
    "quantise": quantise.quantise,
    "dequantise": quantise.dequantise,
    "apply_sparse": apply.apply_sparse,
    "apply_dense": apply.apply_dense,
    "scale": apply.scale,
    "hits": apply.hits,
    "damp": apply.damp,
    "compensate": compensate.compensate,
    "adapt": compensate.adapt,
    "contribution": contribution.contribution,
    "to_levels": levels.to_levels,
}
