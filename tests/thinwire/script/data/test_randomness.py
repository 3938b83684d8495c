"""Workers draw different random numbers within `fit`, and equal ones before and after."""

import contextlib
import random

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras.src.random import seed_generator

from tests.thinwire.script.data.places import places, shared_by_all
from thinwire.script.data.randomness import own_randomness


class Recorder(keras.Model):
    """Records the rows of each batch, and its random draws for them."""

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
    keras.utils.clear_session(free_memory=False)  # a collection of garbage takes a second
    keras.utils.set_random_seed(3)


def run(worker, num_workers, epochs=2):
    """Return the model of one worker of a run, and the script's draws after its `fit`."""
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


class Ones(keras.utils.PyDataset):
    """Three batches of 8 rows."""

    def __init__(self):
        super().__init__()

    def __len__(self):
        return 3

    def __getitem__(self, index):
        return np.ones((8, 1)), np.ones((8, 1))


def two_models(seed, data, place=None):
    """Return the initial weights of a model, and of one behind its `fit`, and further numbers."""
    keras.utils.clear_session(free_memory=False)
    seed(3)

    def new():
        layers = [keras.layers.Dense(2), keras.layers.Dropout(0.5), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((1,)), *layers])
        model.compile("sgd", "mse")
        return model, [each.numpy().tolist() for each in model.variables if each.trainable]

    model, first = new()
    if place is None:
        model.fit(**data(), verbose=0)
    else:
        shared = shared_by_all(data(), place.num_workers)[place.worker - 1].arguments
        with own_randomness(place):
            model.fit(**shared, verbose=0)
    return first, new()[1], random.random(), keras.random.normal([2]).numpy().tolist()


@pytest.mark.parametrize(
    ("seed", "data"),
    [
        (keras.utils.set_random_seed, lambda: {"x": np.ones((24, 1)), "y": np.ones((24, 1))}),
        (random.seed, lambda: {"x": Ones()}),
    ],
    ids=["arrays", "PyDataset"],
)
def test_a_model_built_after_a_fit_begins_as_alone(seed, data):
    """Keras draws initial weights by Python's random, which nothing else may draw from."""
    alone = two_models(seed, data)
    for place in places(2):
        assert two_models(seed, data, place) == alone


def test_a_script_whose_fit_draws_nothing_draws_behind_it_as_alone():
    def drawn(fit):
        begin()
        keras.random.normal([2])  # makes the generator that a fit changes
        with fit:
            pass
        return keras.random.normal([2]).numpy().tolist()

    alone = drawn(contextlib.nullcontext())
    for place in places(2):
        assert drawn(own_randomness(place)) == alone


def test_a_generator_that_keras_makes_within_fit_differs_by_worker():
    """Alone its seed is drawn by Python's random where something first needs it."""

    def drawn(place):
        begin()
        random.random()
        with own_randomness(place):
            in_fit = keras.random.normal([2]).numpy().tolist()
        return in_fit, random.random(), keras.random.normal([2]).numpy().tolist()

    begin()
    random.random()
    alone = keras.random.normal([2]).numpy().tolist(), random.random()
    first, second = (drawn(place) for place in places(2))
    assert first[:2] == alone
    assert second[0] != first[0]
    assert first[1:] == second[1:]


def test_a_fit_that_draws_nothing_leaves_the_generator_where_it_was():
    """The script then builds its next model as it would alone."""
    keras.utils.set_random_seed(3)
    keras.random.uniform((2,))
    generator = seed_generator.global_seed_generator()
    before = generator.state.numpy()
    for place in places(2):
        with own_randomness(place):
            pass
        np.testing.assert_array_equal(generator.state.numpy(), before)
        with own_randomness(place):
            keras.random.uniform((2,))
        assert np.any(generator.state.numpy() != before)
        generator.state.assign(before)
