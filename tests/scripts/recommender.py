"""Learn embeddings of users and films by collaborative filtering; gradients are sparse."""

import argparse
import json

import keras
import numpy as np

import thinwire

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
options = parser.parse_args()
keras.utils.set_random_seed(options.seed)

USERS, FILMS, FACTORS, RATINGS = 400, 250, 3, 40_000
rng = np.random.default_rng(options.seed)
tastes, contents = rng.normal(size=(USERS, FACTORS)), rng.normal(size=(FILMS, FACTORS))
pairs = np.stack([rng.integers(USERS, size=RATINGS), rng.integers(FILMS, size=RATINGS)], axis=1)
liking = (tastes[pairs[:, 0]] * contents[pairs[:, 1]]).sum(axis=1) + rng.normal(0, 0.7, RATINGS)
liked = (liking > 0).astype("float32")
split = int(0.8 * RATINGS)


class Recommender(keras.Model):
    """The product of two embeddings, with a bias of each."""

    def __init__(self, size=8):
        super().__init__()
        regularizer = keras.regularizers.L2(1e-6)
        self.user = keras.layers.Embedding(USERS, size, embeddings_regularizer=regularizer)
        self.user_bias = keras.layers.Embedding(USERS, 1)
        self.film = keras.layers.Embedding(FILMS, size, embeddings_regularizer=regularizer)
        self.film_bias = keras.layers.Embedding(FILMS, 1)

    def call(self, inputs):
        user, film = inputs[:, 0], inputs[:, 1]
        match = keras.ops.sum(self.user(user) * self.film(film), axis=1, keepdims=True)
        return keras.ops.sigmoid(match + self.user_bias(user) + self.film_bias(film))


model = Recommender()
model.compile(
    optimizer=keras.optimizers.Adam(learning_rate=0.005),
    loss=keras.losses.BinaryCrossentropy(),
    metrics=[keras.metrics.BinaryAccuracy(name="accuracy")],
)
model = thinwire.distribute(model)
model.fit(pairs[:split], liked[:split], batch_size=64, epochs=12, verbose=2)

loss, accuracy = model.evaluate(pairs[split:], liked[split:], batch_size=512, verbose=0)
print(json.dumps({"metric": "accuracy", "value": accuracy}))
