"""Random layers draw different numbers on each worker, and the same in each start of a worker."""

import keras
import numpy as np

from thinwire.models.seeds import own_seed, seed_apart


def drawn_on(id_worker):
    """Return a worker's Dropout outputs, twice."""
    layer = keras.layers.Dropout(0.5, seed=3)
    seed_apart([keras.Variable([3.0], name="kernel"), *layer.variables], id_worker)
    return [np.array(layer(np.ones(64, np.float32), training=True)).tolist() for _ in range(2)]


def test_worker_1_keeps_its_seeds_and_the_others_have_their_own():
    alone = keras.layers.Dropout(0.5, seed=3)
    first, second, third = (drawn_on(number) for number in (1, 2, 3))
    assert first[0] == np.array(alone(np.ones(64, np.float32), training=True)).tolist()
    assert len({str(each) for each in (*first, *second, *third)}) == 6
    assert second == drawn_on(2)
    assert 0 <= own_seed(2**31 - 2, 1000) < 2**31 - 1
