"""The gradient on the device equals the gradient that is copied to the host."""

import keras
import numpy as np
import pytest

from tests.virtual.toy import method
from thinwire.models.flat_model import SharedModel
from thinwire.ops.codecs.base import NonFiniteUpdate
from thinwire.ops.kernels import load_kernels
from thinwire.ops.kernels.numpy_ops import aligned
from thinwire.worker.core.core import WorkerCore
from thinwire.worker.gradients import clip, decay
from thinwire.worker.train_step import TrainStep

ROWS = np.random.default_rng(1).standard_normal((8, 6)).astype(np.float32)
LABELS = np.arange(8, dtype=np.int32) % 3
NONE_PERSONAL = np.empty(0, np.float32)


@pytest.fixture(scope="module")
def step():
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(4, "relu"), keras.layers.Dense(3, "softmax")]
    model = keras.Sequential([keras.Input((6,)), *layers])
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy())
    made = TrainStep(SharedModel.of(model))
    weights = aligned(made.spec.num_parameters)
    weights[:] = np.random.default_rng(2).standard_normal(weights.size)
    made.set_weights(weights)
    return made


def test_weights_follow_their_buffer_where_its_borders_allow_and_are_set_elsewhere(step):
    buffer = aligned(step.spec.num_parameters)
    step.set_weights(buffer)
    buffer[:] = np.arange(buffer.size)
    kernel, bias, *_ = (variable.numpy().ravel() for variable in step.variables)
    np.testing.assert_array_equal(kernel, buffer[:24])  # begins with the buffer
    assert not bias.any()  # begins 96 bytes behind
    step.set_weights(buffer)
    held = [variable.numpy().ravel() for variable in step.variables]
    np.testing.assert_array_equal(np.concatenate(held), buffer)
    step.set_weights(other := aligned(buffer.size))
    assert not any(variable.numpy().any() for variable in step.variables)
    buffer[:] = other[:] = 1.0
    step.set_weights(other)


@pytest.mark.parametrize(("weight_decay", "norm"), [(0.0, 0.0), (0.1, 0.0), (0.1, 0.05)])
def test_it_is_the_same_gradient(step, weight_decay, norm):
    host = np.empty(step.spec.num_parameters, np.float32)
    weights = np.random.default_rng(3).standard_normal(host.size).astype(np.float32)
    loss = step.gradients(ROWS, LABELS, host)
    device, same_loss = step.gradients_on_device(ROWS, LABELS, NONE_PERSONAL)
    assert loss == same_loss
    for gradient in (host, device):
        decay(gradient, weights, weight_decay)
        clip(gradient, norm)
    tolerance = 1e-6 if norm else 0  # the norm is summed in another order
    np.testing.assert_allclose(np.asarray(device), host, rtol=tolerance)


@pytest.mark.parametrize(
    ("name", "bodies", "own", "stays"),
    [
        ("dgc", "tf", {}, True),
        ("dgc", "numpy", {}, False),
        ("esync", "tf", {}, True),
        ("esync", "tf", {"collective": "ring"}, False),
        ("dgs", "tf", {"local_optimizer": "script"}, False),
    ],
)
def test_it_stays_where_the_codec_works_but_for_scripts_and_sums(step, name, bodies, own, stays):
    made = method(name, **own)
    layouts = made.place(step.spec, 1)
    core = WorkerCore(step.spec, layouts, made, load_kernels(bodies), [1, 1], keeps_on_device=True)
    assert core.on_device is stays


def test_a_loss_that_is_not_finite_is_refused_there_too(step):
    made = method("dgs", compression_rate=0.2)
    layouts = made.place(step.spec, 1)
    core = WorkerCore(step.spec, layouts, made, load_kernels("tf"), [1, 1])
    core.learning_rate = 0.1
    gradient, _ = step.gradients_on_device(ROWS, LABELS, NONE_PERSONAL)
    with pytest.raises(NonFiniteUpdate):
        core.begin(gradient, 8, float("nan"))
    outgoing = core.begin(gradient, 8, 1.0)
    assert sum(block.values.data.size for block in outgoing.shards[0]) > 0


def test_no_bias_waits_for_the_slow_operation(step):
    """The bias uses thinwire.models.fast_bias."""
    graph = step._gradient_step.get_concrete_function(ROWS, LABELS).graph
    assert "BiasAddGrad" not in {operation.type for operation in graph.get_operations()}


def test_losses_of_layers_count_as_with_keras():
    def stepped(penalty):
        keras.utils.set_random_seed(1)
        layer = keras.layers.Dense(3, "softmax", kernel_regularizer=penalty)
        model = keras.Sequential([keras.Input((6,)), layer])
        model.compile(loss=keras.losses.SparseCategoricalCrossentropy())
        step = TrainStep(SharedModel.of(model))
        gradient = np.empty(step.spec.num_parameters, np.float32)
        loss = step.gradients(ROWS, LABELS, gradient)
        assert loss == pytest.approx(model.test_on_batch(ROWS, LABELS), rel=1e-5)
        kernel = layer.kernel.numpy()
        return loss, gradient[: kernel.size].reshape(kernel.shape), kernel

    loss, slope, kernel = stepped(keras.regularizers.L2(0.5))
    plain_loss, plain_slope, _ = stepped(None)
    assert loss - plain_loss == pytest.approx(0.5 * (kernel**2).sum(), rel=1e-4)
    np.testing.assert_allclose(slope - plain_slope, kernel, atol=1e-5)
