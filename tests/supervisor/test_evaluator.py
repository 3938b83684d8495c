"""The evaluator counts every example exactly once, for any batch size."""

import queue
import types

import keras
import numpy as np
import pytest

from tests.virtual.toy import SPEC, method
from thinwire.data.pipeline.lazy import Lazy
from thinwire.models.flat_model import SharedModel
from thinwire.ops.types import Block, CodedValues, ConfigurationError
from thinwire.ops.wire.blocks import IndexChooser
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.supervisor.evaluator import Evaluator, ModelFetcher
from thinwire.supervisor.scorer import ModelScorer

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


@pytest.fixture(scope="module")
def model():
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((4, 4, 1)), keras.layers.Flatten(), keras.layers.Dense(3)])


@pytest.fixture(scope="module")
def examples():
    generator = np.random.default_rng(2)
    images = generator.normal(size=(23, 4, 4, 1)).astype(np.float32)
    return images, generator.integers(0, 3, 23).astype(np.int32)


def reference(weights, images, labels):
    """Obvious numpy: softmax cross-entropy and the share of right answers."""
    logits = images.reshape(len(images), -1).astype(np.float64) @ weights[0] + weights[1]
    logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    accuracy = np.mean(logits.argmax(axis=1) == labels)
    return accuracy, -np.mean(logs[np.arange(len(labels)), labels])


@pytest.mark.parametrize("batch_size", [1, 5, 23, 100_000])
def test_the_whole_set_counts_once(model, examples, batch_size):
    weights = [np.random.default_rng(3).normal(size=(16, 3)), np.array([0.1, -0.2, 0.3])]
    evaluator = Evaluator(model, LOSS, *examples, batch_size)
    scores = evaluator.evaluate(weights)
    accuracy, loss = scores["accuracy"], scores["loss"]
    assert list(scores) == ["accuracy", "loss"]
    expected_accuracy, expected_loss = reference(weights, *examples)
    assert accuracy == expected_accuracy
    assert loss == pytest.approx(expected_loss, rel=1e-6)
    assert evaluator._run_batch.experimental_get_tracing_count() == 1


def test_new_weights_do_not_compile_again(model, examples):
    evaluator = Evaluator(model, LOSS, *examples, batch_size=10)
    for scale in (0.0, 1.0, 2.0):
        weights = [np.full((16, 3), scale), np.zeros(3)]
        assert evaluator.evaluate(weights)["accuracy"] == reference(weights, *examples)[0]
    assert evaluator._run_batch.experimental_get_tracing_count() == 1


@pytest.mark.parametrize("loss", [keras.losses.get("sparse_categorical_crossentropy"), LOSS])
def test_functions_and_objects_and_scalars_are_losses(model, examples, loss):
    weights = [np.zeros((16, 3)), np.zeros(3)]
    scalar = Evaluator(model, lambda y, p: 2.5 + 0 * p[0, 0], *examples, 7).evaluate(weights)
    assert scalar["loss"] == pytest.approx(2.5)
    assert Evaluator(model, loss, *examples, 7).evaluate(weights)["loss"] > 0


def test_weights_may_set_themselves(model, examples):
    def set_weights():
        model.set_weights([np.zeros((16, 3)), np.array([0.0, 5.0, 0.0])])

    scores = Evaluator(model, LOSS, *examples, 8).evaluate(set_weights)
    assert scores["accuracy"] == np.mean(examples[1] == 1)


def test_a_diverged_model_has_no_finite_loss(model, examples):
    weights = [np.full((16, 3), np.nan), np.zeros(3)]
    assert np.isnan(Evaluator(model, LOSS, *examples, 8).evaluate(weights)["loss"])


@pytest.mark.parametrize("batch_size", [7, 23])
def test_the_best_five_answers(batch_size):
    generator = np.random.default_rng(6)
    images = generator.normal(size=(23, 4)).astype(np.float32)
    labels = generator.integers(0, 9, 23).astype(np.int32)
    weights = [generator.normal(size=(4, 9)).astype(np.float32), np.zeros(9, np.float32)]
    wide = keras.Sequential([keras.Input((4,)), keras.layers.Dense(9)])
    scores = Evaluator(wide, LOSS, images, labels, batch_size, extras=["top5"]).evaluate(weights)
    best = np.argsort(-(images @ weights[0]), axis=1)
    assert scores["accuracy"] == np.mean(best[:, 0] == labels)
    assert scores["top5_accuracy"] == np.mean((best[:, :5] == labels[:, None]).any(axis=1))
    assert scores["accuracy"] < scores["top5_accuracy"] < 1


def test_five_answers_are_too_few_for_the_best_five(model, examples):
    with pytest.raises(ConfigurationError, match="--top5: .* has 3 classes"):
        Evaluator(model, LOSS, *examples, 8, extras=["top5"]).evaluate(
            [np.zeros((16, 3)), np.zeros(3)]
        )


class Halves(Lazy):
    """Images that are made of an array when they are walked over."""

    def __init__(self, images):
        super().__init__(images.shape)
        self.images = images / 2

    def __getitem__(self, chosen):
        return 2 * self.images[chosen]


