"""A GAN: two inner optimizers step two networks, and the compiled one is only a dummy."""

import argparse

import keras
import numpy as np

import thinwire

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
options = parser.parse_args()
keras.utils.set_random_seed(options.seed)

NOISE = 8
real = np.random.default_rng(options.seed).normal(2.0, 0.5, (1000, 2)).astype("float32")


class GAN(keras.Model):
    """A generator and a discriminator, each with an optimizer of its own."""

    def __init__(self):
        super().__init__()
        self.generator = keras.Sequential(
            [keras.Input((NOISE,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(2)]
        )
        self.discriminator = keras.Sequential(
            [keras.Input((2,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(1)]
        )

    def compile(self, generator_optimizer, discriminator_optimizer, **arguments):
        super().compile(**arguments)
        self.generator_optimizer = generator_optimizer
        self.discriminator_optimizer = discriminator_optimizer
        self.loss_of = keras.losses.BinaryCrossentropy(from_logits=True)

    def call(self, noise):
        return self.generator(noise)

    def train_step(self, data):
        import tensorflow as tf

        rows = tf.shape(data)[0]
        noise = tf.random.normal((rows, NOISE))
        labels = tf.concat([tf.ones((rows, 1)), tf.zeros((rows, 1))], axis=0)
        with tf.GradientTape() as tape:
            both = tf.concat([data, self.generator(noise)], axis=0)
            d_loss = self.loss_of(labels, self.discriminator(both))
        weights = self.discriminator.trainable_weights
        self.discriminator_optimizer.apply(tape.gradient(d_loss, weights), weights)
        with tf.GradientTape() as tape:
            g_loss = self.loss_of(tf.ones((rows, 1)), self.discriminator(self.generator(noise)))
        weights = self.generator.trainable_weights
        self.generator_optimizer.apply(tape.gradient(g_loss, weights), weights)
        return {"d_loss": d_loss, "g_loss": g_loss}


model = GAN()
model.compile(keras.optimizers.Adam(1e-3), keras.optimizers.Adam(1e-3), optimizer="adam")
model = thinwire.distribute(model)
model.fit(real, batch_size=32, epochs=2, verbose=2)
print("trained")
