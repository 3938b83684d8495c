"""Detects if a value is a sum over rows or a mean, by repeating the rows."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from thinwire.script.keras.row_kinds import RowKind, kinds_of, repeated

ROWS = tf.constant(np.random.default_rng(2).normal(size=(5, 3)).astype(np.float32))


def kinds(value):
    """Return the kinds of a function of rows; the function gets moved rows at a second attempt."""

    def attempt(is_moved):
        return lambda repeats: value(repeated(ROWS, repeats), is_moved)

    return kinds_of(len(ROWS), attempt(False), attempt(True))


def kind_of(value):
    (kind,) = kinds(lambda rows, is_moved: [float(value(rows + 0.1 * is_moved))])
    return kind


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (tf.reduce_sum, RowKind.SUM),
        (lambda rows: tf.reduce_mean(rows**2), RowKind.FIXED),
        (lambda rows: 7.0, RowKind.FIXED),
        (lambda rows: tf.reduce_sum(rows**2) + tf.reduce_mean(rows**2), RowKind.MIXED),
        (lambda rows: tf.reduce_sum(rows**2) ** 2, RowKind.OTHER),
        (lambda rows: tf.reduce_sum(rows - ROWS[0, 0]) * 0, RowKind.OTHER),
        (
            lambda rows: tf.reduce_sum(tf.repeat([[0.0]], len(rows), 0) + rows[:, :1] * 0),
            RowKind.OTHER,
        ),
        (lambda rows: float("nan"), RowKind.OTHER),
    ],
    ids=["sum", "mean", "constant", "both", "square", "zero", "zeros", "nan"],
)
def test_a_value_shows_what_it_is(value, kind):
    assert kind_of(value) is kind


def test_a_value_that_is_0_here_shows_it_nearby():
    (kind,) = kinds(lambda rows, is_moved: [float(tf.reduce_sum(tf.ones_like(rows)) * is_moved)])
    assert kind is RowKind.SUM


def test_what_cannot_be_computed_for_more_rows_is_not_known():
    def reshaped(rows, is_moved):
        return [float(tf.reduce_sum(tf.reshape(rows, [5, 3])))]

    assert kinds(reshaped) == []


NOISY = {
    "dropout": keras.layers.Dropout(0.5, seed=1),
    "noise": keras.layers.GaussianNoise(0.5, seed=1),
    "factors": keras.layers.GaussianDropout(0.4, seed=1),
    "drawn": lambda rows, training: rows + keras.random.uniform(tf.shape(rows), seed=4),
    "one for all": lambda rows, training: rows + keras.random.uniform((3,), seed=4),
}


@pytest.mark.parametrize("name", NOISY)
@pytest.mark.parametrize(
    ("reduce", "kind"), [(tf.reduce_sum, RowKind.SUM), (tf.reduce_mean, RowKind.FIXED)]
)
def test_the_noise_of_keras_is_the_same_for_repeated_rows(name, reduce, kind):
    layer = NOISY[name]

    def value(rows, is_moved):
        with keras.StatelessScope():
            return [float(reduce(layer(rows, training=True) ** 2))]

    assert kinds(value) == [kind]

    def gradients(repeats):
        with keras.StatelessScope(), tf.GradientTape() as tape:
            weight = tf.constant(2.0)
            tape.watch(weight)
            loss = reduce((weight * layer(repeated(ROWS, repeats), training=True)) ** 2)
        return [np.ravel(tape.gradient(loss, weight))]

    assert kinds_of(len(ROWS), gradients) == [kind]


def test_noise_is_drawn_as_ever_outside():
    np.testing.assert_array_equal(
        keras.random.normal((10, 2), seed=3), tf.random.stateless_normal((10, 2), [3, 0])
    )


def test_rows_of_every_form_are_repeated():
    ragged = tf.RaggedTensor.from_row_lengths([1, 2, 3], [1, 2])
    sparse = tf.sparse.from_dense([[0, 1], [2, 0]])
    data = {"ragged": ragged, "sparse": sparse, "text": tf.constant(["a", "b"]), "none": None}
    found = repeated((data, tf.constant(3)), 2)
    assert found[0]["ragged"].to_list() == [[1], [2, 3]] * 2
    assert tf.sparse.to_dense(found[0]["sparse"]).numpy().tolist() == [[0, 1], [2, 0]] * 2
    assert found[0]["text"].numpy().tolist() == [b"a", b"b"] * 2
    assert found[0]["none"] is None and int(found[1]) == 3