@pytest.mark.parametrize("batch_size", [5, 23])
def test_lazy_images_count_once_too(model, examples, batch_size):
    weights = [np.random.default_rng(3).normal(size=(16, 3)), np.array([0.1, -0.2, 0.3])]
    lazy = Evaluator(model, LOSS, Halves(examples[0]), examples[1], batch_size).evaluate(weights)
    assert lazy == Evaluator(model, LOSS, *examples, batch_size).evaluate(weights)


def test_large_layers_cut_the_batch():
    layers = [keras.Input((8,)), keras.layers.Dense(2**16), keras.layers.Dense(2)]
    evaluator = Evaluator(
        keras.Sequential(layers), LOSS, np.zeros((5000, 8), "f4"), np.zeros(5000, "i4"), 100_000
    )
    assert evaluator.batch_size == 2**28 // (4 * (2**16 + 2))


def test_bad_input_is_refused(model, examples):
    images, labels = examples
    with pytest.raises(ConfigurationError, match="23 images and 22 labels"):
        Evaluator(model, LOSS, images, labels[1:], 5)
    with pytest.raises(ConfigurationError, match="0 images"):
        Evaluator(model, LOSS, images[:0], labels[:0], 5)
    with pytest.raises(ConfigurationError, match="--batch_size is 0"):
        Evaluator(model, LOSS, images, labels, 0)
    with pytest.raises(ValueError):
        Evaluator(model, LOSS, images, labels, 5).evaluate([np.zeros(3)])
    flat = keras.Sequential([keras.Input((4, 4, 1)), keras.layers.Flatten(), keras.layers.Dense(1)])
    with pytest.raises(ConfigurationError, match="classes"):
        Evaluator(flat, LOSS, images, labels, 5).evaluate([np.zeros((16, 1)), np.zeros(1)])


class AnsweringShard:
    """A stream to a shard that answers each pull at once."""

    def __init__(self, layout, version, weights, aux=()):
        self.replies, self.session = queue.SimpleQueue(), self
        self.address, self.layout, self.version = "here", layout, version
        self.weights, self.aux = weights, np.asarray(aux, np.float32)

    def send_control(self, message):
        assert message.pull.observe
        self.replies.put(self.reply())

    def reply(self):
        reply = pb.Reply(version=self.version, aux_count=len(self.aux))
        blocks = [
            Block(slot, each.size, None, CodedValues("float32", self.weights[slot]))
            for slot, each in enumerate(self.layout.slices)
        ]
        coded = map(IndexChooser().encode, blocks)
        pieces = [*messages.blocks_to_message(coded, reply.blocks), self.aux.tobytes()]
        return reply, memoryview(b"".join(map(bytes, pieces)))


def shards_of(versions, aux):
    layouts = method("bsp").place(SPEC, len(versions))
    shards = []
    for layout, version in zip(layouts, versions, strict=True):
        weights = [np.full(each.size, each.tensor + 1, np.float32) for each in layout.slices]
        shards.append(AnsweringShard(layout, version, weights, aux if not shards else ()))
    return layouts, shards


def test_the_statistics_of_shard_0_are_those_of_the_model():
    """The others average none."""
    layouts, shards = shards_of([3, 3], [0.25, 4.0])
    view = ModelFetcher(SPEC, layouts, 2, in_step=True).fetch(shards)
    assert view.versions == [3, 3] and view.statistics.tolist() == [0.25, 4.0]
    for number, tensor in enumerate(SPEC.tensors):
        start = SPEC.offsets[number]
        assert (view.weights[start : start + tensor.size] == number + 1).all()


def test_answers_to_a_pull_that_was_given_up_are_left_out():
    layouts, shards = shards_of([2, 2], [1.0, 1.0])
    for shard in shards:
        shard.replies.put(shard.reply())
        shard.version = 5
    view = ModelFetcher(SPEC, layouts, 2, in_step=False).fetch(shards)
    assert view.versions == [5, 5]


def test_a_model_is_scored_with_the_statistics_that_came_with_it():
    """BatchNorm's statistics are no trainable weights."""
    inputs = keras.Input((4,))
    normalised = keras.layers.BatchNormalization()(inputs)
    built = keras.Model(inputs, keras.layers.Dense(2, activation="softmax")(normalised))
    built.compile("sgd", "sparse_categorical_crossentropy")
    shared = SharedModel.of(built, is_offered=False)
    rng = np.random.default_rng(5)
    images = rng.normal(3, 2, (8, 4)).astype(np.float32)
    labels = rng.integers(0, 2, 8).astype(np.int32)
    run = types.SimpleNamespace(top5=False, batch_size=4)
    scorer = ModelScorer(run, shared, images, labels)
    weights = rng.normal(size=shared.spec.num_parameters).astype(np.float32)
    given = np.concatenate([images.mean(0), images.var(0)])
    initial, with_own = scorer.score(weights, None), scorer.score(weights, given)
    assert with_own["loss"] == pytest.approx(built.evaluate(images, labels, verbose=0), rel=1e-5)
    assert abs(with_own["loss"] - initial["loss"]) > 1e-3
