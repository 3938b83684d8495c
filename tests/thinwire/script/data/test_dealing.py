"""The rows of each worker if data follow a pattern, or if the script reads batches."""

import dataclasses
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.thinwire.script.data.places import batches, places, shared_by_all
from thinwire.ops.types import ConfigurationError
from thinwire.script.data.by_rows import mixes_rows
from thinwire.script.data.data import part_of_data, share
from thinwire.script.data.fit_counts import FitNumber

Data = tf.data.Dataset
TOTAL, BATCH, WORKERS = 240, 12, 3
ROWS = np.arange(TOTAL, dtype="float32")[:, None]
BOTH = (True, False)


class Rows(keras.utils.PyDataset):
    def __init__(self, sizes=(BATCH,) * (TOTAL // BATCH)):
        super().__init__()
        self.ends = np.cumsum([0, *sizes])

    def __len__(self):
        return len(self.ends) - 1

    def __getitem__(self, index):
        return (ROWS[self.ends[index] : self.ends[index + 1]],)


def source(total=TOTAL):
    return Data.from_tensor_slices(ROWS[:total])


def chosen():
    """Return rows; each data set gives one row, one after another."""
    of_each = [source().filter(lambda row, n=n: row[0] % 3 == n) for n in range(3)]
    return Data.choose_from_datasets(of_each, Data.range(TOTAL).map(lambda n: n % 3))


def interleaved():
    firsts = Data.range(3)
    return firsts.interleave(
        lambda first: Data.range(first, TOTAL, 3).map(lambda n: tf.cast(n, tf.float32)[None]),
        cycle_length=3,
    )


def fixed_size(ds):
    """Return batches that are cut by rows, as a function was traced for their size."""
    return ds.batch(BATCH, drop_remainder=True).map(lambda rows: tf.reshape(rows, [BATCH, 1]))


SOURCES = {
    "arrays": lambda: {"x": ROWS, "batch_size": BATCH, "shuffle": False},
    "elements": lambda: {"x": source().batch(BATCH)},
    "shuffled elements": lambda: {"x": source().shuffle(9, seed=1).batch(BATCH)},
    "maps": lambda: {"x": source().map(lambda row: row + 0).cache().batch(BATCH)},
    "repeated, then batches": lambda: {"x": source(TOTAL // 2).repeat(2).batch(BATCH)},
    "batches, repeated": lambda: {"x": source(TOTAL // 2).batch(BATCH).repeat(2)},
    "finished batches": lambda: {"x": fixed_size(source())},
    "chosen": lambda: {"x": chosen().batch(BATCH)},
    "interleaved": lambda: {"x": interleaved().batch(BATCH)},
    "PyDataset": lambda: {"x": Rows(), "shuffle": False},
    "shuffled PyDataset": lambda: {"x": Rows()},
}


#: Without barriers between workers, these kinds of data are dealt in other ways.
WITHOUT_ROUNDS = ("arrays", "elements", "batches, repeated", "interleaved", "PyDataset")


#: They are dealt as others are: shuffled elements, chosen ones, a shuffled PyDataset.
LIKE_OTHERS = ("elements", "interleaved", "PyDataset")


@pytest.mark.parametrize(
    ("kind", "one_group"),
    [
        *((kind, True) for kind in SOURCES if kind not in LIKE_OTHERS),
        *((kind, False) for kind in WITHOUT_ROUNDS),
    ],
)
def test_no_worker_gets_a_single_class_of_data_that_alternate(kind, one_group):
    everyone = [s.arguments for s in shared_by_all(SOURCES[kind](), WORKERS, one_group)]
    of_epochs = []
    for _ in range(2):
        rows = [[row for batch in batches(each) for row in batch] for each in everyone]
        total = TOTAL // 2 if "repeated" in kind else TOTAL
        assert sorted(row for own in rows for row in own) == sorted(
            list(range(total)) * (TOTAL // total)
        )
        for own in rows:
            assert max(np.bincount(np.array(own, int) % 3)) < 0.55 * len(own)
        of_epochs.append(rows)
    repeats = {"maps"} if one_group else {"maps", "PyDataset", "shuffled PyDataset"}
    assert kind in repeats or of_epochs[0][0] != of_epochs[1][0], "dealt alike in each epoch"


@pytest.mark.parametrize("one_group", BOTH)
@pytest.mark.parametrize(
    "make",
    [lambda: source().batch(4).filter(lambda rows: rows[0, 0] >= 0), lambda: Rows((4,) * 60)],
)
def test_whole_batches_that_alternate_are_not_dealt_by_a_stride(make, one_group):
    """They are dealt by a stride without rounds, and if a script takes its part itself."""
    for place in places(WORKERS, one_group):
        part = part_of_data((make(),), place)
        numbers = [int(batch[0]) // 4 for batch in batches({"x": part, "shuffle": False})]
        assert len(numbers) == 20
        assert max(np.bincount(np.array(numbers) % 3)) < 15


@pytest.mark.parametrize("kind", [kind for kind in SOURCES if kind not in LIKE_OTHERS])
def test_a_worker_that_was_started_again_gets_the_same_rows(kind):
    def epochs(number):
        place = dataclasses.replace(places(WORKERS)[1], fit=FitNumber(number, number, 0))
        arguments = share(SOURCES[kind](), place).arguments
        return [batches(arguments) for _ in range(2)]

    first = epochs(1)
    assert epochs(1) == first
    if kind not in ("maps", "shuffled elements"):
        assert epochs(2) != first


# -- operations behind batch() ------------------------------------------------------------------


def pure(function, ds):
    """Return a map that keeps the row's number together with the computed value."""
    return ds.map(lambda rows: (rows, function(rows)))


FILTERS = {
    "full batches": lambda ds: ds.filter(lambda rows: tf.shape(rows)[0] == 8),
    "by the first row": lambda ds: ds.filter(lambda rows: rows[0, 0] % 16 == 0),
    "by the mean": lambda ds: ds.filter(lambda rows: tf.reduce_mean(rows) < 30),
    "then a map": lambda ds: ds.filter(lambda rows: rows[0, 0] > 7).map(lambda rows: rows + 0),
    "take_while": lambda ds: ds.take_while(lambda rows: rows[0, 0] < 24),
    "unique": lambda ds: ds.map(lambda rows: tf.cast(rows, tf.int64)).unique(),
    "scan": lambda ds: ds.scan(0.0, lambda old, rows: (old + tf.reduce_sum(rows), rows)),
    "errors": lambda ds: ds.map(
        lambda rows: tf.debugging.check_numerics(rows / tf.reduce_min(rows) * 0 + rows, "")
    ).ignore_errors(),
}


@pytest.mark.parametrize(
    ("kind", "one_group"),
    [*((kind, True) for kind in FILTERS), ("full batches", False), ("unique", False)],
)
def test_what_looks_at_batches_sees_the_scripts(kind, one_group):
    total = 48 if kind == "unique" else 50  # batches of one shape
    whole = FILTERS[kind](source(total).batch(8))
    alone = [np.array(batch)[:, 0].tolist() for batch in whole]
    everyone = [batches(s.arguments) for s in shared_by_all({"x": whole}, 2, one_group)]
    if one_group:
        steps = [[parts[k] for parts in everyone if k < len(parts)] for k in range(len(alone))]
        assert [sorted(itertools.chain(*parts)) for parts in steps] == alone
    else:
        assert sorted(itertools.chain(*everyone)) == sorted(alone)


MIXING = {
    "minus the mean": lambda x: x - tf.reduce_mean(x, 0),
    "over the maximum": lambda x: x / tf.reduce_max(x),
    "maximum of the first column of bytes": lambda x: (
        tf.cast(x, tf.uint8) / tf.reduce_max(tf.cast(x, tf.uint8))
    ),
    "rank": lambda x: tf.cast(tf.argsort(tf.argsort(x[:, 0])), tf.float32)[:, None],
    "number of rows": lambda x: x / tf.cast(tf.shape(x)[0], tf.float32),
    "sum so far": lambda x: tf.cumsum(x),
    "neighbour": lambda x: tf.roll(x, 1, 0),
    "softmax over rows": lambda x: tf.nn.softmax(x / 100, axis=0),
    "noise and the mean": lambda x: (
        x + tf.random.uniform(tf.shape(x), 0, 1e-6) - tf.reduce_mean(x, 0)
    ),
    "in Python": lambda x: tf.ensure_shape(
        tf.numpy_function(lambda rows: rows - rows.mean(0), [x], tf.float32), [None, 1]
    ),
}
BY_ROWS = {
    "product": lambda x: tf.tanh(x @ tf.ones([1, 7]) / 100),
    "mean of a row": lambda x: x - tf.reduce_mean(x, 1, keepdims=True),
    "classes": lambda x: tf.one_hot(tf.cast(x[:, 0], tf.int32) % 3, 3),
    "bytes": lambda x: tf.cast(tf.cast(x, tf.uint8), tf.float32) / 255,
    "text": lambda x: tf.strings.as_string(x[:, 0]),
    "ragged": lambda x: tf.RaggedTensor.from_row_lengths(
        tf.repeat(x[:, 0], 3), tf.fill([tf.shape(x)[0]], 3)
    ),
    "noise": lambda x: x + tf.random.normal(tf.shape(x)),
    "stateless noise": lambda x: x + tf.random.stateless_uniform(tf.shape(x), [1, 2]),
    "whole numbers": lambda x: (
        x + tf.cast(tf.random.uniform(tf.shape(x), 2, 9, tf.int32), tf.float32)
    ),
    "one draw for all": lambda x: x * tf.random.uniform([]),
    "noise in Python": lambda x: tf.ensure_shape(
        tf.numpy_function(
            lambda rows: rows + np.random.rand(*rows.shape).astype("float32"), [x], tf.float32
        ),
        [None, 1],
    ),
    "a fixed table": lambda x: {"rows": x, "table": tf.constant([1.0, 2.0, 3.0])},
}


@pytest.mark.parametrize("kind", [*MIXING, *BY_ROWS])
def test_whether_a_map_mixes_rows_is_found_by_trying(kind):
    node = source(50).batch(8).map({**MIXING, **BY_ROWS}[kind])
    assert mixes_rows(node._map_func, tf.constant(ROWS[:8]), places(2)[0]) is (kind in MIXING)


def test_a_function_without_draws_is_tried_as_it_is(monkeypatch):
    monkeypatch.delattr("thinwire.script.data.by_rows._imported")
    node = source(50).batch(8).map(lambda rows: 2 * rows)
    assert not mixes_rows(node._map_func, tf.constant(ROWS[:8]), places(2)[0])


def test_augmentation_of_keras_treats_rows_by_themselves_and_keeps_its_seeds():
    augment = keras.Sequential(
        [keras.layers.RandomFlip(), keras.layers.RandomRotation(0.1), keras.layers.RandomZoom(0.2)]
    )
    images = tf.random.stateless_uniform([8, 6, 6, 3], [1, 2])
    node = Data.from_tensor_slices(images).batch(8).map(lambda x: augment(x, training=True))
    seeds = [np.array(variable) for variable in augment.variables]
    assert not mixes_rows(node._map_func, images, places(2)[0])
    for variable, seed in zip(augment.variables, seeds, strict=True):
        np.testing.assert_array_equal(variable, seed)


@pytest.mark.parametrize("kind", ["minus the mean", "rank", "number of rows"])
@pytest.mark.parametrize("shuffle", BOTH)
def test_a_map_that_mixes_rows_runs_on_the_scripts_batches(kind, shuffle):
    def make():
        ds = source(50).shuffle(50, seed=3) if shuffle else source(50)
        return pure(MIXING[kind], ds.batch(8)).map(lambda rows, y: (rows, y * 1)).prefetch(1)

    alone = [[np.array(part)[:, 0].tolist() for part in batch] for batch in make()]
    everyone = [list(s.arguments["x"]) for s in shared_by_all({"x": make()}, 2)]
    for number, (rows, values) in enumerate(alone):
        parts = [steps[number] for steps in everyone]
        found = {
            float(row): float(value)
            for x, y in parts
            for row, value in zip(x.numpy()[:, 0], y.numpy()[:, 0], strict=True)
        }
        assert found == pytest.approx(dict(zip(rows, values, strict=True)), abs=1e-5)
    assert len(everyone[0]) == len(alone)


def test_a_map_of_rows_prepares_a_workers_rows_only():
    prepared = []

    def prepare(rows):
        prepared.append(len(rows))
        return rows

    whole = (
        source(48)
        .batch(8)
        .map(
            lambda rows: tf.ensure_shape(tf.numpy_function(prepare, [rows], tf.float32), [None, 1])
        )
    )
    part = shared_by_all({"x": whole}, 2)[0].arguments
    prepared.clear()
    assert len(batches(part)) == 6 and prepared == [4] * 6


@pytest.mark.parametrize("one_group", BOTH)
def test_what_needs_whole_batches_and_cannot_have_the_same_is_refused_by_name(one_group):
    loose = Data.from_generator(lambda: iter(ROWS), output_signature=tf.TensorSpec([1]))
    for name, make in (
        ("Filter", lambda ds: ds.filter(lambda rows: tf.shape(rows)[0] == 8)),
        ("Map", lambda ds: ds.map(MIXING["minus the mean"])),
    ):
        if name == "Map" and not one_group:
            continue  # a worker's batches are as large as the script's
        with pytest.raises(ConfigurationError, match=rf"{name} .*batch\(\).*generator"):
            shared_by_all({"x": make(loose.batch(8))}, 2, one_group)


# -- batches with fewer rows than workers ----------------------------------------------------------


def unknown(total):
    """Return rows; their number is known only after reading them."""
    return source(100).filter(lambda row: row[0] < total)


def varying(*sizes):
    table = tf.constant(sizes)
    return Data.range(len(sizes)).map(lambda n: tf.fill([table[n], 1], tf.cast(n, tf.float32)))


@pytest.mark.parametrize(
    ("data", "steps"),
    (
        (lambda: source(65).batch(32).repeat(), 6),
        (lambda: source(65).batch(32).repeat(2), None),
        (lambda: source(65).batch(32), 2),
        (lambda: source(65).shuffle(65).batch(32).map(lambda x: x + 1).repeat(), 6),
        (lambda: Rows((32, 32, 1)), 2),
    ),
)
def test_short_batches_in_the_middle_are_refused_at_the_start(data, steps):
    with pytest.raises(ConfigurationError, match=r"batch 3 .* has 1 rows.* 2 workers.*--batch="):
        shared_by_all({"x": data(), "steps_per_epoch": steps, "epochs": 2}, 2)


@pytest.mark.parametrize(
    "data",
    (
        lambda: unknown(65).batch(32).repeat(2),
        lambda: unknown(65).batch(32).filter(lambda rows: rows[0, 0] >= 0).repeat(2),
        lambda: varying(4, 4, 1, 4),
    ),
)
def test_short_batches_in_the_middle_are_refused_when_they_are_read(data):
    for shared in shared_by_all({"x": data()}, 2):
        with pytest.raises(tf.errors.OpError, match=r"batch 3 .* has 1 rows"):
            list(shared.arguments["x"])


@pytest.mark.parametrize(
    ("data", "short"),
    (
        (lambda: source(65).batch(32), 1),
        (lambda: source(65).repeat(3).batch(32), 0),
        (lambda: source(65).repeat(3).batch(97), 1),
        (lambda: source(65).batch(32, drop_remainder=True).repeat(2), 0),
        (lambda: source(65).batch(32, drop_remainder=True), 0),
        (lambda: source(65).map(lambda x: x + 0).batch(32).map(MIXING["minus the mean"]), 1),
        (lambda: source(49).shuffle(9).repeat(8).batch(8), 2),
        (lambda: unknown(65).batch(32), None),
        (lambda: varying(4, 4, 1), None),
        (lambda: source(65).batch(32).filter(lambda rows: tf.shape(rows)[0] > 1).repeat(2), 0),
        (lambda: Rows((32, 32, 1)), 1),
    ),
)
def test_a_short_last_batch_of_an_epoch_is_a_step_less(data, short):
    everyone = shared_by_all({"x": data(), "shuffle": False}, 2)
    steps = [len(batches(shared.arguments)) for shared in everyone]
    assert steps[0] - steps[1] == (1 if short is None else short)
    assert [shared.short_by for shared in everyone] == [0, short or 0]


@pytest.mark.parametrize("data", (lambda: source(65), lambda: unknown(65)))
def test_rows_repeated_before_the_batches_leave_no_short_batch(data):
    endless = data().shuffle(65, seed=1).repeat().batch(32)
    for shared in shared_by_all({"x": endless, "steps_per_epoch": 6, "epochs": 2}, 2):
        assert [len(batch) for batch in shared.arguments["x"].take(12)] == [16] * 12


def test_components_that_are_no_rows_and_none_stay():
    table = tf.constant([5.0, 6.0, 7.0])
    with_table = source(50).batch(8).map(lambda rows: {"a_table": table, "rows": rows})
    with_none = source(50).map(lambda row: (row, None)).batch(8)
    filtered = with_table.filter(lambda each: each["rows"][0, 0] >= 0)
    for whole in (with_table, filtered):
        parts = [list(s.arguments["x"]) for s in shared_by_all({"x": whole}, 2)]
        rows = [row for part in parts for each in part for row in each["rows"].numpy()[:, 0]]
        assert sorted(rows) == list(range(50))
        assert all(each["a_table"].shape == 3 for part in parts for each in part)
    parts = [list(s.arguments["x"]) for s in shared_by_all({"x": with_none}, 2)]
    assert sorted(row for part in parts for x, _ in part for row in x.numpy()[:, 0]) == list(
        range(50)
    )
    assert all(second is None for part in parts for _, second in part)


def test_pairs_of_data_sets_of_unequal_length_stay_together():
    whole = Data.zip((source(50), source(43).map(lambda row: row + 0))).batch(8)
    seen = []
    for shared in shared_by_all({"x": whole}, 2):
        for first, second in shared.arguments["x"]:
            np.testing.assert_array_equal(first, second)
            seen += first.numpy()[:, 0].tolist()
    assert sorted(seen) == list(range(43))
