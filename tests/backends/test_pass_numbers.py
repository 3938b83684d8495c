"""The rows of every pass on each backend of Keras: the workers' parts are the script's batches.

The tests run with Keras' backend of the environment (KERAS_BACKEND). On each backend the workers
must take the rows that NumPy alone gives for the seeds, so that a run may mix backends.
"""

import math
import sys
import types

import keras
import numpy as np
import pytest

from thinwire.data.partition import PartitionRule
from thinwire.ops.types import ConfigurationError
from thinwire.script.data.arrays import labels_of
from thinwire.script.data.data import part_of_data, share
from thinwire.script.data.fit_counts import FitNumber
from thinwire.script.data.place import WorkerPlace
from thinwire.script.data.row_order import RowOrder
from thinwire.script.data.rows import arrays_of_rows, count_rows, map_rows, num_rows

BACKEND = keras.backend.backend()
SEED = 7


@pytest.fixture(scope="module", autouse=True)
def _without_grappler():
    """Let TensorFlow optimize no graph of a pipeline, which takes longer than to read it."""
    if BACKEND != "tensorflow":
        yield
        return
    import tensorflow as tf

    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})


def places(num_workers, one_group=True, partition="iid", **more):
    rule = PartitionRule(partition, num_workers, seed=SEED, dirichlet_alpha=0.5)
    return [WorkerPlace(w, num_workers, one_group, rule, **more) for w in range(1, num_workers + 1)]


def shared_by_all(arguments, num_workers, one_group=True, **more):
    """Return the shares of all workers; `arguments` is a function, as each process has its own."""
    return [share(arguments(), place) for place in places(num_workers, one_group, **more)]


def rows_read(batch):
    """Return the numbers in the first array of a batch, on any backend."""
    leaf = keras.ops.convert_to_numpy(keras.tree.flatten(batch)[0])
    return leaf.reshape(len(leaf), -1)[:, 0].astype(int).tolist()


def epochs_of(arguments, num_epochs, builds=False):
    """Return the rows of each batch of some epochs of `fit`, as Keras' own loop reads them.

    Args:
        arguments: Arguments of `fit`.
        num_epochs: Number of epochs to read.
        builds: True if Keras reads a batch to build the model, before it trains.
    """
    if BACKEND == "tensorflow":
        import tensorflow as tf
        from keras.src.backend.tensorflow.trainer import TFEpochIterator as EpochIterator

        more = {"distribute_strategy": tf.distribute.get_strategy()}
    elif BACKEND == "jax":
        from keras.src.backend.jax.trainer import JAXEpochIterator as EpochIterator

        more = {}
    else:
        from keras.src.backend.torch.trainer import TorchEpochIterator as EpochIterator

        more = {}
    names = ("x", "y", "sample_weight", "batch_size", "steps_per_epoch", "shuffle", "class_weight")
    given = {name: arguments[name] for name in names if name in arguments}
    iterator = EpochIterator(**more, **given)
    if builds and BACKEND != "tensorflow":
        for _, _, data in iterator:
            if BACKEND == "jax":
                next(data)
            break
    iterator.reset()
    epochs = []
    for _ in range(num_epochs):
        epochs.append([])
        with iterator.catch_stop_iteration():
            for _, _, data in iterator:
                epochs[-1].append(rows_read(data[0] if BACKEND == "torch" else next(data)))
    return epochs


def together(parts, step):
    """Return the sorted rows of all workers in a step of an epoch."""
    return sorted(row for mine in parts if step < len(mine) for row in mine[step])


# -- arrays ----------------------------------------------------------------------------------------

ARRAYS = [(23, 1, 5), (24, 2, 6), (23, 3, 7), (22, 4, 6), (13, 3, 6), (9, 4, 8)]


