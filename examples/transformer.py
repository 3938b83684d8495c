"""Train a transformer with AdamW, learning-rate warm-up and cosine decay.

In one process, without Thinwire's servers:

python examples/transformer.py

On two workers:

thinwire run --nb_workers=2 --method=dgs examples/transformer.py
"""

import argparse
import json

import keras
import numpy as np
from keras import layers, ops

import thinwire

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--epochs", type=int, default=6)
options = parser.parse_args()
keras.utils.set_random_seed(options.seed)

VOCABULARY, LENGTH, WIDTH, KINDS, BATCH_SIZE = 200, 20, 32, 6, 32
rng = np.random.default_rng(options.seed)
topics = rng.dirichlet(np.full(VOCABULARY, 0.4), size=KINDS)  # word probabilities of each class
y = rng.integers(KINDS, size=6000)
x = np.stack([rng.choice(VOCABULARY, LENGTH, p=0.5 * topics[k] + 0.5 / VOCABULARY) for k in y])
x_train, y_train, x_test, y_test = x[:4500], y[:4500], x[4500:], y[4500:]


class Embeddings(layers.Layer):
    """The sum of token embeddings and position embeddings."""

    def __init__(self):
        super().__init__(name="embeddings")
        self.token = layers.Embedding(VOCABULARY, WIDTH)
        self.position = layers.Embedding(LENGTH, WIDTH)

    def call(self, inputs):
        return self.token(inputs) + self.position(ops.arange(LENGTH))


inputs = keras.Input((LENGTH,), dtype="int32")
hidden = Embeddings()(inputs)
for number in (1, 2):
    normed = layers.LayerNormalization(name=f"norm{number}a")(hidden)
    attention = layers.MultiHeadAttention(2, WIDTH // 2, dropout=0.1, name=f"attention{number}")
    hidden = hidden + attention(normed, normed)
    normed = layers.LayerNormalization(name=f"norm{number}b")(hidden)
    wide = layers.Dense(2 * WIDTH, activation="gelu", name=f"wide{number}")(normed)
    hidden = hidden + layers.Dense(WIDTH, name=f"narrow{number}")(wide)
hidden = layers.GlobalAveragePooling1D()(layers.LayerNormalization(name="norm")(hidden))
model = keras.Model(inputs, layers.Dense(KINDS, name="logits")(hidden), name="transformer")

# The schedule covers all batches of the run, as if one process trained all of them.
steps = options.epochs * -(-len(x_train) // BATCH_SIZE)
rate = keras.optimizers.schedules.CosineDecay(
    0.0, steps - steps // 10, warmup_target=2e-3, warmup_steps=steps // 10
)
optimizer = keras.optimizers.AdamW(rate, weight_decay=0.01, global_clipnorm=1.0)
optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta", "embeddings"])
model.compile(
    optimizer=optimizer,
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
model = thinwire.distribute(model)
model.fit(
    x_train,
    y_train,
    batch_size=BATCH_SIZE,
    epochs=options.epochs,
    validation_data=(x_test, y_test),
    verbose=2,
)

_, accuracy = model.evaluate(x_test, y_test, verbose=0)
print(json.dumps({"metric": "accuracy", "value": accuracy}))
