"""One `fit` per epoch: a new order each time, equal on all workers and after a restart."""

import dataclasses
import functools
import itertools
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.thinwire.script.data.places import batches, places
from tests.thinwire.script.keras.runs import scripts
from thinwire import distribute
from thinwire.script.data.data import share
from thinwire.script.data.fit_counts import FitCounts

TOTAL, BATCH, WORKERS = 96, 8, 2
ROWS = np.arange(TOTAL, dtype="float32")[:, None]


class Rows(keras.utils.PyDataset):
    """Batches of the rows in an order that is shuffled again at the end of each epoch."""

    def __init__(self, draw=lambda order: None):
        super().__init__()
        self.order, self.draw = np.arange(TOTAL), draw
        self.generator = np.random.default_rng(3)

    def __len__(self):
        return TOTAL // BATCH

    def __getitem__(self, index):
        part = self.order[index * BATCH : (index + 1) * BATCH]
        return ROWS[part], ROWS[part]

    def on_epoch_end(self):
        self.draw(self)


def sliced():
    return tf.data.Dataset.from_tensor_slices((ROWS, ROWS))


@functools.cache
def orders(given, num_fits=3, one_group=True, new_data=None):
    """Return, of each `fit`, the batches of every worker, as scripts call `fit` again and again.

    Args:
        given: Makes the arguments of `fit`, once for each worker.
        num_fits: How many.
        one_group: Whether all workers step together.
        new_data: Makes the arguments again before each `fit` but the first.
    """
    each_worker = [
        orders_of(place, given, num_fits, new_data=new_data) for place in places(WORKERS, one_group)
    ]
    return [list(of_fit) for of_fit in zip(*each_worker, strict=True)]


def orders_of(place, given, num_fits, behind=0, new_data=None):
    """Return one worker's batches of each `fit`; the first `behind` are not iterated over."""
    keras.utils.set_random_seed(5)  # as the launcher does in each process
    arguments, counts, made = given(), FitCounts(), []
    for number in range(num_fits):
        if number and new_data is not None:
            arguments = new_data()
        fit = counts.begin_fit(arguments["x"])
        shared = share(arguments, dataclasses.replace(place, fit=fit))
        made.append(batches(shared.arguments) if number >= behind else None)
    return made


def are_whole(of_fit):
    """Return whether the workers' rows are disjoint and complete."""
    rows = [row for worker in of_fit for batch in worker for row in batch]
    return sorted(rows) == list(range(TOTAL))


def whole_batches(of_fit):
    """Return the rows of all workers in each step."""
    return [sorted(itertools.chain(*parts)) for parts in zip(*of_fit, strict=True)]


ARRAYS = lambda: {"x": ROWS, "y": ROWS, "batch_size": BATCH, "shuffle": True}  # noqa: E731


def dataset(make):
    return lambda: {"x": make(sliced()), "y": None}


def py_dataset(shuffle=True, draw=lambda order: None):
    return lambda: {"x": Rows(draw), "y": None, "shuffle": shuffle}


def shuffled_by_numpy(rows):
    np.random.shuffle(rows.order)


def shuffled_by_own(rows):
    rows.generator.shuffle(rows.order)


DIFFERENT = {
    "arrays": ARRAYS,
    "tf.data, before the batches": dataset(lambda ds: ds.shuffle(TOTAL).batch(BATCH)),
    "tf.data, with a seed": dataset(lambda ds: ds.shuffle(TOTAL, seed=4).batch(BATCH)),
    "tf.data, batches": dataset(lambda ds: ds.batch(BATCH).shuffle(12, seed=4)),
    "tf.data, twice": dataset(lambda ds: ds.shuffle(TOTAL, seed=4).batch(BATCH).shuffle(6)),
    "tf.data, before windows": dataset(
        lambda ds: ds.shuffle(TOTAL, seed=4).batch(2).flat_map(lambda x, y: _slices(x, y)).batch(8)
    ),
    "tf.data, a part of a shuffle": dataset(
        lambda ds: ds.repeat(2).shuffle(TOTAL, seed=4).take(TOTAL).batch(BATCH)
    ),
    "PyDataset": py_dataset(),
    "PyDataset, NumPy's own numbers": py_dataset(False, shuffled_by_numpy),
    "PyDataset, its own generator": py_dataset(False, shuffled_by_own),
}
ALIKE = {
    "arrays as they are": lambda: ARRAYS() | {"shuffle": False},
    "tf.data, not reshuffled": dataset(
        lambda ds: ds.shuffle(TOTAL, 4, reshuffle_each_iteration=False).batch(BATCH)
    ),
    "tf.data, not reshuffled, without a seed": dataset(
        lambda ds: ds.shuffle(TOTAL, reshuffle_each_iteration=False).batch(BATCH)
    ),
    "tf.data, in a cache": dataset(lambda ds: ds.shuffle(TOTAL, seed=4).cache().batch(BATCH)),
    "PyDataset as it is": py_dataset(False),
}


