"""The rows of all workers in a step equal the batches that Keras makes on each worker."""

import numpy as np
import pytest
import tensorflow as tf

from tests.thinwire.script.data.places import batches, shared_by_all
from tests.thinwire.script.data.test_batches import Rows
from thinwire.ops.types import ConfigurationError


def numbers(total):
    return np.arange(total, dtype=np.float32)[:, None]


def dataset(total):
    return tf.data.Dataset.from_tensor_slices((numbers(total), numbers(total)))


DATA = {
    "arrays": lambda total, size: {"x": numbers(total), "batch_size": size, "shuffle": False},
    "shuffled": lambda total, size: {"x": numbers(total), "batch_size": size, "shuffle": True},
    "PyDataset": lambda total, size: {"x": Rows(total, size), "shuffle": False},
    "shuffled PyDataset": lambda total, size: {"x": Rows(total, size), "shuffle": True},
    "tf.data": lambda total, size: {"x": dataset(total).shuffle(9, seed=1).batch(size)},
    "tf.data, whole": lambda total, size: {
        "x": dataset(total).batch(size, drop_remainder=True).map(lambda x, y: (x, y))
    },
    "tf.data, repeated": lambda total, size: {
        "x": dataset(total // size * size).repeat(2).batch(size)
    },
}


#: Whole batches, a last one of fewer rows than workers, and others that are short.
SIZES = [(41, 8, 3), (40, 8, 3), (41, 8, 2), (47, 10, 3), (39, 8, 2)]


@pytest.mark.parametrize(
    ("total", "size", "num_workers", "name"),
    [
        (*SIZES[which], name)
        for number, name in enumerate(DATA)
        for which in (0, 1 + number % 4, *((3,) if number == 0 else ()))
    ],
)
def test_every_worker_knows_the_rows_of_each_step(name, total, size, num_workers):
    everyone = shared_by_all(DATA[name](total, size), num_workers)
    sizes = [[len(batch) for batch in batches(shared.arguments)] for shared in everyone]
    for shared, own in zip(everyone, sizes, strict=True):
        for step, rows in enumerate(own):
            together = sum(each[step] for each in sizes if step < len(each))
            assert shared.rounds.num_rows(step, rows) == together


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"x": numbers(42), "batch_size": 8, "steps_per_epoch": 9}, "are repeated"),
        ({"x": Rows(42, 8), "steps_per_epoch": 9}, "ends with a short batch"),
        ({"x": dataset(42).batch(8).repeat()}, "are repeated"),
        ({"x": dataset(40).filter(lambda x, y: True).batch(8)}, "is not known"),
        ({"x": dataset(40).batch(8).filter(lambda x, y: True)}, "is not known"),
    ],
    ids=["steps", "PyDataset", "repeat", "filter", "batches"],
)
def test_rows_that_cannot_be_known_are_refused(arguments, reason):
    for shared in shared_by_all(arguments, 2):
        with pytest.raises(ConfigurationError, match=reason):
            shared.rounds.num_rows(0, 4)


def test_a_batch_of_another_size_than_planned_is_refused():
    first, _ = shared_by_all({"x": numbers(40), "batch_size": 8}, 2)
    assert first.rounds.num_rows(0, 4) == 8
    with pytest.raises(ConfigurationError, match="step 0 of the epoch has 3 rows.*expected 4"):
        first.rounds.num_rows(0, 3)


def test_nothing_is_counted_where_batches_are_whole():
    for shared in shared_by_all({"x": numbers(40), "batch_size": 8}, 2, batch="worker"):
        assert shared.rounds is None


def test_workers_that_do_not_wait_have_as_many_rows_as_this_one():
    for shared in shared_by_all({"x": numbers(41), "batch_size": 8}, 2, False, batch="global"):
        assert [shared.rounds.num_rows(9, own) for own in (4, 1)] == [8, 2]


def test_the_rows_of_each_step_are_known_in_every_epoch():
    """The short batch comes in another step of each epoch that is shuffled."""
    everyone = shared_by_all({"x": Rows(45, 8), "shuffle": True}, 2)
    steps = set()
    for _ in range(4):
        data = [shared.arguments["x"] for shared in everyone]
        for each in data:
            each.on_epoch_begin()
        sizes = [[len(each[step][0]) for step in range(each.num_batches)] for each in data]
        for shared, own in zip(everyone, sizes, strict=True):
            for step, rows in enumerate(own):
                together = sum(each[step] for each in sizes if step < len(each))
                assert shared.rounds.num_rows(step, rows) == together
        steps.add(tuple(sizes[0]))
        for each in data:
            each.on_epoch_end()
    assert len(steps) > 1
