"""Tasks: exact metrics against simple numpy, label checks, and compatible flags."""

import re

import keras
import numpy as np
import pytest

from tests import documents
from thinwire.data import registry
from thinwire.data.readers import synthetic
from thinwire.models import scores
from thinwire.models.loss import ensure_compiled_loss
from thinwire.models.tasks import TASKS, check_choice
from thinwire.ops.types import ConfigurationError
from thinwire.supervisor.evaluator import Evaluator

RNG = np.random.default_rng(4)


def model_of(*layers, shape=(6,), dtype="float32"):
    keras.utils.set_random_seed(2)
    return keras.Sequential([keras.Input(shape, dtype=dtype), *layers])


def evaluated(task, model, inputs, labels, batch_size):
    row = TASKS[task]
    made = row.labels.read(labels, inputs)
    loss = ensure_compiled_loss(model, row)
    evaluator = Evaluator(model, loss, inputs, made, batch_size, row)
    found = evaluator.evaluate(model.get_weights())
    assert evaluator._run_batch.experimental_get_tracing_count() == 1
    return found, np.asarray(model(inputs), np.float64)


@pytest.mark.parametrize("batch_size", [1, 5, 23, 1000])
def test_regression(batch_size):
    inputs = RNG.normal(size=(23, 6)).astype("f4")
    labels = (5 + RNG.normal(size=(23, 2))).astype("f4")
    found, outputs = evaluated(
        "regression", model_of(keras.layers.Dense(2)), inputs, labels, batch_size
    )
    error = outputs - labels
    assert found["mae"] == pytest.approx(np.abs(error).mean(), rel=1e-6)
    assert found["rmse"] == pytest.approx(np.sqrt((error**2).mean()), rel=1e-6)
    around = ((labels - labels.mean(0, dtype=float)) ** 2).sum()
    assert found["r2"] == pytest.approx(1 - (error**2).sum() / around, rel=1e-5)
    assert found["loss"] == pytest.approx((error**2).mean(), rel=1e-5)
    assert list(found) == ["mae", "rmse", "r2", "loss"]


def test_numbers_of_one_dimension_have_one_output():
    inputs, labels = np.ones((4, 6), "f4"), np.arange(4.0)
    found, outputs = evaluated("regression", model_of(keras.layers.Dense(1)), inputs, labels, 3)
    assert found["mae"] == pytest.approx(np.abs(outputs[:, 0] - labels).mean(), rel=1e-6)
    with pytest.raises(ConfigurationError, match=r"outputs of shape \(2,\).*labels.* shape \(1,\)"):
        evaluated("regression", model_of(keras.layers.Dense(2)), inputs, labels, 3)


@pytest.mark.parametrize("batch_size", [4, 23])
@pytest.mark.parametrize("activation", [None, "sigmoid"])
def test_multilabel(batch_size, activation):
    inputs = RNG.normal(size=(23, 6)).astype("f4")
    labels = RNG.integers(0, 2, size=(23, 3))
    labels[:, 2] = 0
    model = model_of(keras.layers.Dense(3, activation=activation))
    found, outputs = evaluated("multilabel", model, inputs, labels, batch_size)
    given, wanted = outputs > (0.5 if activation else 0), labels > 0
    both = (given & wanted).sum(0)
    either = given.sum(0) + wanted.sum(0)
    assert found["f1"] == pytest.approx(2 * both.sum() / either.sum())
    each = [2 * b / e if e else 0.0 for b, e in zip(both, either, strict=True)]
    assert found["f1_macro"] == pytest.approx(np.mean(each))
    assert found["exact_match"] == (given == wanted).all(1).mean()
    assert found["accuracy"] == pytest.approx((given == wanted).mean())
    shares = outputs if activation else 1 / (1 + np.exp(-outputs))
    entropy = -np.where(wanted, np.log(shares), np.log(1 - shares)).mean()
    assert found["loss"] == pytest.approx(entropy, rel=1e-5)


def test_labels_that_nobody_has_or_gives():
    inputs, labels = np.zeros((3, 6), "f4"), np.zeros((3, 2))
    model = model_of(keras.layers.Dense(2, bias_initializer=keras.initializers.Constant(-1)))
    found, _ = evaluated("multilabel", model, inputs, labels, 2)
    assert (found["f1"], found["f1_macro"], found["exact_match"]) == (0.0, 0.0, 1.0)


@pytest.mark.parametrize("batch_size", [2, 7])
def test_autoencoder(batch_size):
    inputs = RNG.normal(size=(7, 4, 4, 1)).astype("f4")
    model = model_of(
        keras.layers.Flatten(),
        keras.layers.Dense(16),
        keras.layers.Reshape((4, 4, 1)),
        shape=(4, 4, 1),
    )
    found, outputs = evaluated("autoencoder", model, inputs, None, batch_size)
    error = outputs - inputs
    assert found["mae"] == pytest.approx(np.abs(error).mean(), rel=1e-6)
    around = ((inputs - inputs.mean(0, dtype=float)) ** 2).sum()
    assert found["r2"] == pytest.approx(1 - (error**2).sum() / around, rel=1e-5)
    assert found["loss"] == pytest.approx((error**2).mean(), rel=1e-5)


