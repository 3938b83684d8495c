"""Seeds that differ from worker to worker, where all scripts and roles are seeded alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

_STATE = "seed_generator_state"  # Keras' name of what Dropout and the like draw by
_STEP, _NUM_SEEDS = 1_000_003, 2**31 - 1


def own_seed(seed: int, id_worker: int) -> int:
    """Return a worker's seed; worker 1 has the common one.

    >>> own_seed(7, 1), own_seed(7, 3)
    (7, 2000013)
    """
    return (seed + (id_worker - 1) * _STEP) % _NUM_SEEDS


def seed_apart(variables: Iterable[Any], id_worker: int) -> None:
    """Let random layers draw otherwise than on the other workers; worker 1 keeps its seeds.

    Args:
        variables: Of a model; others than seeds stay as they are.
        id_worker: This worker, 1..nb_workers.
    """
    if id_worker == 1:
        return
    for variable in variables:
        if variable.name == _STATE:
            state = np.array(variable, np.int64)  # the seed, and how often it was drawn from
            state[0] = own_seed(int(state[0]), id_worker)
            variable.assign(state)
