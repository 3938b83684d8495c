"""What a worker draws at random during `fit`: something else than the others."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
from keras.src.random.seed_generator import global_seed_generator
from tensorflow.python.eager import context

from thinwire.models.seeds import own_seed
from thinwire.sharing.place import WorkerPlace


@contextlib.contextmanager
def own_randomness(place: WorkerPlace) -> Iterator[None]:
    """Let random ops draw other numbers than on the other workers.

    The launcher seeds all workers alike, so that a script's own draws agree. Within `fit` that
    would give each worker the same noise. Worker 1 draws what the script alone would. Afterwards
    all workers agree again. The seeds of a model's layers are not among these.

    Args:
        place: This worker's.
    """
    if place.num_workers == 1:
        yield
        return
    number, common = place.worker - 1, global_seed_generator().state
    tensorflow, seed = context.context(), context.global_seed()
    before = common.numpy()
    common.assign(before + np.uint32(number))
    if seed is not None:  # what is traced in `fit` takes its seeds from it
        tensorflow._seed = own_seed(seed, place.worker)
    try:
        yield
    finally:
        tensorflow._seed = seed
        # How often each worker drew from it may differ. The seeds that the others had in this
        # `fit` are left out: no worker draws in the next one what another has drawn in this.
        common.assign(before + np.uint32(place.num_workers))
