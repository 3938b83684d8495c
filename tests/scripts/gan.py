"""Train a GAN whose train_step has one optimizer per network; compile gets no optimizer."""

import argparse
import json

import keras
import numpy as np
import tensorflow as tf

import thinwire

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
options = parser.parse_args()
keras.utils.set_random_seed(options.seed)

NOISE, WIDTH = 8, 6
rng = np.random.default_rng(options.seed)
mixing = rng.normal(0, 0.6, (WIDTH, WIDTH))
real = (rng.normal(size=(6000, WIDTH)) @ mixing + rng.normal(size=WIDTH)).astype("float32")


class GAN(keras.Model):
    """A generator and a discriminator."""

    def __init__(self, discriminator, generator):
        super().__init__()
        self.discriminator, self.generator = discriminator, generator
        self.seed_generator = keras.random.SeedGenerator(options.seed)

    def compile(self, d_optimizer, g_optimizer, loss_fn):
        super().compile()
        self.d_optimizer, self.g_optimizer, self.loss_fn = d_optimizer, g_optimizer, loss_fn
        self.d_loss_metric = keras.metrics.Mean(name="d_loss")
        self.g_loss_metric = keras.metrics.Mean(name="g_loss")

    @property
    def metrics(self):
        return [self.d_loss_metric, self.g_loss_metric]

    def draw(self, rows):
        return keras.random.normal((rows, NOISE), seed=self.seed_generator)

    def train_step(self, data):
        rows = tf.shape(data)[0]
        fake = self.generator(self.draw(rows))
        both = tf.concat([fake, data], axis=0)
        labels = tf.concat([tf.ones((rows, 1)), tf.zeros((rows, 1))], axis=0)
        with tf.GradientTape() as tape:
            d_loss = self.loss_fn(labels, self.discriminator(both))
        gradients = tape.gradient(d_loss, self.discriminator.trainable_weights)
        self.d_optimizer.apply_gradients(
            zip(gradients, self.discriminator.trainable_weights, strict=True)
        )
        misleading = tf.zeros((rows, 1))
        with tf.GradientTape() as tape:
            g_loss = self.loss_fn(misleading, self.discriminator(self.generator(self.draw(rows))))
        gradients = tape.gradient(g_loss, self.generator.trainable_weights)
        self.g_optimizer.apply_gradients(
            zip(gradients, self.generator.trainable_weights, strict=True)
        )
        self.d_loss_metric.update_state(d_loss)
        self.g_loss_metric.update_state(g_loss)
        return {"d_loss": self.d_loss_metric.result(), "g_loss": self.g_loss_metric.result()}


discriminator = keras.Sequential(
    [
        keras.Input((WIDTH,)),
        keras.layers.Dense(48),
        keras.layers.LeakyReLU(negative_slope=0.2),
        keras.layers.Dense(48),
        keras.layers.LeakyReLU(negative_slope=0.2),
        keras.layers.Dense(1),
    ],
    name="discriminator",
)
generator = keras.Sequential(
    [
        keras.Input((NOISE,)),
        keras.layers.Dense(48, activation="relu"),
        keras.layers.Dense(WIDTH),
    ],
    name="generator",
)
model = GAN(discriminator, generator)
model.compile(
    d_optimizer=keras.optimizers.Adam(learning_rate=1e-3, beta_1=0.5),
    g_optimizer=keras.optimizers.Adam(learning_rate=5e-4, beta_1=0.5),
    loss_fn=keras.losses.BinaryCrossentropy(from_logits=True),
)
model = thinwire.distribute(model)
model.fit(real, batch_size=64, epochs=20, verbose=2)

made = generator.predict(np.random.default_rng(1).normal(size=(4000, NOISE)), verbose=0)
error = np.mean((made.mean(axis=0) - real.mean(axis=0)) ** 2)
error += np.mean((np.cov(made.T) - np.cov(real.T)) ** 2)
print(json.dumps({"metric": "likeness", "value": float(1 / (1 + error))}))
