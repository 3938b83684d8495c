"""Each cell of the table of docs/reference/backends.md is compared with a probe on its backend."""

import importlib.util
import pathlib
import re

import keras
import numpy as np
import pytest
from keras import layers

from tests.backends.fits import BATCH, LOSS, X, Y, compiled, network, scripts
from tests.backends.train_steps import Twice, loop, sgd
from tests.thinwire.script.keras.runs import Batches
from thinwire import ConfigurationError, distribute

PAGE = pathlib.Path(__file__).resolve().parents[2] / "docs" / "reference" / "backends.md"
BACKEND = keras.backend.backend()
HAS_TENSORFLOW = importlib.util.find_spec("tensorflow") is not None
HAS_TORCH = importlib.util.find_spec("torch") is not None


def cells():
    """Return the text of the present backend's cell for each row of the page's table."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("|")]
    rows = [line.removeprefix("|").removesuffix("|").split("|") for line in lines]
    rows = [[cell.strip() for cell in row] for row in rows]
    start = next(number for number, row in enumerate(rows) if row[0] == "in a script")
    column = rows[start].index(f"`{BACKEND}`")
    table = {}
    for row in rows[start + 2 :]:
        if len(row) <= column or row[0] == "process":
            break
        table[row[0]] = row[column]
    return table


class Probe:
    """A run of one worker of bsp, in which a probe trains."""

    def __init__(self, folder):
        self._folder = folder

    def train(self, script, **settings):
        """Call script(settings) in a worker; return what it returns."""
        with scripts(self._folder, "bsp", 1, **settings) as run:
            return run.each(script)[0]

    def fit(self, make=None, x=X, y=Y, **options):
        """Fit a distributed model for an epoch; return the model."""
        sized = {} if y is None else {"batch_size": BATCH}

        def script(settings):
            model = distribute((make or compiled(sgd))(), settings, **options)
            model.fit(x, y, verbose=0, **sized)
            assert model.thinwire.num_exchanges >= 4
            return model

        return self.train(script)


def refused(call, *errors):
    """Return True if a call raises one of the errors."""
    try:
        call()
    except (ConfigurationError, *errors):
        return True
    return False


def train_on_batch(probe):
    def script(settings):
        model = distribute(compiled(sgd)(), settings)
        model.train_on_batch(X[:BATCH], Y[:BATCH])
        return model.thinwire.num_exchanges == 1

    return "yes" if probe.train(script) else "no"


def own_train_step(probe):
    """A train_step that steps once works everywhere; here one that steps twice."""
    is_refused = refused(lambda: probe.fit(compiled(sgd, kind=Twice, metrics=())))
    return "one optimizer that steps once; several steps are refused" if is_refused else "yes"


def run_loop(probe, *middle):
    def script(settings):
        model, optimizer = network(*(layer() for layer in middle)), sgd()
        optimizer = distribute(optimizer, settings, model=model)
        loop(model, optimizer, [(X[:BATCH], Y[:BATCH])] * 3)
        return optimizer.thinwire.num_exchanges

    return probe.train(script)


def own_loop(probe):
    assert run_loop(probe) >= 2
    return "`optimizer.stateless_apply` inside `jax.jit`" if BACKEND == "jax" else "yes"


def statistics_in_a_loop(probe):
    is_refused = refused(lambda: run_loop(probe, layers.BatchNormalization), RuntimeError)
    return "only with `--bn_sync=false`" if is_refused else "yes"


def statistics_in_fit(probe):
    model = probe.fit(compiled(sgd, layers.BatchNormalization))
    return "yes" if np.any(model.layers[1].moving_mean.numpy()) else "no"


def scaled_loss(probe):
    def make():
        model = network()
        scaled = keras.optimizers.LossScaleOptimizer(sgd(), initial_scale=64.0)
        model.compile(scaled, loss=LOSS)
        return model

    probe.fit(make)
    return "yes"


def summed_loss(probe):
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="sum")
    probe.fit(compiled(lambda: keras.optimizers.SGD(0.001), loss=loss))
    return "yes"


class Ones(keras.metrics.Metric):
    """A metric of the script's own."""

    def __init__(self):
        super().__init__(name="ones")
        self.total = self.add_weight(name="total", initializer="zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        self.total.assign_add(1.0)

    def result(self):
        return self.total.value


def own_metric(probe):
    model = probe.fit(compiled(sgd, metrics=(Ones,)))
    return "yes" if model.history.history["ones"] == [4.0] else "no"


def several_steps(probe):
    def make():
        model = network()
        model.compile(sgd(), loss=LOSS, steps_per_execution=2)
        return model

    return "refused by Keras" if refused(lambda: probe.fit(make), ValueError) else "yes"


def jit_compile(probe):
    def make():
        model = network()
        model.compile(sgd(), loss=LOSS, jit_compile=True)
        return model

    return "kept" if probe.fit(make).jit_compile else "switched off"


def dataset(probe):
    if not HAS_TENSORFLOW:
        return "if TensorFlow is installed"
    import tensorflow as tf

    probe.fit(x=tf.data.Dataset.from_tensor_slices((X, Y)).batch(BATCH), y=None)
    return "yes" if BACKEND == "tensorflow" else "if TensorFlow is installed"


def loader(probe):
    if HAS_TORCH:
        import torch

        rows = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
        probe.fit(x=torch.utils.data.DataLoader(rows, batch_size=BATCH), y=None)
    return "yes" if BACKEND == "torch" else "if torch is installed"


def multi_device(probe):
    if BACKEND != "jax":
        return ""

    def script(settings):
        # Keras keeps its distribution for each thread
        devices = keras.distribution.list_devices()
        keras.distribution.set_distribution(keras.distribution.DataParallel(devices=devices))
        return refused(lambda: distribute(compiled(sgd)(), settings))

    return "refused" if probe.train(script) else "yes"


def callbacks(probe):
    def script(settings):
        model = distribute(compiled(sgd)(), settings)
        stopping = keras.callbacks.EarlyStopping(monitor="loss", restore_best_weights=True)
        history = model.fit(X, Y, batch_size=BATCH, epochs=2, verbose=0, callbacks=[stopping])
        return len(history.history["loss"]) == 2

    return "yes" if probe.train(script) else "no"


def yes(call):
    """Return a probe that is "yes" if a call of it with the `Probe` does not fail."""

    def probe(place):
        call(place)
        return "yes"

    return probe


PROBES = {
    "`fit`": yes(lambda probe: probe.fit()),
    "`train_on_batch`": train_on_batch,
    "own `train_step`": own_train_step,
    "own loop (`thinwire.distribute(optimizer, model=model)`)": own_loop,
    "BatchNormalization in an own loop": statistics_in_a_loop,
    "BatchNormalization in `fit`, with `--bn_sync`": statistics_in_fit,
    "mixed precision with loss scaling": scaled_loss,
    "losses that are sums over rows, `add_loss`": summed_loss,
    "own metrics": own_metric,
    "`steps_per_execution`": several_steps,
    "`jit_compile`": jit_compile,
    "arrays": yes(lambda probe: probe.fit()),
    "`PyDataset`": yes(lambda probe: probe.fit(x=Batches(), y=None)),
    "`tf.data`": dataset,
    "torch `DataLoader` with indices": loader,
    "`keras.distribution`": multi_device,
    "Keras' callbacks": callbacks,
}
#: Rows whose cells other tests check, or which are not about training.
ELSEWHERE = {
    "`DataLoader` of an `IterableDataset`",  # test_data_loader
    "Ray data",  # tests/thinwire/script/data/test_ray_data
    "`tf.distribute` scope",  # tests/thinwire/script/keras
    "`tf.train.Checkpoint`",
    "`keras.callbacks.TensorBoard`",
    "`thinwire advise`",  # test_without_tensorflow
    "built-in networks and tasks of `main.py`",  # test_without_tensorflow
}


def test_every_row_of_the_table_is_checked():
    assert set(cells()) == PROBES.keys() | ELSEWHERE
    assert re.search(r"\| `tensorflow` \| `jax` \| `torch` \|", PAGE.read_text())


@pytest.mark.parametrize("row", PROBES)
def test_a_cell_of_the_table_is_true(row, tmp_path):
    assert PROBES[row](Probe(tmp_path)) == cells()[row]
