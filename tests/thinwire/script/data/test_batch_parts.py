"""The batch fractions that workers count add up to the batches of the script alone."""

import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import assume, example, given
from hypothesis import strategies as st

from tests.thinwire.script.data.places import batches, places, shared_by_all
from thinwire.ops.types import ConfigurationError
from thinwire.script.data.place import BatchParts

NUMBERS = st.integers(1, 5)


def steps_of(shared):
    """Return the mini-batches of a worker's pass."""
    return len(batches(shared.arguments))


def pass_of(parts, num_steps):
    return [parts.of_step(step) for step in range(num_steps)]


def alone(rows, size, drops=False):
    return rows // size if drops else -(-rows // size)


@given(st.integers(1, 100), st.integers(1, 20), NUMBERS, st.booleans(), st.booleans())
@example(70, 32, 2, False, False)  # 6 rows are left: one batch, which two workers share
def test_a_pass_over_rows_counts_the_batches_of_the_script(rows, size, workers, divides, drops):
    assume(size >= workers or not divides)
    found = places(workers, one_group=divides, batch="global" if divides else "worker")
    dealt = found[0].dealt_rows(rows, found[0].run_batch(size))
    own = [place.part_of_batch(size) for place in found]
    steps = [alone(number, part, drops) for number, part in zip(dealt, own, strict=True)]
    assume(sum(steps))
    parts = [BatchParts.of_rows(place, size, dealt, drops) for place in found]
    counted = [pass_of(*each) for each in zip(parts, steps, strict=True)]
    assert sum(map(sum, counted)) == workers * alone(rows, size, drops)
    if divides and not drops:  # and so is each round: the last one of the workers with rows in it
        rounds = [sum(each) for each in itertools.zip_longest(*counted, fillvalue=0)]
        assert rounds == [workers] * len(rounds)
    again = [pass_of(each, 2 * number) for each, number in zip(parts, steps, strict=True)]
    assert again == [each + each for each in counted]


def test_the_last_mini_batches_of_a_pass_share_what_the_script_has_left():
    """7 rows of batches of 10 are left for three workers: one batch, so a part of each."""
    parts = [BatchParts.of_rows(p, 10, [13, 12, 12], False) for p in places(3, one_group=False)]
    assert [pass_of(each, 2) for each in parts] == [[3, 1], [3, 1], [3, 1]]
    parts = [BatchParts.of_rows(p, 10, [11, 10, 10], False) for p in places(3, one_group=False)]
    assert [pass_of(parts[0], 2), pass_of(parts[1], 1)] == [[3, 3], [3]]


@given(st.integers(1, 40), NUMBERS, st.booleans())
def test_given_steps_count_as_many_batches(num_steps, workers, one_group):
    found = places(workers, one_group=one_group, batch="worker")
    parts = [BatchParts.of_steps(place, num_steps) for place in found]
    counted = [
        pass_of(each, place.steps(num_steps)) for each, place in zip(parts, found, strict=True)
    ]
    assert sum(map(sum, counted)) == workers * num_steps or num_steps < workers


def test_parts_that_differ_much_in_size_count_alike():
    """No last mini-batch may stand for many batches: a PS rejects this claim."""
    for rows in ([1000, 1], [5, 900], [0, 30]):
        for place in places(2, one_group=True, batch="global"):
            parts = BatchParts.of_rows(place, 3, rows)
            assert 0 <= parts.last <= 4 and parts.each == 1


ROWS = np.arange(50)


def dataset():
    return tf.data.Dataset.from_tensor_slices(ROWS)


class Batches(keras.utils.PyDataset):
    """Five batches; the last one has one row."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return ROWS[12 * index : 12 * index + 12 if index < 4 else 49]


FORMS = {
    "arrays": (lambda: {"x": ROWS, "batch_size": 12}, 5),
    "dirichlet": (lambda: {"x": ROWS, "y": ROWS % 3, "batch_size": 12}, 5),
    "dataset": (lambda: {"x": dataset().batch(12)}, 5),
    "rest dropped": (lambda: {"x": dataset().batch(12, drop_remainder=True)}, 4),
    "repeated rows": (lambda: {"x": dataset().repeat(2).batch(12)}, 9),
    "shuffled before": (lambda: {"x": dataset().shuffle(9, seed=1).repeat(2).batch(12)}, 9),
    "repeated batches": (lambda: {"x": dataset().batch(12).repeat(2)}, 10),
    "PyDataset": (lambda: {"x": Batches()}, 5),
}


@pytest.mark.parametrize("divides", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_an_epoch_counts_the_batches_of_the_script(form, divides):
    make, number = FORMS[form]
    partition = "dirichlet" if form == "dirichlet" and not divides else "iid"
    batch = "global" if divides else "worker"
    for workers in (2, 3) if divides else (1, 3):
        if divides and workers == 3 and form == "repeated batches":  # the fifth batch has two rows
            with pytest.raises(ConfigurationError, match="2 rows.*3 workers"):
                shared_by_all(make(), workers, divides, partition, batch=batch)
            continue
        shared = shared_by_all(make(), workers, divides, partition, batch=batch)
        counted = [pass_of(each.parts, steps_of(each)) for each in shared]
        assert sum(map(sum, counted)) == workers * number, counted


def test_where_rows_are_not_known_all_mini_batches_are_alike():
    data = dataset().batch(12).filter(lambda rows: tf.reduce_sum(rows) > 0)
    endless = {"x": dataset().repeat().batch(12), "steps_per_epoch": 7}
    for arguments, place in ((endless, True), ({"x": data}, False)):
        shared = shared_by_all(arguments, 2, place)
        assert {pass_of(each.parts, 20)[k] for each in shared for k in range(19)} == {2 - place}
    alone_each = shared_by_all({"x": ROWS, "batch_size": 12}, 2, False, shard="off")
    assert [each.parts for each in alone_each] == [BatchParts(2)] * 2


@pytest.mark.parametrize(("workers", "num_steps"), [(2, 1), (2, 2), (3, 1), (2, 9)])
def test_steps_of_all_data_that_the_script_divides_count_alike(workers, num_steps):
    """With shard=off, steps of a dataset advance schedules as far as steps of arrays do."""
    for arguments in ({"x": ROWS, "batch_size": 2}, {"x": dataset().batch(2)}):
        given = arguments | {"steps_per_epoch": num_steps}
        shared = shared_by_all(given, workers, False, shard="off")
        counted = [pass_of(each.parts, num_steps) for each in shared]
        assert counted == [[workers] * num_steps] * workers
