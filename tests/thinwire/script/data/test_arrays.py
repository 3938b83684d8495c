"""Sharing the arrays of a `fit` among workers."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.thinwire.script.data.places import batches, shared_by_all
from thinwire.ops.types import ConfigurationError

#: Rows, workers and batch size.
SIZES = st.tuples(st.integers(2, 70), st.integers(1, 3), st.integers(1, 40))


@settings(max_examples=6, deadline=None)
@example((13, 3, 6))  # the last batch has fewer rows than there are workers
@example((5, 5, 40))
@given(SIZES)
def test_one_groups_batches_are_together_the_scripts(sizes):
    total, num_workers, batch_size = sizes
    if total < num_workers or batch_size < num_workers:
        return
    x = np.arange(total)[:, None]
    given_ = {"x": x, "y": x, "batch_size": batch_size, "shuffle": False}
    alone = batches(given_)
    shares = shared_by_all(given_, num_workers)
    everyone = [batches(shared.arguments) for shared in shares]
    for number, whole in enumerate(alone):
        mine = [rows[number] for rows in everyone if number < len(rows)]
        assert sorted(row for rows in mine for row in rows) == whole
        assert max(map(len, mine)) - min(map(len, mine)) <= 1
    longest = max(map(len, everyone))
    assert longest == len(alone)
    assert [longest - len(rows) for rows in everyone] == [shared.short_by for shared in shares]


@settings(max_examples=4, deadline=None)
@example((20, 3, 7), True, "iid", "global", True)
@example((20, 3, 7), False, "class", None, "batch")
@example((20, 3, 7), False, "contiguous", "worker", False)
@given(
    SIZES,
    st.booleans(),
    st.sampled_from(("iid", "contiguous", "class", "dirichlet")),
    st.sampled_from(("global", "worker", None)),
    st.sampled_from((True, False, "batch")),
)
def test_parts_are_disjoint_and_complete(sizes, one_group, partition, batch, shuffle):
    total, num_workers, batch_size = sizes
    y = np.arange(total) % 3
    given_ = {"x": np.arange(total), "y": y, "batch_size": batch_size, "shuffle": shuffle}
    try:
        everyone = shared_by_all(given_, num_workers, one_group, partition, batch=batch)
    except ConfigurationError as error:
        assert str(num_workers) in str(error) or partition == "dirichlet"
        return
    for _ in range(2):
        rows = [batches(shared.arguments) for shared in everyone]
        assert all(rows), "a part is empty"
        seen = sorted(row for mine in rows for batch_ in mine for row in batch_)
        assert seen == list(range(total))
    for shared, mine in zip(everyone, rows, strict=True):
        assert all(len(batch_) == len(mine[0]) for batch_ in mine[:-1])
        assert (shared.batch_size, shared.num_examples) == (batch_size, total)
        for x, labels in shared.arguments["x"] if num_workers > 1 else ():
            np.testing.assert_array_equal(labels, y[x])


def sizes_of_batches(everyone):
    return [len(batches(shared.arguments)[0]) for shared in everyone]


def test_a_batch_is_cut_as_evenly_as_it_goes():
    given_ = {"x": np.zeros((320, 2)), "y": np.zeros(320), "shuffle": False}
    everyone = shared_by_all(given_, 3)
    assert sizes_of_batches(everyone) == [11, 11, 10]
    assert [shared.batch_size for shared in everyone] == [32, 32, 32]
    assert [shared.short_by for shared in everyone] == [0, 0, 0]
    assert sizes_of_batches(shared_by_all(given_, 3, one_group=False)) == [32] * 3
    asked = shared_by_all(given_, 3, one_group=False, batch="global")
    assert sizes_of_batches(asked) == [11, 11, 10]
    assert sizes_of_batches(shared_by_all(given_, 3, batch="worker")) == [32] * 3


def test_batches_smaller_than_the_number_of_workers_are_refused():
    given_ = {"x": np.zeros(8), "batch_size": 1, "shuffle": False}
    with pytest.raises(ConfigurationError, match=r"batch of 1 .* 2 workers.*--batch=worker"):
        shared_by_all(given_, 2)
    steps = [len(batches(s.arguments)) for s in shared_by_all(given_, 2, batch="worker")]
    assert steps == [4, 4]


def test_more_workers_than_rows_are_refused():
    for one_group in (True, False):
        with pytest.raises(ConfigurationError, match="3"):
            shared_by_all({"x": np.zeros(3), "batch_size": 8}, 4, one_group)


def test_one_worker_gets_what_the_script_gives():
    given_ = {"x": np.zeros(8), "y": np.zeros(8), "batch_size": 4, "validation_split": 0.0}
    (only,) = shared_by_all(given_, 1)
    assert only.arguments == given_
    assert (only.batch_size, only.num_examples, only.short_by) == (4, 8, 0)


def test_without_sharing_everything_stays_with_the_script():
    given_ = {"x": np.zeros(8), "y": np.zeros(8), "batch_size": 4}
    for shared in shared_by_all(given_, 2, shard="off"):
        assert shared.arguments == given_
        assert shared.num_examples is None
    for shared in shared_by_all(given_, 2, shard="off", batch="global"):
        assert shared.arguments["batch_size"] == 2
        assert len(shared.arguments["x"]) == 8


def test_steps_per_epoch_are_divided_where_each_worker_has_batches_of_its_own():
    given_ = {"x": np.zeros(320), "batch_size": 32, "steps_per_epoch": 7}
    assert [s.arguments["steps_per_epoch"] for s in shared_by_all(given_, 3, False)] == [3, 2, 2]
    each = shared_by_all(given_, 3, batch="worker")
    assert [s.arguments["steps_per_epoch"] for s in each] == [3, 3, 3]
    assert [s.arguments["steps_per_epoch"] for s in shared_by_all(given_, 3)] == [7, 7, 7]


def test_keras_own_batch_size_is_found_from_the_steps():
    shared = shared_by_all({"x": np.zeros(100), "steps_per_epoch": 9}, 2)
    assert [s.batch_size for s in shared] == [12, 12]
    assert [{len(batch) for batch in batches(s.arguments)} for s in shared] == [{6, 2}, {6, 2}]
    assert [len(batches(s.arguments)) for s in shared] == [9, 9]


def test_validation_is_cut_off_before_sharing():
    x = np.arange(100)
    given_ = {"x": x, "y": x, "validation_split": 0.2, "batch_size": 10}
    everyone = shared_by_all(given_, 2)
    rows = [row for shared in everyone for batch in batches(shared.arguments) for row in batch]
    assert sorted(rows) == list(range(80))
    for shared in everyone:
        assert not shared.arguments["validation_split"]
        assert shared.arguments["validation_batch_size"] == 10
        np.testing.assert_array_equal(shared.arguments["validation_data"][0], x[80:])
        assert shared.num_examples == 80


class Frame:
    """A table of another library, recognized only by `__array__`."""

    def __init__(self, values):
        self._values = values
        self.shape = values.shape

    def __array__(self, dtype=None, copy=None):
        return self._values if dtype is None else self._values.astype(dtype)


@pytest.mark.parametrize("shuffle", (True, False))
def test_every_form_that_keras_cuts_is_cut_by_rows(shuffle):
    rows = np.arange(1, 13)
    x = {
        "array": rows[:, None],
        "nested": (tf.constant(rows), [Frame(rows.astype("float32"))]),
        "ragged": tf.ragged.constant([[row] * (row % 3) for row in rows]),
        "sparse": tf.sparse.from_dense(np.diag(rows)),
        "text": np.array([str(row) for row in rows], dtype=object),
    }
    seen = []
    for shared in shared_by_all({"x": x, "y": [rows], "batch_size": 4, "shuffle": shuffle}, 2):
        for inputs, (y,) in shared.arguments["x"]:
            kept = y.numpy().tolist()
            seen += kept
            assert inputs["array"][:, 0].numpy().tolist() == kept
            assert inputs["nested"][1][0].numpy().tolist() == kept
            assert inputs["ragged"].row_lengths().numpy().tolist() == [row % 3 for row in kept]
            assert tf.sparse.to_dense(inputs["sparse"]).numpy().sum(axis=1).tolist() == kept
            assert [int(text) for text in inputs["text"].numpy()] == kept
    assert sorted(seen) == rows.tolist()


def test_partitions_by_label_take_one_class_per_row_in_any_usual_form():
    labels = np.repeat(np.arange(4), 6)
    for y in (labels, labels[:, None], keras.utils.to_categorical(labels), labels.astype(float)):
        given_ = {"x": labels, "y": y, "batch_size": 4, "shuffle": False}
        first, second = shared_by_all(given_, 2, False, "class")
        assert {row for batch in batches(first.arguments) for row in batch} == {0, 1}
        assert {row for batch in batches(second.arguments) for row in batch} == {2, 3}
    for y in (None, [labels, labels], np.linspace(0, 1, 24)):
        with pytest.raises(ConfigurationError, match="--partition=iid"):
            shared_by_all({"x": labels, "y": y}, 2, False, "class")


def test_what_is_no_data_of_keras_is_left_to_keras():
    for x in (None, [1, 2, 3], "text"):
        for shared in shared_by_all({"x": x, "y": None}, 2):
            assert shared.arguments == {"x": x, "y": None}


def test_uneven_parts_lose_nothing():
    y = np.arange(60) % 3
    everyone = shared_by_all({"x": y, "y": y, "batch_size": 8}, 3, True, "dirichlet")
    steps = [len(batches(s.arguments)) for s in everyone]
    assert [s.short_by for s in everyone] == [max(steps) - each for each in steps]


def test_each_epoch_is_shuffled_and_dealt_in_another_way_and_again_alike():
    x = np.arange(40)
    given_ = {"x": {"a": x}, "y": x, "class_weight": {row: row + 1.0 for row in range(40)}}
    first, second = shared_by_all(given_ | {"batch_size": 8}, 2)
    whole = []
    for shared in (first, second, *shared_by_all(given_ | {"batch_size": 8}, 2)):
        epochs = [batches(shared.arguments) for _ in range(3)]
        assert len({str(epoch) for epoch in epochs}) == 3
        whole.append(epochs)
    assert whole[:2] == whole[2:]
    own = [{row for batch in epochs[0] for row in batch} for epochs in whole[:2]]
    assert own[0] != {row for batch in whole[0][1] for row in batch}, "dealt alike in each epoch"
    assert not own[0] & own[1]
    for inputs, y, weights in first.arguments["x"]:
        np.testing.assert_array_equal(inputs["a"], y)
        np.testing.assert_array_equal(weights, y + 1)
    assert first.arguments["class_weight"] is None


@pytest.mark.parametrize("steps", (None, 2, 3))
def test_a_last_batch_with_fewer_rows_than_workers_ends_an_epoch(steps):
    given_ = {"x": np.arange(65), "batch_size": 32, "shuffle": False, "epochs": 2}
    if steps == 2:
        with pytest.raises(ConfigurationError, match=r"batch 3 .*steps_per_epoch=2.* has 1 rows"):
            shared_by_all(given_ | {"steps_per_epoch": steps}, 2)
        return
    everyone = shared_by_all(given_ | {"steps_per_epoch": steps}, 2)
    assert [len(batches(shared.arguments)) for shared in everyone] == [3, 2]
    assert [shared.short_by for shared in everyone] == [0, 1]
    once = shared_by_all(given_ | {"steps_per_epoch": 2, "epochs": 1}, 2)
    assert [shared.arguments["steps_per_epoch"] for shared in once] == [2, 2]


@pytest.mark.parametrize(("partition", "shuffle"), [("iid", True), ("iid", False), ("class", True)])
def test_each_row_keeps_its_label_and_its_weight(shuffle, partition):
    """Weights of rows, and of classes, come with the rows wherever these are dealt."""
    total, rng = 40, np.random.default_rng(3)
    x, y = np.arange(total, dtype=np.float32)[:, None], rng.integers(0, 4, total)
    weights = rng.uniform(1, 9, total).astype(np.float32)
    given_weights = ({"sample_weight": weights}, {"class_weight": {0: 2.0, 1: 3.0, 2: 5.0, 3: 7.0}})
    of_class = np.float32([2, 3, 5, 7])
    for more, expected in zip(given_weights, (weights, of_class[y]), strict=True):
        arguments = {"x": x, "y": y, "batch_size": 8, "shuffle": shuffle, **more}
        for shared in shared_by_all(arguments, 2, partition=partition):
            for batch in shared.arguments["x"]:
                rows = batch[0].numpy()[:, 0].astype(int)
                np.testing.assert_array_equal(batch[1], y[rows])
                np.testing.assert_allclose(batch[2], expected[rows], rtol=1e-6)


def first_column(batch):
    return tf.nest.flatten(batch)[0].numpy()[:, 0]


def test_a_shuffle_puts_other_rows_together_in_each_epoch():
    """Not only the workers' rows change: the run's batches have other rows in each epoch."""
    x = np.arange(48, dtype=np.float32)[:, None]
    everyone = shared_by_all({"x": x, "batch_size": 12, "shuffle": True}, 2)
    epochs = []
    for _ in range(3):
        parts = [list(map(first_column, one.arguments["x"])) for one in everyone]
        together = [np.concatenate(step) for step in zip(*parts, strict=True)]
        assert sorted(np.concatenate(together)) == list(range(48))
        epochs.append({frozenset(step) for step in together})
    assert not epochs[0] & epochs[1] and not epochs[1] & epochs[2]
