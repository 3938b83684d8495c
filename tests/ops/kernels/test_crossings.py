"""The count of copies between host and device notices a copy that it does not count."""

import numpy as np
import pytest

from bench.machine import crossings_elsewhere
from bench.machine.crossings import Counts
from tests.frameworks import kernels_of


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_copies_are_counted_and_stray_copies_are_errors(backend):
    kernels, counts = kernels_of(backend), Counts()
    crossings = crossings_elsewhere.Crossings(backend)
    array = kernels.joined([np.arange(1000, dtype=np.float32)])
    with crossings.counted(counts):
        indices, _ = kernels.top_k(array, 16)
    assert indices.size == 16
    # of each entry the position and the value, and how many entries there are
    assert 8 * 16 < counts.down <= 8 * 16 + 8 and counts.up <= 4
    with crossings.counted(counts):
        array[indices] = np.ones(16, np.float32)
    assert 8 * 16 <= counts.up <= 8 * 16 + 4
    for stray in (
        lambda: np.asarray(array.value),
        lambda: float(array.value[3]),
        lambda: array.value + kernels.joined([np.ones(1000)]).value * to_tensor(backend)[0],
    ):
        with pytest.raises(Exception, match="Disallowed|of <class"), crossings.counted(Counts()):
            stray()


def to_tensor(backend):
    if backend == "jax":
        import jax

        return jax.numpy.asarray(np.ones(1, np.float32))
    import torch

    return torch.from_numpy(np.ones(1, np.float32))
