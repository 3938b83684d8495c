"""Classify baskets of articles, given as a ragged tensor without padding."""

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

ARTICLES, KINDS, ROWS = 300, 4, 6000
rng = np.random.default_rng(options.seed)
popularity = rng.dirichlet(np.full(ARTICLES, 0.7), size=KINDS)  # of each article, by kind
kinds = rng.integers(KINDS, size=ROWS)
baskets = [rng.choice(ARTICLES, rng.integers(1, 9), p=popularity[kind]) for kind in kinds]
x = tf.ragged.constant([basket.tolist() for basket in baskets], dtype=tf.int64)
x_train, y_train = x[:4500], kinds[:4500]
x_test, y_test = x[4500:], kinds[4500:]


class MeanOfRows(keras.layers.Layer):
    """The mean over a ragged axis."""

    def call(self, inputs):
        return tf.reduce_mean(inputs, axis=1)

    def compute_output_shape(self, shape):
        return (shape[0], shape[-1])


class BasketModel(keras.Model):
    """An embedding of articles, their mean, and two dense layers."""

    def __init__(self):
        super().__init__()
        self.embedding = keras.layers.Embedding(ARTICLES, 16)
        self.mean = MeanOfRows()
        self.hidden = keras.layers.Dense(32, activation="relu")
        self.kind = keras.layers.Dense(KINDS, activation="softmax")

    def call(self, baskets):
        return self.kind(self.hidden(self.mean(self.embedding(baskets))))


model = BasketModel()
model.compile(optimizer="adam", loss="sparse_categorical_crossentropy", metrics=["accuracy"])
model = thinwire.distribute(model)
model.fit(x_train, y_train, batch_size=32, epochs=20, verbose=2)

loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
print(json.dumps({"metric": "accuracy", "value": accuracy}))
