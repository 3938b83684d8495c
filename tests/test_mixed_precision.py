"""With float16 and bfloat16 a run equals Keras alone within a wider bound.

Gradients are rounded before they are merged. A product of float16 keeps 11 bits, so the mean
gradient of two halves differs from the whole batch's gradient by about 2**-11 of its size; over 20
steps that adds up to at most 20 times as much. Gradients stay far below the largest float16,
because a half's mean overflows at half the scale at which the whole batch's mean overflows.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.script_run import ScriptRun, flat_of, offer_of
from thinwire.ops.push_head import PushHead
from thinwire.worker.core.messages import ScriptFigures

STEPS, BATCH = 20, 16
BOUNDS = {"mixed_float16": 20 * 2.0**-11, "mixed_bfloat16": 20 * 2.0**-8}


def model_of(policy):
    keras.utils.set_random_seed(3)
    dtype = keras.DTypePolicy(policy)
    layers = [
        keras.layers.Dense(16, "relu", dtype=dtype, name="first"),
        keras.layers.Dense(4, dtype=dtype, name="second"),
    ]
    return keras.Sequential([keras.Input((8,)), *layers])


def gradients_of(model, rows, scale):
    """Return flat, unscaled gradients, and whether they overflowed."""
    features, labels = rows
    with tf.GradientTape() as tape:
        logits = tf.cast(model(features), tf.float32)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
        loss = tf.reduce_mean(losses) * scale
    flat = flat_of(tape.gradient(loss, model.trainable_variables))
    return flat / np.float32(scale), not np.isfinite(flat).all()


@pytest.mark.parametrize("policy", BOUNDS)
def test_rounds_equal_keras_alone_within_what_rounding_costs(policy):
    rng = np.random.default_rng(1)
    rows = rng.normal(size=(BATCH, 8)).astype(np.float32), rng.integers(0, 4, BATCH)
    halves = [(rows[0][part], rows[1][part]) for part in (slice(0, 8), slice(8, BATCH))]

    def compiled():
        inner = keras.optimizers.SGD(0.1, momentum=0.9)
        return keras.optimizers.LossScaleOptimizer(inner, 1024.0, dynamic_growth_steps=6)

    alone, optimizer = model_of(policy), compiled()
    optimizer.build(alone.trainable_variables)
    theta = flat_of(alone.trainable_variables)
    run = ScriptRun(offer_of(compiled(), alone.trainable_variables, unused=()), theta)
    copy = model_of(policy)
    scales = []
    for _ in range(STEPS):
        scale = float(optimizer.dynamic_scale)
        scales.append(scale)
        flat, _ = gradients_of(alone, rows, scale)
        optimizer.apply(split(flat * np.float32(scale), alone))
        assert run.workers[0].loss_scale == scale
        for number, half in enumerate(halves, 1):
            assign(copy, run.workers[number - 1].weights)
            flat, overflows = gradients_of(copy, half, scale)
            run.push(number, flat, 8, ScriptFigures(PushHead(loss_scale=scale, overflow=overflows)))
    expected = flat_of(alone.trainable_variables)
    assert np.abs(expected - theta).max() > 0.1
    np.testing.assert_allclose(run.theta, expected, rtol=0, atol=BOUNDS[policy])
    assert max(scales) > min(scales), "no scale changed"


def split(flat, model):
    sizes = np.cumsum(
        [variable.value.shape.num_elements() for variable in model.trainable_variables]
    )
    parts = np.split(flat, sizes[:-1])
    return [
        tf.reshape(part, variable.shape)
        for part, variable in zip(parts, model.trainable_variables, strict=True)
    ]


def assign(model, flat):
    for part, variable in zip(split(flat, model), model.trainable_variables, strict=True):
        variable.assign(part)


def test_a_residual_of_two_scales_can_only_be_unscaled_before_it():
    """Why the worker unscales: a residual from one scale would be sent at another scale."""
    first, second = np.array([1.0, 3.0]), np.array([2.0, 0.0])
    scales = (4.0, 2.0)  # halved by an overflow in between

    def received(unscaled_by_the_ps):
        kept, total = np.zeros(2), np.zeros(2)
        for gradient, scale in zip((first, second), scales, strict=True):
            kept += gradient * scale if unscaled_by_the_ps else gradient
            sent = np.where(np.abs(kept) == np.abs(kept).max(), kept, 0.0)  # the largest entry
            kept -= sent
            total += sent / scale if unscaled_by_the_ps else sent
        return total + (kept / scales[-1] if unscaled_by_the_ps else kept)

    np.testing.assert_array_equal(received(unscaled_by_the_ps=False), first + second)
    assert received(unscaled_by_the_ps=True)[0] == 4.0  # instead of 3: the residual 1 counts twice