@pytest.mark.parametrize("shuffle", [True, False, "batch"])
@pytest.mark.parametrize(("total", "num_workers", "size"), ARRAYS)
def test_the_parts_of_every_batch_of_arrays_are_the_scripts(total, num_workers, size, shuffle):
    def arguments():
        x = np.arange(total, dtype="float32")[:, None]
        return {"x": x, "y": x, "batch_size": size, "shuffle": shuffle}

    everyone = shared_by_all(arguments, num_workers)
    if num_workers == 1:
        assert everyone[0].arguments["x"] is not None
        return
    read = [epochs_of(shared.arguments, 3, builds=True) for shared in everyone]
    again = [epochs_of(shared.arguments, 3) for shared in shared_by_all(arguments, num_workers)]
    assert read == again, "a batch read to build the model has used up a pass"
    order = RowOrder(places(num_workers)[0], np.arange(total), size, True, (), shuffle is True)
    for epoch in range(3):
        parts = [mine[epoch] for mine in read]
        script = order.of_epoch(epoch)
        for step in range(math.ceil(total / size)):
            assert together(parts, step) == sorted(script[step * size : (step + 1) * size])
        longest = max(map(len, parts))
        assert [longest - len(mine) for mine in parts] == [shared.short_by for shared in everyone]
    if shuffle is True:
        assert len({str(epoch) for epoch in read[0]}) == 3


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("batch", ["global", "worker"])
def test_every_backend_reads_the_rows_that_numpy_gives(batch, shuffle):
    """A worker on TensorFlow and one on JAX take parts of the same division."""
    total, size = 37, 8
    for place in places(3, batch=batch, fit=FitNumber(before=2)):
        window = place.run_batch(size)
        sizes = place.dealt_rows(total, window)
        order = RowOrder(place, np.arange(total), window, True, sizes, shuffle)
        x = np.arange(total, dtype="float32")
        shared = share({"x": x, "y": x, "batch_size": size, "shuffle": shuffle}, place)
        expected = [[rows.tolist() for rows in order.batches(epoch)] for epoch in range(3)]
        assert epochs_of(shared.arguments, 3) == expected
        assert [len(each) for each in expected] == [order.num_batches] * 3


#: Rows of worker 2 of 2 in two epochs, as TensorFlow's pipeline gave them before other backends.
VECTOR = [
    [[8, 6, 12], [10, 1, 13], [2]],
    [[6, 2, 9], [4, 5, 10], [7]],
]


def test_the_order_of_rows_is_that_of_earlier_versions():
    x = np.arange(14, dtype="float32")
    shared = share({"x": x, "batch_size": 6, "shuffle": True}, places(2)[1])
    assert epochs_of(shared.arguments, 2) == VECTOR


