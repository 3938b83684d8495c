"""The number of rows in a mini-batch, in memory and in the graph of a step."""

import numpy as np
import pytest
import tensorflow as tf

from thinwire.script.data.rows import arrays_of_rows, count_rows, map_rows, num_rows

IMAGES, LABELS, ANCHORS = np.zeros((8, 4, 4, 1)), np.zeros(8), np.zeros(3)
RAGGED = tf.ragged.constant([[1], [], [2, 3], [4], [5]])
SPARSE = tf.sparse.from_dense(np.eye(6))

BATCHES = {
    "labels say it": ({"a": ANCHORS, "image": IMAGES}, LABELS),
    "labels and sizes": ({"image": IMAGES}, {"a": ANCHORS, "boxes": LABELS}),
    "weights say it": (ANCHORS, np.zeros(5), LABELS),
    "most arrays agree": ({"a": ANCHORS, "b": LABELS, "c": LABELS},),
    "most axes": {"a": ANCHORS, "image": IMAGES},
    "scalars are no arrays": ({"a": np.float32(1), "b": None, "c": LABELS},),
    "a structure of its own": (ANCHORS, IMAGES, LABELS, IMAGES),
}


@pytest.mark.parametrize("name", BATCHES)
def test_rows_are_those_of_the_batch(name):
    batch = BATCHES[name]
    assert num_rows(batch) == 8
    assert int(count_rows(tf.nest.map_structure(tf.convert_to_tensor, without_none(batch)))) == 8


def without_none(batch):
    return tf.nest.map_structure(lambda leaf: 0.0 if leaf is None else leaf, batch)


@pytest.mark.parametrize(
    ("batch", "number"),
    [
        (({"a": ANCHORS, "words": RAGGED},), 5),
        (({"a": ANCHORS, "words": SPARSE},), 6),
        ((RAGGED, np.zeros(5)), 5),
        (np.zeros((0, 3)), 0),
        (np.float32(1), 1),
    ],
)
def test_ragged_and_sparse_arrays_have_rows(batch, number):
    assert int(num_rows(batch)) == number


def graph_of(batch, known=()):
    """Return a step's row count; the step knows only the axis lengths of the arrays in `known`."""
    spec = {
        name: tf.TensorSpec(leaf.shape if name in known else [None, *leaf.shape[1:]], leaf.dtype)
        for name, leaf in batch.items()
    }
    step = tf.function(lambda data: count_rows(data), input_signature=[spec])
    return int(step({name: tf.constant(leaf) for name, leaf in batch.items()}))


def test_a_step_that_knows_no_length_counts_as_well():
    assert graph_of({"a": ANCHORS, "image": IMAGES}) == 8  # most axes
    assert graph_of({"a": ANCHORS, "b": LABELS}, known=["a"]) == 8  # an axis of variable length
    assert graph_of({"a": ANCHORS, "b": ANCHORS[:1], "c": LABELS, "d": LABELS}) == 8


def test_only_arrays_of_rows_are_cut():
    batch = ({"a": ANCHORS, "image": IMAGES}, LABELS)
    (x, y) = map_rows(lambda rows: rows[1::2], batch)
    assert (len(x["a"]), len(x["image"]), len(y)) == (3, 4, 4)
    short = ({"a": ANCHORS, "image": IMAGES[:3]}, LABELS[:3])  # as long, by chance
    assert arrays_of_rows(batch) == (False, True, True)
    (x, y) = map_rows(lambda rows: rows[:1], short, arrays_of_rows(batch))
    assert (len(x["a"]), len(x["image"]), len(y)) == (3, 1, 1)


def test_a_pipeline_cuts_only_arrays_of_rows():
    rows = tf.data.Dataset.range(10).batch(4)
    data = rows.map(lambda x: {"a": tf.constant([1, 2, 3]), "x": x})
    cut = data.map(lambda batch: map_rows(lambda leaf: leaf[::2], batch))
    found = [(batch["a"].shape[0], batch["x"].shape[0]) for batch in cut]
    assert found == [(3, 2), (3, 2), (3, 1)]
