"""Advice for a script: measurements of `fit`, the stand-in for its model, and the proposal."""

import os
import pathlib
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.command_line import given
from tests.thinwire.advisor.test_predict import dense_rounds, sparse_rounds
from tests.thinwire.simulator.toy import run_of
from tests.virtual.toy import KERNELS, method
from thinwire.advisor import measure as links
from thinwire.advisor import predict, role, script
from thinwire.flags.run import read_run
from thinwire.models.flat_model import SharedModel
from thinwire.models.measured import MeasuredModel, load
from thinwire.ops.types import ConfigurationError, ModelSpec, TensorSpec
from thinwire.runtime.run.settings import ModelChoice
from thinwire.runtime.telemetry import predictions
from thinwire.script.keras import measure

SCRIPT = """
import sys
import keras
import numpy as np
import thinwire

tokens = np.arange(400).reshape(40, 10) % 50
labels = np.arange(40) % 2
model = keras.Sequential([
    keras.layers.Embedding(50, 8), keras.layers.GlobalAveragePooling1D(), keras.layers.Dense(2),
])
model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model = thinwire.distribute(model)
keep = keras.callbacks.ModelCheckpoint(sys.argv[1] + "/kept.keras")
model.fit(tokens, labels, batch_size=8, epochs=2, validation_split=0.2, callbacks=[keep])
model.save(sys.argv[1] + "/saved.keras")
"""


class Exited(Exception):
    pass


@pytest.fixture
def ends(monkeypatch):
    def end(code):
        raise Exited(code)

    monkeypatch.setattr(os, "_exit", end)


def toy(optimizer="adam", **options):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.Dense(2)])
    model.compile(optimizer, "mse", **options)
    return model


def measured(model, path, *arguments, **keywords):
    measure.measure_fit(model, path)
    with pytest.raises(Exited):
        model.fit(*arguments, **keywords)
    return load(path)


#: Enough rows for most of the steps: a new iterator takes as long as a step.
X, Y = np.ones((240, 4), np.float32), np.zeros((240, 2), np.float32)


@pytest.mark.parametrize("options", [{}, {"run_eagerly": True}, {"steps_per_execution": 4}])
def test_a_fit_measures_a_few_steps_and_ends_the_process(tmp_path, ends, options):
    calls = []
    callback = keras.callbacks.LambdaCallback(on_train_begin=calls.append)
    model = toy(**options)
    keywords = {"batch_size": 8, "epochs": 1, "callbacks": [callback], "validation_data": (X, Y)}
    found = measured(model, tmp_path / "found.npz", X, Y, **keywords)
    assert (found.rows, found.optimizer, found.embedding_share) == (8, "Adam", 0.0)
    assert [each.shape for each in found.spec.tensors] == [(4, 3), (3,), (3, 2), (2,)]
    assert len(found.gradients) == 8 and found.gradients[0].shape == found.weights.shape == (23,)
    assert found.num_steps >= 27 and 0 < found.step_seconds < 5
    assert calls == []  # the script's own callbacks may write files


def test_gradients_are_those_of_the_scripts_own_steps(tmp_path, ends):
    model = toy(keras.optimizers.SGD(0.0))
    before = model.get_weights()
    found = measured(model, tmp_path / "found.npz", X, Y, batch_size=24)
    with tf.GradientTape() as tape:
        loss = keras.ops.mean(keras.ops.square(model(X) - Y))
    expected = tape.gradient(loss, [each.value for each in model.trainable_variables])
    flat = np.concatenate([np.ravel(each) for each in expected])
    np.testing.assert_allclose(found.gradients[0], flat, rtol=1e-5)
    np.testing.assert_array_equal(found.weights, np.concatenate([w.ravel() for w in before]))


def test_datasets_embeddings_and_scaled_losses_are_measured(tmp_path, ends):
    layers = [keras.layers.Embedding(50, 8), keras.layers.Flatten(), keras.layers.Dense(2)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.RMSprop()), "mse")
    data = tf.data.Dataset.from_tensor_slices((np.ones((20, 5), np.int32), Y[:20])).batch(5)
    found = measured(model, tmp_path / "found.npz", data, steps_per_epoch=2)
    assert (found.rows, found.optimizer) == (5, "RMSprop")
    assert found.embedding_share == pytest.approx(400 / 482)
    assert np.abs(found.gradients[0]).max() < 10  # not times 2**15


def write_measured(path):
    """Write the files of a script's `fit`."""
    generator, zeros = np.random.default_rng(1), np.zeros(24, np.float32)
    gradients = [generator.normal(size=24).astype(np.float32) for _ in range(2)]
    spec = ModelSpec((TensorSpec("dense/kernel", (6, 4)),))
    MeasuredModel("toy", spec, 8, 0.1, 5, "Adam", 0.5, zeros, zeros[:0], gradients).store(path)


