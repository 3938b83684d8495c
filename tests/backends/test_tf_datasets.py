"""The tf.data.Dataset of a `fit`, on each backend beside which TensorFlow is installed."""

import keras
import numpy as np
import pytest

tf = pytest.importorskip("tensorflow")

from tests.backends.test_pass_numbers import BACKEND, epochs_of, shared_by_all  # noqa: E402

N = 24


def numbers():
    return tf.data.Dataset.from_tensor_slices(np.arange(N, dtype="float32")[:, None])


PIPELINES = {
    "in order": lambda: numbers().batch(6),
    "shuffled": lambda: numbers().shuffle(N, seed=3).batch(6),
    "shuffled batches": lambda: numbers().batch(6).shuffle(4, seed=1).prefetch(2),
    "unknown length": lambda: numbers().filter(lambda x: x[0] < 19).batch(6),
    "mixes rows": lambda: numbers().batch(6).map(lambda x: x + 0 * tf.reduce_mean(x)),
}


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pass_that_builds_the_model_is_the_pass_of_the_first_epoch(name):
    def arguments():
        return {"x": PIPELINES[name]().map(lambda x: (x, x))}

    num_workers = 2
    read = [epochs_of(s.arguments, 3, builds=True) for s in shared_by_all(arguments, num_workers)]
    again = [epochs_of(s.arguments, 3) for s in shared_by_all(arguments, num_workers)]
    assert read == again
    total = 19 if name == "unknown length" else N
    for epoch in range(3):
        rows = [row for mine in read for batch in mine[epoch] for row in batch]
        assert sorted(rows) == list(range(total))


def test_a_round_without_rows_is_counted_in_the_first_epoch_too():
    """Seven rows in batches of six: worker 2 has no row of the second batch."""

    def arguments():
        return {"x": numbers().filter(lambda x: x[0] < 7).batch(6).map(lambda x: (x, x))}

    for number, shared in enumerate(shared_by_all(arguments, 2)):
        counts = []

        def end_epoch(*_, unfilled=shared.unfilled, to=counts):
            to.append(unfilled.take())

        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        begin = keras.callbacks.LambdaCallback(
            on_epoch_begin=lambda epoch, logs, unfilled=shared.unfilled: unfilled.take(),
            on_epoch_end=end_epoch,
        )
        model.fit(**shared.arguments, epochs=2, callbacks=[begin], verbose=0)
        assert counts == [number, number]


def test_class_weights_and_refusals_of_keras_stay():
    def arguments(**more):
        return {"x": numbers().batch(6).map(lambda x: (x, tf.cast(x, tf.int32) % 2)), **more}

    for shared in shared_by_all(lambda: arguments(class_weight={0: 2.0, 1: 3.0}), 2):
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        model.fit(**shared.arguments, verbose=0)
    if BACKEND != "tensorflow":
        with pytest.raises(ValueError, match="targets"):
            shared_by_all(lambda: arguments(y=np.zeros(N)), 2)
