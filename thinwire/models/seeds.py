"""Derives a different seed for each worker from the run's common seed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

_STATE = "seed_generator_state"  # Keras' name of the random state of Dropout and similar layers
_STEP, _NUM_SEEDS = 1_000_003, 2**31 - 1


def own_seed(seed: int, id_worker: int) -> int:
    """Return a worker's seed, derived from the common seed; worker 1 uses the common seed.

    >>> own_seed(7, 1), own_seed(7, 3)
    (7, 2000013)
    """
    return (seed + (id_worker - 1) * _STEP) % _NUM_SEEDS


def seed_apart(variables: Iterable[Any], id_worker: int) -> None:
    """Give a model's random layers seeds that differ between workers; worker 1 keeps its seeds.

    Args:
        variables: Variables of a model, of which only the states of random layers are changed.
        id_worker: Id of this worker, from 1 to nb_workers.
    """
    if id_worker == 1:
        return
    for variable in variables:
        if variable.name == _STATE:
            state = np.array(variable, np.int64)  # [2]: the layer's seed and its number of draws
            state[0] = own_seed(int(state[0]), id_worker)
            variable.assign(state)
