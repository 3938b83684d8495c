"""SimCLR: a contrastive loss for an encoder and a linear probe beside it, an optimizer for each."""

import argparse
import json

import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

import thinwire

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
options = parser.parse_args()
keras.utils.set_random_seed(options.seed)

KINDS, WIDTH, TEMPERATURE = 6, 32, 0.2
rng = np.random.default_rng(options.seed)
patterns = rng.normal(size=(KINDS, 36))
y = rng.integers(KINDS, size=5000)
x = (patterns[y] + rng.normal(0, 1.0, (5000, 36))).astype("float32")
x_train, y_train, x_test, y_test = x[:3500], y[:3500], x[3500:], y[3500:]


class ContrastiveModel(keras.Model):
    """An encoder, a projection for the contrastive loss, and a probe that shows what it knows."""

    def __init__(self):
        super().__init__()
        self.augmenter = keras.Sequential([layers.Dropout(0.2), layers.GaussianNoise(0.4)])
        self.encoder = keras.Sequential(
            [keras.Input((36,)), layers.Dense(64, activation="relu"), layers.Dense(WIDTH)]
        )
        self.projection = keras.Sequential(
            [keras.Input((WIDTH,)), layers.Dense(WIDTH, activation="relu"), layers.Dense(WIDTH)]
        )
        self.probe = keras.Sequential([keras.Input((WIDTH,)), layers.Dense(KINDS)])

    def compile(self, contrastive_optimizer, probe_optimizer, **arguments):
        super().compile(**arguments)
        self.contrastive_optimizer = contrastive_optimizer
        self.probe_optimizer = probe_optimizer
        self.probe_loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        self.contrastive_metric = keras.metrics.Mean(name="c_loss")
        self.probe_metric = keras.metrics.SparseCategoricalAccuracy(name="p_acc")

    @property
    def metrics(self):
        return [self.contrastive_metric, self.probe_metric]

    def contrastive_loss(self, one, other):
        one, other = ops.normalize(one, axis=1), ops.normalize(other, axis=1)
        likeness = ops.matmul(one, ops.transpose(other)) / TEMPERATURE
        numbers = ops.arange(ops.shape(one)[0])
        losses = keras.losses.sparse_categorical_crossentropy
        return ops.mean(
            losses(numbers, likeness, from_logits=True)
            + losses(numbers, ops.transpose(likeness), from_logits=True)
        )

    def train_step(self, data):
        pictures, labels = data
        with tf.GradientTape() as tape:
            one = self.encoder(self.augmenter(pictures, training=True), training=True)
            other = self.encoder(self.augmenter(pictures, training=True), training=True)
            loss = self.contrastive_loss(self.projection(one), self.projection(other))
        weights = self.encoder.trainable_weights + self.projection.trainable_weights
        gradients = tape.gradient(loss, weights)
        self.contrastive_optimizer.apply_gradients(zip(gradients, weights, strict=True))
        with tf.GradientTape() as tape:
            logits = self.probe(self.encoder(pictures, training=False), training=True)
            probe_loss = self.probe_loss(labels, logits)
        gradients = tape.gradient(probe_loss, self.probe.trainable_weights)
        self.probe_optimizer.apply_gradients(
            zip(gradients, self.probe.trainable_weights, strict=True)
        )
        self.contrastive_metric.update_state(loss)
        self.probe_metric.update_state(labels, logits)
        return {metric.name: metric.result() for metric in self.metrics}

    def test_step(self, data):
        pictures, labels = data
        logits = self.probe(self.encoder(pictures, training=False), training=False)
        self.probe_metric.update_state(labels, logits)
        return {"p_acc": self.probe_metric.result()}


model = ContrastiveModel()
model.compile(
    contrastive_optimizer=keras.optimizers.Adam(), probe_optimizer=keras.optimizers.Adam(3e-3)
)
model = thinwire.distribute(model)
model.fit(x_train, y_train, batch_size=64, epochs=12, validation_data=(x_test, y_test), verbose=2)

results = model.evaluate(x_test, y_test, verbose=0, return_dict=True)
print(json.dumps({"metric": "accuracy", "value": results["p_acc"]}))