def _slices(x, y):
    return tf.data.Dataset.from_tensor_slices((x, y))


@pytest.mark.parametrize("kind", DIFFERENT)
def test_each_fit_has_an_order_of_its_own(kind):
    made = orders(DIFFERENT[kind])
    check_orders(kind, made)
    # So have the script's batches, which the workers share.
    assert len({str(whole_batches(of_fit)) for of_fit in made}) == len(made)


#: One kind of data for each way of sharing among workers without barriers.
WITHOUT_ROUNDS = (
    "arrays",
    "tf.data, with a seed",
    "tf.data, batches",
    "tf.data, a part of a shuffle",
    "PyDataset",
)


@pytest.mark.parametrize("kind", WITHOUT_ROUNDS)
def test_so_it_has_where_workers_do_not_wait_for_each_other(kind):
    check_orders(kind, orders(DIFFERENT[kind], 2, one_group=False))


def check_orders(kind, made):
    assert kind.endswith("part of a shuffle") or all(are_whole(of_fit) for of_fit in made)
    assert len({str(of_fit) for of_fit in made}) == len(made)


@pytest.mark.parametrize("kind", ALIKE)
def test_where_alone_all_orders_are_alike_these_are(kind):
    made = orders(ALIKE[kind], 2)
    assert are_whole(made[0])
    if kind.endswith("as they are") or kind.endswith("as it is"):
        # The script's batches are alike; each fit deals their rows in another way.
        assert made[0] != made[1]
        made = [whole_batches(of_fit) for of_fit in made]
    assert made[0] == made[1]


@pytest.mark.parametrize("kind", [each for each in DIFFERENT if not each.startswith("PyDataset,")])
def test_a_worker_that_was_started_again_has_the_order_of_the_others(kind):
    """Except for a PyDataset that continues from its own stored order."""
    second = places(WORKERS)[1]
    restarted = orders_of(second, DIFFERENT[kind], 3, behind=2)
    assert restarted[2] == orders(DIFFERENT[kind])[2][1]


def test_another_dataset_with_the_same_seed_begins_alike_and_one_without_does_not():
    """TensorFlow's shuffles do so; the launcher seeds unseeded ones by place in the script."""
    seeded = dataset(lambda ds: ds.shuffle(TOTAL, seed=4).batch(BATCH))
    made = orders(seeded, 2, new_data=seeded)
    assert made[0] == made[1]
    unseeded = dataset(lambda ds: ds.shuffle(TOTAL).batch(BATCH))
    made = orders(unseeded, 3, new_data=unseeded)
    assert len({str(of_fit) for of_fit in made}) == 3


def test_what_is_gone_is_not_taken_for_what_came_into_its_place():
    counts = FitCounts()
    for number in range(20):
        data = Rows()
        is_there = weakref.ref(data)
        assert counts.begin_fit(data).uses == 0
        assert counts.begin_fit(data).before_data == 2 * number
        del data
        assert is_there() is None  # the next one may have its place in memory
    assert counts.use([1, 2]).before == 40


FEW = ROWS[:24]


class Notes(keras.Model):
    """Notes which rows each step has."""

    def __init__(self):
        super().__init__()
        self.layer, self.rows = keras.layers.Dense(1), []

    def call(self, inputs):
        return self.layer(inputs / TOTAL)

    def train_step(self, data):
        self.rows += [int(row) for row in data[0][:, 0]]
        return super().train_step(data)


def noting(place):
    model = Notes()
    model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
    model(ROWS[:1])
    return place(model)


def rows_of_fit(model, **epochs):
    model.rows = []
    model.fit(FEW, FEW, batch_size=BATCH, verbose=0, **epochs)
    return model.rows[-len(FEW) // WORKERS :]  # without the step that is tried first


def test_scripts_that_fit_once_for_each_epoch_see_other_orders(tmp_path):
    """By `fit` again, with initial_epoch, and with another model each time."""

    def script(given):
        model = noting(lambda each: distribute(each, given))
        made = [rows_of_fit(model, epochs=1) for _ in range(2)]
        made += [rows_of_fit(model, epochs=turn + 1, initial_epoch=turn) for turn in range(2)]
        others = [noting(lambda each: distribute(each, given)) for _ in range(2)]
        return made + [rows_of_fit(other, epochs=1) for other in others]

    with scripts(tmp_path, "bsp", WORKERS) as run:
        first, second = run.each(script)
    for mine, theirs in zip(first, second, strict=True):
        assert sorted(mine + theirs) == list(range(len(FEW)))
    assert all(len({str(of_fit) for of_fit in made}) == 6 for made in (first, second))
