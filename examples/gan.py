"""Train a GAN that draws trousers; its two networks have one optimizer each.

In one process, without Thinwire's servers:

python examples/gan.py

On two workers:

thinwire run --nb_workers=2 --method=bsp examples/gan.py
"""

import argparse
import json

import keras
import numpy as np
import tensorflow as tf
from keras import layers

import thinwire
from thinwire.data.registry import load

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--epochs", type=int, default=40)
options = parser.parse_args()
keras.utils.set_random_seed(options.seed)

NOISE, TROUSERS = 16, 1
data = load("fashion_mnist_sample", None, 28, 1, 10, "unit", seed=1)
real = data.train_images[data.train_labels == TROUSERS]
real = real.reshape(-1, 14, 2, 14, 2).mean(axis=(2, 4))  # [n, 14, 14], half the size


class GAN(keras.Model):
    """A generator that imitates images and a discriminator that detects imitations."""

    def __init__(self, discriminator, generator):
        super().__init__(name="gan")
        self.discriminator, self.generator = discriminator, generator
        self.seed_generator = keras.random.SeedGenerator(options.seed)
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def imitate(self, number):
        noise = keras.random.normal((number, NOISE), seed=self.seed_generator)
        return self.generator(noise)

    def train_step(self, data):
        number = tf.shape(data)[0]
        images = tf.concat([self.imitate(number), data], axis=0)
        labels = tf.concat([tf.ones((number, 1)), 0.1 * tf.ones((number, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(images))
        weights = self.discriminator.trainable_weights
        self.d_optimizer.apply(tape.gradient(d_loss, weights), weights)

        with tf.GradientTape() as tape:
            scores = self.discriminator(self.imitate(number))
            g_loss = self.loss_fn(tf.zeros((number, 1)), scores)
        weights = self.generator.trainable_weights
        self.g_optimizer.apply(tape.gradient(g_loss, weights), weights)

        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {metric.name: metric.result() for metric in self.metrics}


discriminator = keras.Sequential(
    [
        keras.Input((14, 14)),
        layers.Flatten(),
        layers.Dense(96),
        layers.LeakyReLU(negative_slope=0.2),
        layers.Dense(48),
        layers.LeakyReLU(negative_slope=0.2),
        layers.Dense(1),
    ],
    name="discriminator",
)
generator = keras.Sequential(
    [
        keras.Input((NOISE,)),
        layers.Dense(64, activation="relu"),
        layers.Dense(128, activation="relu"),
        layers.Dense(196, activation="sigmoid"),
        layers.Reshape((14, 14)),
    ],
    name="generator",
)
model = GAN(discriminator, generator)
model.compile(
    d_optimizer=keras.optimizers.Adam(1e-3, beta_1=0.5),
    g_optimizer=keras.optimizers.Adam(1e-3, beta_1=0.5),
    loss_fn=keras.losses.BinaryCrossentropy(from_logits=True),
)
model = thinwire.distribute(model)
model.fit(real, batch_size=32, epochs=options.epochs, verbose=2)

drawings = generator.predict(np.random.default_rng(1).normal(size=(1000, NOISE)), verbose=0)
error = np.mean((drawings.mean(axis=0) - real.mean(axis=0)) ** 2)
print(json.dumps({"metric": "likeness", "value": float(1 - error / real.mean(axis=0).var())}))