@pytest.fixture
def advise(monkeypatch, tmp_path):
    """Return an advisor for a script with a finished measurement and two candidates."""
    program = tmp_path / "train.py"
    program.write_text("")

    def measure_here(run, words, folder):
        assert words[0] == str(program)
        path = folder / "found.npz"
        write_measured(path)
        return load(path)

    def play(run, which, seconds):
        assert run.model.path.endswith("stand_in.py") and run.batch_size == 8
        rounds = {"dense": dense_rounds(), "sparse": sparse_rounds()}[which.name]
        return {1: rounds, 2: rounds}

    methods = ("--method=asgd",), ("--method=adacomp",)
    chosen = tuple(each for each in predict.CANDIDATES if each.flags[:1] in methods)
    chosen = chosen[0], chosen[-1]
    monkeypatch.setattr(script, "measure", measure_here)
    monkeypatch.setattr(links, "play", play)
    monkeypatch.setattr(script, "load_kernels", lambda *unused, **more: KERNELS)
    monkeypatch.setattr(predict.trials, "__defaults__", (chosen, predict.FLAGS, None))

    def advise(*flags, words=()):
        folder = f"--run_dir={tmp_path / 'run'}"
        with given("--type_node=Advisor", "--nb_workers=2", folder, *flags):
            own = script.complete_flags([str(program), *words])
            return script.main(read_run(), own)

    return advise


def test_a_script_is_advised_on_with_a_command_that_runs_it(advise, tmp_path, capsys):
    assert advise("--link_mbps=20", "--advise_pushes=8", words=["--epochs=3"]) == 0
    command = capsys.readouterr().out.splitlines()[-1]
    assert command.startswith("thinwire run --nb_workers=2 ")
    assert command.endswith(f"{tmp_path / 'train.py'} --epochs=3")
    for absent in ("--model", "--batch_size", "--step_seconds", "--advise_pushes"):
        assert absent not in command
    found = predictions.load(tmp_path / "run" / predictions.ADVICE_FILE)
    assert found.script == [str(tmp_path / "train.py"), "--epochs=3"]
    adacomp = found.predicted[1].prediction
    assert adacomp.bytes_down_per_pull > 4 * 24  # Adam on the PS changes every entry


@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        (["--method=bsp"], 2),
        (["--method=bsp", "--batch=worker"], 1),
        (["--method=bsp", "--shard=off"], 1),
        (["--method=asgd"], 1),
        (["--method=asgd", "--batch=global"], 2),
        (["--method=esync"], 1),
    ],
)
def test_workers_that_step_together_divide_the_batch(flags, parts):
    with given("--type_node=Advisor", "--nb_workers=2", *flags):
        assert script._ScriptModel([]).parts_of_batch(read_run()) == parts


def test_a_part_of_a_batch_takes_a_part_of_a_step():
    seen = []

    class Played:
        def coding_seconds(self, run):
            return 0.0

        def predict(self, run, links, coding_seconds):
            seen.extend(link.step_seconds for link in links)
            return predictions.Prediction(1.0, 64.0, 1.0, 1.0)

    run = run_of(method("bsp"), 2)
    trial = predict.RunnableCandidate(predict.CANDIDATES[0], run, run)
    link = predictions.WorkerLink(1, 0.4, 0.0, 0.0, 0.0, 1)
    row = role._predict(Played(), trial, [link], 4, 0.8)
    assert seen == [0.1] and row.prediction.samples_per_second == 16.0


def test_advice_on_another_script_is_not_repeated(advise):
    assert advise("--advise_pushes=8") == 0
    assert advise("--advise_pushes=8") == 0
    with pytest.raises(ConfigurationError, match="--overwrite"):
        advise("--advise_pushes=8", words=["--other"])


@pytest.mark.parametrize("flag", ["--network=lenet", "--batch_size=4", "--top5"])
def test_flags_that_a_script_brings_itself_are_refused(advise, flag):
    with pytest.raises(ConfigurationError, match=flag.partition("=")[0]):
        advise(flag)


def test_the_stand_in_has_the_scripts_tensors_and_a_lasting_gradient(tmp_path):
    write_measured(tmp_path / "found.npz")
    found = load(tmp_path / "found.npz")
    path = script.write_stand_in(found, 2, tmp_path)
    shared = SharedModel(ModelChoice("", str(path), 1, 1, 2), 1)
    assert [each.shape for each in shared.spec.tensors] == [(6, 4)]
    (inputs, labels), _ = shared.user_module.load_data()
    assert len(inputs) == len(labels) == 64
    with tf.GradientTape() as tape:
        loss = shared.model.loss(labels, shared.model(inputs))
    (gradient,) = tape.gradient(loss, [each.value for each in shared.variables])
    assert np.count_nonzero(gradient) == 24


@pytest.mark.processes
@pytest.mark.product
def test_a_script_is_measured_without_side_effects(tmp_path):
    path, files = tmp_path / "train.py", tmp_path / "files"
    path.write_text(SCRIPT)
    files.mkdir()
    found = script.measure(run_of(method("asgd"), 2), [str(path), str(files)], tmp_path)
    assert (found.rows, found.optimizer, found.spec.num_parameters) == (8, "Adam", 418)
    assert list(files.iterdir()) == []
    assert not (tmp_path / "settings").exists()


@pytest.mark.product
@pytest.mark.processes
@pytest.mark.parametrize(
    ("text", "why"),
    [("raise ValueError('no data here')", "no data here"), ("print('done')", "distribute")],
)
def test_a_script_that_cannot_be_measured_is_explained(tmp_path, text, why):
    path = tmp_path / "train.py"
    path.write_text(text)
    with pytest.raises(ConfigurationError, match=why):
        script.measure(run_of(method("asgd"), 2), [str(path)], tmp_path)


@pytest.mark.product
def test_the_command_takes_a_script_and_names_one_that_is_missing(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "thinwire", "advise", f"--run_dir={tmp_path}", "missing.py", "--x"],
        capture_output=True,
        text=True,
        check=False,
        cwd=pathlib.Path(__file__).resolve().parents[3],
    )
    assert done.returncode == 2
    assert "missing.py is no file" in done.stderr
