"""Train a variational autoencoder: a subclassed, unbuilt model with a custom train_step."""

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

rng = np.random.default_rng(options.seed)
factors = rng.normal(size=(6000, 4))
x = np.tanh(factors @ rng.normal(size=(4, 40))) + rng.normal(0, 0.2, (6000, 40))
x_train, x_test = x[:5000].astype("float32"), x[5000:].astype("float32")


class Autoencoder(keras.Model):
    """Encodes to means and variances, samples, decodes."""

    def __init__(self, latent=6, beta=0.003):
        super().__init__()
        self.latent, self.beta = latent, beta
        self.encoder = keras.Sequential(
            [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(2 * latent)]
        )
        self.decoder = keras.Sequential(
            [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(40)]
        )
        self.noise = keras.random.SeedGenerator(options.seed)
        self.reconstruction = keras.metrics.Mean(name="reconstruction")
        self.divergence = keras.metrics.Mean(name="divergence")

    @property
    def metrics(self):
        return [self.reconstruction, self.divergence]

    def call(self, inputs):
        mean, _ = keras.ops.split(self.encoder(inputs), 2, axis=-1)
        return self.decoder(mean)

    def losses_of(self, data):
        mean, log_variance = keras.ops.split(self.encoder(data), 2, axis=-1)
        noise = keras.random.normal(keras.ops.shape(mean), seed=self.noise)
        decoded = self.decoder(mean + keras.ops.exp(0.5 * log_variance) * noise)
        reconstruction = keras.ops.mean(keras.ops.square(data - decoded))
        divergence = -0.5 * (1 + log_variance - mean**2 - keras.ops.exp(log_variance))
        return reconstruction, keras.ops.mean(keras.ops.sum(divergence, axis=1))

    def train_step(self, data):
        with tf.GradientTape() as tape:
            reconstruction, divergence = self.losses_of(data)
            loss = reconstruction + self.beta * divergence
        gradients = tape.gradient(loss, self.trainable_weights)
        self.optimizer.apply_gradients(zip(gradients, self.trainable_weights, strict=True))
        self.reconstruction.update_state(reconstruction)
        self.divergence.update_state(divergence)
        return {metric.name: metric.result() for metric in self.metrics}


model = Autoencoder()
model.compile(optimizer=keras.optimizers.Adam())
model = thinwire.distribute(model)
model.fit(x_train, epochs=25, batch_size=32, verbose=2)

error = np.mean((model.predict(x_test, verbose=0) - x_test) ** 2)
print(json.dumps({"metric": "r2", "value": float(1 - error / x_test.var())}))