@pytest.mark.parametrize("steps", [2, 3, 6])
def test_steps_per_epoch_run_over_several_passes(steps):
    """An epoch of two steps leaves the rest of the pass to the next epoch, as in Keras."""

    def arguments():
        x = np.arange(36, dtype="float32")
        return {"x": x, "batch_size": 6, "steps_per_epoch": steps, "epochs": 12 // steps}

    everyone = shared_by_all(arguments, 2)
    read = [epochs_of(shared.arguments, 12 // steps, builds=True) for shared in everyone]
    flat = [[batch for epoch in mine for batch in epoch] for mine in read]
    assert [len(mine) for mine in flat] == [12, 12]
    for start in (0, 6):
        rows = [row for mine in flat for batch in mine[start : start + 6] for row in batch]
        assert sorted(rows) == list(range(36))
    assert flat[0][:6] != flat[0][6:]


def test_a_short_last_batch_with_steps_is_refused_where_a_pass_follows():
    def arguments(steps):
        return {"x": np.arange(65), "batch_size": 32, "epochs": 2, "steps_per_epoch": steps}

    with pytest.raises(ConfigurationError, match=r"batch 3 .*steps_per_epoch=2"):
        shared_by_all(lambda: arguments(2), 2)
    read = [epochs_of(s.arguments, 2) for s in shared_by_all(lambda: arguments(3), 2)]
    assert [[len(epoch) for epoch in mine] for mine in read] == [[3, 3], [2, 2]]


def first_batches(shared):
    """Return an epoch's batches of a worker with their structure, as NumPy arrays."""
    x = shared.arguments["x"]
    batches = x if BACKEND == "tensorflow" else x.get_numpy_iterator()
    return [keras.tree.map_structure(np.asarray, batch) for batch in batches]


@pytest.mark.parametrize("kind", ["sample_weight", "class_weight"])
def test_each_row_keeps_its_label_and_its_weight(kind):
    rng = np.random.default_rng(3)
    x, y = np.arange(40, dtype="float32")[:, None], rng.integers(0, 4, 40)
    weights = rng.uniform(1, 9, 40).astype("float32")
    by_class = {label: label + 2.0 for label in range(4)}
    given = {"sample_weight": weights} if kind == "sample_weight" else {"class_weight": by_class}
    expected = weights if kind == "sample_weight" else y + 2.0
    seen = []
    for partition in ("iid", "class"):
        arguments = {"x": {"a": x, "b": [x]}, "y": y, "batch_size": 8, "shuffle": True, **given}
        for shared in shared_by_all(lambda given=arguments: dict(given), 2, partition=partition):
            for inputs, labels, weight in first_batches(shared):
                rows = inputs["a"][:, 0].astype(int)
                seen += rows.tolist()
                np.testing.assert_array_equal(inputs["b"][0], inputs["a"])
                np.testing.assert_array_equal(labels, y[rows])
                np.testing.assert_allclose(weight, expected[rows], rtol=1e-6)
            assert shared.arguments["class_weight"] is None
    assert sorted(seen) == sorted([*range(40), *range(40)])


def test_arrays_of_the_backend_and_of_scipy_are_cut_by_rows():
    sparse = pytest.importorskip("scipy.sparse")
    rows = np.arange(1, 13, dtype="float32")
    x = {"own": keras.ops.convert_to_tensor(rows), "sparse": sparse.csr_matrix(np.diag(rows))}
    seen = []
    for shared in shared_by_all(lambda: {"x": x, "y": rows, "batch_size": 4}, 2):
        data = shared.arguments["x"]
        names = {"tensorflow": "__iter__", "jax": "get_jax_iterator"}
        for inputs, y in getattr(data, names.get(BACKEND, "get_torch_dataloader"))():
            own, labels = keras.ops.convert_to_numpy(inputs["own"]), keras.ops.convert_to_numpy(y)
            dense = keras.ops.convert_to_numpy(inputs["sparse"])
            np.testing.assert_array_equal(own, labels)
            np.testing.assert_array_equal(np.asarray(dense).sum(axis=1), labels)
            seen += labels.astype(int).tolist()
    assert sorted(seen) == list(range(1, 13))


def test_labels_of_the_backends_arrays_divide_rows_by_class():
    labels = keras.ops.convert_to_tensor(np.repeat(np.arange(4), 6))
    assert labels_of(labels, 24, "class").tolist() == np.repeat(np.arange(4), 6).tolist()


def test_fit_trains_on_the_parts_and_evaluates_the_whole_validation():
    """Keras' fit takes the data set, builds the model from it and reads each epoch's rows."""
    x = np.arange(22, dtype="float32")[:, None]
    data = {"x": x, "y": x, "batch_size": 6, "validation_split": 0.1, "epochs": 4}
    for shared in shared_by_all(lambda: dict(data), 3):
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        steps = []
        count = keras.callbacks.LambdaCallback(
            on_train_batch_end=lambda batch, logs, to=steps: to.append(batch)
        )
        arguments = {**shared.arguments, "callbacks": [count], "initial_epoch": 1, "verbose": 0}
        history = model.fit(**arguments)
        assert len(history.history["val_loss"]) == 3
        # 19 rows in batches of 6: the last batch has one row, of worker 1
        assert len(steps) == 3 * (4 - shared.short_by)


# -- PyDataset -------------------------------------------------------------------------------------


class Batches(keras.utils.PyDataset):
    """Batches of the numbers 0..total-1."""

    def __init__(self, total, size, order_by=None):
        super().__init__()
        self.order, self.size, self.order_by = np.arange(total), size, order_by

    def __len__(self):
        return math.ceil(len(self.order) / self.size)

    def __getitem__(self, index):
        rows = self.order[index * self.size : (index + 1) * self.size].astype("float32")
        return rows[:, None], rows

    def on_epoch_end(self):
        if self.order_by is not None:
            self.order = self.order_by(self.order)


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("batch", ["global", "worker"])
@pytest.mark.parametrize(("total", "num_workers", "size"), [(24, 2, 6), (23, 3, 4), (25, 4, 6)])
def test_the_parts_of_a_py_dataset_are_the_scripts(total, num_workers, size, batch, shuffle):
    def arguments():
        return {"x": Batches(total, size), "shuffle": shuffle}

    everyone = shared_by_all(arguments, num_workers, batch=batch)
    read = [epochs_of(shared.arguments, 3, builds=True) for shared in everyone]
    again = [epochs_of(s.arguments, 3) for s in shared_by_all(arguments, num_workers, batch=batch)]
    assert read == again
    for epoch in range(3):
        parts = [mine[epoch] for mine in read]
        rows = [row for mine in parts for step in mine for row in step]
        assert sorted(rows) == list(range(total))
        if not shuffle and batch == "global":
            for step in range(math.ceil(total / size)):
                expected = list(range(step * size, min(total, (step + 1) * size)))
                assert together(parts, step) == expected


# -- Ray -------------------------------------------------------------------------------------------


class RayRows:
    """The used part of a ray.data.Dataset, in memory."""

    def __init__(self, total):
        self.rows = np.arange(total)
        options = types.SimpleNamespace(preserve_order=False)
        self.context = types.SimpleNamespace(execution_options=options)

    def columns(self):
        return ["a", "label"]

    def count(self):
        return len(self.rows)

    def iter_batches(self, batch_size, batch_format):
        for start in range(0, len(self.rows), batch_size):
            rows = self.rows[start : start + batch_size]
            yield {"a": rows.astype("float32"), "label": rows * 2.0}

    def take_batch(self, batch_size, batch_format):
        return next(self.iter_batches(batch_size, batch_format))


@pytest.mark.parametrize("more", [{"batch": "global"}, {"batch": "worker"}, {"shard": "off"}])
def test_the_parts_of_a_ray_dataset_are_the_scripts(more, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray.data", types.SimpleNamespace(Dataset=RayRows))

    def arguments():
        return {"x": RayRows(22), "y": "label", "batch_size": 7}

    everyone = shared_by_all(arguments, 3, **more)
    read = [epochs_of(shared.arguments, 2, builds=True) for shared in everyone]
    assert read == [epochs_of(s.arguments, 2) for s in shared_by_all(arguments, 3, **more)]
    for epoch in range(2):
        parts = [mine[epoch] for mine in read]
        if "shard" in more:
            assert all(
                [row for batch in mine for row in batch] == list(range(22)) for mine in parts
            )
            continue
        window = 7 if more["batch"] == "global" else 21
        for step in range(math.ceil(22 / window)):
            whole = list(range(step * window, min(22, (step + 1) * window)))
            assert together(parts, step) == whole
        longest = max(map(len, parts))
        assert [longest - len(mine) for mine in parts] == [shared.short_by for shared in everyone]


# -- rows of a batch -------------------------------------------------------------------------------


def test_the_rows_of_a_batch_are_counted_and_taken():
    rows, sizes = (keras.ops.convert_to_tensor(np.zeros((n, 2), "float32")) for n in (8, 3))
    batch = ({"a": sizes, "image": [rows]}, (rows, rows))
    assert num_rows(batch) == 8 and int(count_rows(batch)) == 8
    assert isinstance(count_rows(batch), int) is (BACKEND != "tensorflow")
    assert arrays_of_rows(batch) == (False, True, True, True)
    x, y = map_rows(lambda array: array[::2], batch)
    assert [len(x["a"]), len(x["image"][0]), len(y[0]), len(y[1])] == [3, 4, 4, 4]


def test_a_script_takes_its_part_of_the_backends_arrays():
    data = {"a": keras.ops.arange(20), "b": [np.arange(20)]}, list(range(20))
    parts = [part_of_data(data, place) for place in places(3)]
    assert sorted(int(row) for part in parts for row in part[1]) == list(range(20))
    for inputs, labels in parts:
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(inputs["a"]), labels)
        np.testing.assert_array_equal(inputs["b"][0], labels)
