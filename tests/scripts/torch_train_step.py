"""Train a model with BatchNormalization and Dropout by a custom train_step of PyTorch."""

import argparse
import json

import keras
import numpy as np
import torch

import thinwire

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
options = parser.parse_args()
keras.utils.set_random_seed(options.seed)

rng = np.random.default_rng(options.seed)
x = rng.normal(size=(6000, 16)).astype("float32")
y = np.argmax(np.tanh(x @ rng.normal(size=(16, 24))) @ rng.normal(size=(24, 4)), axis=1)
x_train, y_train, x_test, y_test = x[:5000], y[:5000], x[5000:], y[5000:]


class Classifier(keras.Model):
    """Computes loss and metrics itself, as Keras' guide shows it for PyTorch."""

    def __init__(self):
        super().__init__()
        self.hidden = keras.layers.Dense(96)
        self.normalize = keras.layers.BatchNormalization()
        self.dropout = keras.layers.Dropout(0.1)
        self.head = keras.layers.Dense(4)
        self.loss_tracker = keras.metrics.Mean(name="loss")
        self.accuracy = keras.metrics.SparseCategoricalAccuracy(name="accuracy")
        self.loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @property
    def metrics(self):
        return [self.loss_tracker, self.accuracy]

    def call(self, x, training=False):
        x = keras.activations.relu(self.normalize(self.hidden(x), training=training))
        return self.head(self.dropout(x, training=training))

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        logits = self(x, training=True)
        loss = self.loss_fn(y, logits)
        loss.backward()
        weights = list(self.trainable_weights)
        gradients = [weight.value.grad for weight in weights]
        with torch.no_grad():
            self.optimizer.apply(gradients, weights)
        self.loss_tracker.update_state(loss)
        self.accuracy.update_state(y, logits)
        return {metric.name: metric.result() for metric in self.metrics}


model = Classifier()
model.compile(optimizer=keras.optimizers.Adam(3e-3))
model = thinwire.distribute(model)
model.fit(x_train, y_train, epochs=12, batch_size=64, verbose=2)

predicted = model.predict(x_test, verbose=0).argmax(axis=1)
print(json.dumps({"metric": "accuracy", "value": float((predicted == y_test).mean())}))
