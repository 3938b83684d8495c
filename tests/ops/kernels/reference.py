"""Reference kernels in the simplest possible form."""

import numpy as np


def top_k(x, k):
    order = np.argsort(-np.abs(x), kind="stable")[:k]
    indices = np.sort(order[x[order] != 0])
    return indices, x[indices]


def hits(window, indices, size):
    asked = range(size) if indices is None else indices
    sets = [set(range(size)) if touched is None else set(touched.tolist()) for touched in window]
    return [sum(int(i) in touched for touched in sets) for i in asked]


def apply_sparse(theta, indices, values, rates):
    result = theta.copy()
    for i, value, rate in zip(indices, values, rates, strict=True):
        result[i] = np.float32(result[i] - np.float32(np.float32(rate) * value))
    return result


def bfloat16(values):
    import ml_dtypes

    largest = np.float32(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
    return np.clip(values, -largest, largest).astype(ml_dtypes.bfloat16)