@pytest.mark.parametrize("batch_size", [2, 9])
def test_tokens(batch_size):
    inputs = RNG.integers(0, 5, size=(9, 6)).astype("i4")
    labels = RNG.integers(0, 5, size=(9, 6))
    layers = keras.layers.Embedding(5, 3), keras.layers.Dense(5)
    model = model_of(*layers, shape=(None,), dtype="int32")
    found, outputs = evaluated("tokens", model, inputs, labels, batch_size)
    logs = outputs - np.log(np.exp(outputs).sum(-1, keepdims=True))
    entropy = -np.take_along_axis(logs, labels[..., None], -1).mean()
    assert found["perplexity"] == pytest.approx(np.exp(entropy), rel=1e-5)
    assert found["loss"] == pytest.approx(entropy, rel=1e-5)
    assert found["accuracy"] == (outputs.argmax(-1) == labels).mean()


@pytest.mark.parametrize(
    ("entropy", "perplexity"), [(1000.0, np.inf), (np.nan, np.nan), (np.inf, np.inf)]
)
def test_the_perplexity_of_a_diverged_model(entropy, perplexity):
    sums = {"right": np.float64(1), "entropy": np.float64(entropy), "all": np.float64(1)}
    found = scores.TOKENS.values(sums)["perplexity"]
    assert found == perplexity or (np.isnan(found) and np.isnan(perplexity))


@pytest.mark.parametrize(
    ("task", "labels", "message"),
    [
        ("classification", [0.5, 1.0], r"float64.*\(2,\).*argmax"),
        ("classification", [-1, 1], "negative value -1"),
        ("regression", [[[1.0]], [[2.0]]], "numbers of shape"),
        ("regression", [1.0, np.nan], "NaN"),
        ("regression", ["a", "b"], "numbers of shape"),
        ("multilabel", [0, 1], "0 or 1 for each label"),
        ("multilabel", [[0, 2], [1, 0]], "values other than 0 and 1"),
        ("tokens", [[0.0], [1.0]], "integer token numbers"),
        ("tokens", [1, 2], "integer token numbers"),
    ],
)
def test_labels_of_another_form_are_refused(task, labels, message):
    with pytest.raises(ValueError, match=message):
        TASKS[task].labels.read(labels, np.zeros((2, 3), "f4"))


@pytest.mark.parametrize("task", TASKS)
def test_the_built_in_examples_fit_their_task(task):
    row = TASKS[task]
    name = row.datasets[0] if row.datasets[0] == "synthetic" else "synthetic"
    made = [
        registry.load(name, None, 12, 1, row.nb_classes, None, seed, task=row) for seed in (3, 3, 4)
    ]
    first, again, other = (each.train_images for each in made)
    np.testing.assert_array_equal(first, again)
    assert first.dtype == row.inputs and (first != other).any()
    assert (len(first), len(made[0].test_images)) == (4000, 1000)
    np.testing.assert_array_equal(
        row.labels.read(made[0].train_labels, first), made[0].train_labels
    )
    assert made[0].train_labels.dtype == row.labels.dtype
    assert (made[0].train_labels is first) == row.labels.are_inputs
    assert (made[0].classes.ndim == 1) == row.has_classes


def test_every_task_has_a_generator_and_a_line_in_the_docs():
    assert synthetic.GENERATORS.keys() == TASKS.keys()
    text = (documents.ROOT / "docs" / "reference/models_and_data.md").read_text(encoding="utf-8")
    table = documents.rows(text, "`--task`", "labels", "loss", "metrics", "networks", "data")
    assert [re.findall(r"`(\w+)`", row[0])[0] for row in table] == list(TASKS)
    for row in TASKS.values():
        assert row.networks and row.datasets and row.goal.metric


def test_what_does_not_go_together_is_refused():
    for row in TASKS.values():
        check_choice(row.name, row.networks[0], row.datasets[0], row.nb_classes)
        check_choice(row.name, None, row.datasets[0], row.nb_classes)
    with pytest.raises(ConfigurationError, match="network=cnn .*--task=classification or reg"):
        check_choice("tokens", "cnn", "synthetic", 64)
    with pytest.raises(ConfigurationError, match=r"dataset=mnist.*expected --dataset=synthetic"):
        check_choice("regression", "mlp", "mnist", 1)
    with pytest.raises(ConfigurationError, match="at least 2"):
        check_choice("classification", "mlp", "mnist", 1)
