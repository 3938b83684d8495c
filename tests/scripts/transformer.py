"""A small transformer that reads token sequences; Adam and steps_per_execution."""

import argparse
import json

import keras
import numpy as np
from keras import layers, ops

import thinwire

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
options = parser.parse_args()
keras.utils.set_random_seed(options.seed)

VOCABULARY, LENGTH, WIDTH, KINDS = 200, 20, 32, 6
rng = np.random.default_rng(options.seed)
mixture = rng.dirichlet(np.full(VOCABULARY, 0.4), size=KINDS)
y = rng.integers(KINDS, size=6000)
x = np.stack([rng.choice(VOCABULARY, LENGTH, p=0.45 * mixture[k] + 0.55 / VOCABULARY) for k in y])
swapped = rng.random(6000) < 0.05  # labels that nobody can learn
y[swapped] = rng.integers(KINDS, size=swapped.sum())


class TransformerBlock(layers.Layer):
    """Attention and a feed-forward network, each with a shortcut and a norm."""

    def __init__(self, width, heads, hidden, rate=0.1):
        super().__init__()
        self.attention = layers.MultiHeadAttention(num_heads=heads, key_dim=width // heads)
        self.feed_forward = keras.Sequential(
            [layers.Dense(hidden, activation="relu"), layers.Dense(width)]
        )
        self.norm1, self.norm2 = layers.LayerNormalization(), layers.LayerNormalization()
        self.dropout1, self.dropout2 = layers.Dropout(rate), layers.Dropout(rate)

    def call(self, inputs):
        attended = self.norm1(inputs + self.dropout1(self.attention(inputs, inputs)))
        return self.norm2(attended + self.dropout2(self.feed_forward(attended)))


class TokenAndPosition(layers.Layer):
    """The sum of a token's embedding and its position's."""

    def __init__(self):
        super().__init__()
        self.token = layers.Embedding(VOCABULARY, WIDTH)
        self.position = layers.Embedding(LENGTH, WIDTH)

    def call(self, inputs):
        return self.token(inputs) + self.position(ops.arange(LENGTH))


inputs = keras.Input((LENGTH,), dtype="int32")
hidden = TransformerBlock(WIDTH, 2, 64)(TokenAndPosition()(inputs))
hidden = layers.Dropout(0.2)(layers.GlobalAveragePooling1D()(hidden))
model = keras.Model(inputs, layers.Dense(KINDS, activation="softmax")(hidden))
model.compile(
    "adam", "sparse_categorical_crossentropy", metrics=["accuracy"], steps_per_execution=4
)
model = thinwire.distribute(model)
model.fit(x[:4500], y[:4500], batch_size=32, epochs=8, validation_split=0.1, verbose=2)

loss, accuracy = model.evaluate(x[4500:], y[4500:], verbose=0)
print(json.dumps({"metric": "accuracy", "value": accuracy}))
