"""Workers that draw other numbers than each other in `fit`, and the same before and after."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.thinwire.sharing.places import places, shared_by_all
from thinwire.sharing.randomness import own_randomness


class Recorder(keras.Model):
    """Records the rows of each batch, and what it draws for them."""

    def __init__(self):
        super().__init__()
        self.rows, self.draws = [], []

    def train_step(self, data):
        x, _, _ = keras.utils.unpack_x_y_sample_weight(data)
        drawn = tf.random.normal([3]), keras.random.normal([3])
        tf.py_function(self.record, [x[:, 0], *drawn], [])
        return {"loss": tf.zeros([])}

    def record(self, rows, *drawn):
        self.rows.append(rows.numpy().tolist())
        self.draws.append([each.numpy().tolist() for each in drawn])


def begin():
    """Be as a process that the launcher has just started."""
    keras.utils.clear_session()
    keras.utils.set_random_seed(3)


def run(worker, num_workers, epochs=2):
    """Return the model of one worker of a run, and what the script draws after its `fit`."""
    begin()
    model = Recorder()
    model.compile()
    given = {"x": np.arange(24.0)[:, None], "batch_size": 8, "shuffle": True}
    arguments = shared_by_all(given, num_workers)[worker - 1].arguments
    with own_randomness(places(num_workers)[worker - 1]):
        model.fit(**arguments, epochs=epochs, verbose=0)
    after = np.random.rand(), tf.random.uniform([]).numpy(), keras.random.uniform([]).numpy()
    return model, after


def test_one_worker_draws_what_the_script_alone_does():
    begin()
    alone = Recorder()
    alone.compile()
    alone.fit(x=np.arange(24.0)[:, None], batch_size=8, epochs=2, verbose=0)
    only, _ = run(1, 1)
    assert (only.rows, only.draws) == (alone.rows, alone.draws)


def test_workers_draw_other_numbers_in_fit_and_the_same_after_it():
    (first, after_first), (second, after_second) = run(1, 2), run(2, 2)
    for kind in range(2):
        drawn = [draws[kind] for model in (first, second) for draws in model.draws]
        assert len({str(each) for each in drawn}) == len(drawn)
    assert after_first == after_second


def test_random_numbers_agree_again_where_fit_fails():
    begin()
    with pytest.raises(KeyError), own_randomness(places(2)[1]):
        raise KeyError
    drawn = tf.random.uniform([]).numpy()
    begin()
    assert tf.random.uniform([]).numpy() == drawn
