"""Real runs of scripts in one process: a PS without a model, and workers in threads."""

import contextlib
import threading
import time
from typing import NamedTuple

import keras
import numpy as np

from tests.threads.offered import offered_run
from tests.waiting import patience
from thinwire import W_global, distribute
from thinwire.worker.script import RECORD

RNG = np.random.default_rng(3)
X = RNG.normal(size=(96, 6)).astype(np.float32)
Y = (X @ RNG.normal(size=(6, 4))).argmax(1).astype(np.int32)
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
BATCH = 24


class Batches(keras.utils.PyDataset):
    """Batches of 20 rows; the last has 16."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        rows = slice(20 * index, 20 * index + 20)
        return X[rows], Y[rows]


def plain_model(name="toy"):
    """Return a model without batch normalisation, always with the same names and weights."""
    W_global.clear()
    return keras.Sequential(
        [
            keras.Input((6,), name="in"),
            keras.layers.Dense(8, activation="tanh", name="hidden", kernel_initializer=_initial(1)),
            keras.layers.Dense(4, name="logits", kernel_initializer=_initial(2)),
        ],
        name=name,
    )


def _initial(seed):
    return keras.initializers.GlorotUniform(seed=seed)


class Scripts:
    """The workers' scripts of one run.

    Attributes:
        shards: Shards of the run, once they have a model.
    """

    def __init__(self, run, settings):
        self._run, self._settings = run, settings
        self.shards = run.shards

    def each(self, script, nb_workers=None):
        """Call script(settings of a worker) in a thread for each worker; return the results."""
        numbers = range(1, (nb_workers or self._settings["nb_workers"]) + 1)
        results, errors, threads = {}, [], []

        def work(number):
            try:
                results[number] = script(self._settings | {"id_worker": number})
            except BaseException as error:  # noqa: BLE001 - raised below
                errors.append(error)

        for number in numbers:
            threads.append(threading.Thread(target=work, args=(number,), daemon=True))
            threads[-1].start()
        deadline = time.monotonic() + patience(90)
        while any(thread.is_alive() for thread in threads):
            if errors:  # the others wait for it, as they do until a launcher ends them
                raise errors[0]
            assert time.monotonic() < deadline, "a script hangs"
            threads[0].join(0.05)
            threads[-1].join(0.05)
        if errors:
            raise errors[0]
        return [results[number] for number in numbers]

    def interrupt(self):
        """End the run so that the same command resumes it; the scripts have ended."""
        self._run.interrupt()

    def fit(self, make, nb_workers=None, **options):
        """Let every worker fit a model that `make` compiles; return models and histories.

        `callbacks` is a function that returns one worker's callbacks.
        """
        options = {"batch_size": BATCH, "shuffle": False, "verbose": 0} | options
        callbacks = options.pop("callbacks", list)

        def script(settings):
            model = distribute(make(), settings)
            history = model.fit(X, Y, callbacks=callbacks(), **options).history
            return model, history

        return self.each(script, nb_workers)


@contextlib.contextmanager
def scripts(folder, method="bsp", nb_workers=1, nb_ps=1, linger_seconds=0.5, **settings):
    """Serve a run; its model comes from its workers.

    A test that reads the final state of a run that has ended gives the shards a long
    `linger_seconds`: a slow machine may need seconds for the steps that a fit still traces.
    """
    RECORD.chief = 1  # the initial value in a process
    RECORD.sessions.clear()  # an earlier test may have had the same free port
    words = {"method": method, "nb_workers": nb_workers} | settings
    on_shards = words | {"linger_seconds": linger_seconds}
    flags = [f"--{name}={value}" for name, value in on_shards.items()]
    with offered_run(folder, *flags, nb_ps=nb_ps) as run:
        for number in range(nb_ps):
            run.listen(number)
        hosts = ",".join(f"127.0.0.1:{port}" for port in run.ports)
        yield Scripts(
            run,
            words
            | {
                "model_from": "worker",
                "ps_hosts": hosts,
                "kernels": "numpy",
                "lease_seconds": 2,
                "reconnect_timeout_seconds": 20,
            },
        )


class Fitted(NamedTuple):
    """The result of one fit: its History, and the weights and the learning rate after it."""

    history: dict
    weights: list
    rate: float


class Fits:
    """The fits of one script, each with a name.

    The fits of one model share its traced step, which takes most of the time of a first fit. So
    tests of `fit` are the stages of one script: a stage costs a third of a separate run.

    Attributes:
        made: Result of each fit, by its name.
    """

    def __init__(self):
        self.made = {}

    def fit(self, name, model, **options):
        """Fit a model, on X and Y if nothing else is given."""
        usual = {} if "x" in options else {"x": X, "y": Y, "batch_size": BATCH, "shuffle": False}
        try:
            history = model.fit(**({"verbose": 0} | usual | options)).history
        except Exception as error:
            error.add_note(f"in the fit {name!r}")
            raise
        rate = float(model.optimizer.learning_rate)
        self.made[name] = Fitted(history, model.get_weights(), rate)


def runs_of(folder, script, method="bsp", nb_workers=2, **settings):
    """Run script(distribute, fits) with Keras alone and on each worker of a run.

    Returns:
        Results of Keras alone by the fit's name, and the same results of each worker.
    """

    def run_script(place):
        fits = Fits()
        script(place, fits)
        return fits.made

    expected = run_script(built)
    with scripts(folder, method, nb_workers, **settings) as run:
        return expected, run.each(lambda own: run_script(lambda each: distribute(each, own)))


def alone_and_shared(*how, **options):
    """Call `runs_of` and pair the results.

    Returns:
        For each fit's name, the result of Keras alone and a list of the workers' results.
    """
    expected, workers = runs_of(*how, **options)
    return {name: (known, [fits[name] for fits in workers]) for name, known in expected.items()}


def alone(make, **options):
    """Return a model that Keras alone has trained, and its history."""
    options = {"batch_size": BATCH, "shuffle": False, "verbose": 0} | options
    model = built(make())
    return model, model.fit(X, Y, **options).history


def built(model):
    """Create what Keras creates within the first step of a compiled model; return the model.

    TensorFlow traces a step twice where the first trace creates variables.
    """
    if not isinstance(model, keras.Sequential) or not model.built:
        return model
    model.optimizer.build(model.trainable_variables)
    metrics = model._compile_metrics
    # The first epoch of the script's own metrics may begin with other states than the next ones.
    if metrics is not None and all(isinstance(each, str) for each in metrics._user_metrics):
        metrics.build(Y, model.outputs[0])
    return model


def assert_same(model, other, atol=1e-5):
    """Compare all trainable values."""
    for mine, theirs in zip(model.trainable_variables, other.trainable_variables, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=atol, err_msg=mine.path)


def assert_weights(weights, expected, atol=1e-5):
    """Compare the values of get_weights()."""
    for number, (mine, theirs) in enumerate(zip(weights, expected, strict=True)):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=atol, err_msg=f"weight {number}")
