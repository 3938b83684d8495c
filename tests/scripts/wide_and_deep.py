"""Wide and deep: RMSprop for the linear part, Adagrad for the rest, in one train_step."""

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

ROWS, USERS, ITEMS = 12_000, 60, 40
rng = np.random.default_rng(options.seed)
user, item = rng.integers(USERS, size=ROWS), rng.integers(ITEMS, size=ROWS)
amounts = rng.normal(size=(ROWS, 8)).astype("float32")
tastes, kinds = rng.normal(size=(USERS, 3)), rng.normal(size=(ITEMS, 3))
odds = np.sum(tastes[user] * kinds[item], axis=1) + amounts @ rng.normal(size=8) / 2
y = (rng.random(ROWS) < 1 / (1 + np.exp(-2 * odds))).astype("float32")[:, None]
x = {"user": user[:, None], "item": item[:, None], "amounts": amounts}
train = {name: column[:10_000] for name, column in x.items()}
test = {name: column[10_000:] for name, column in x.items()}


class WideAndDeep(keras.Model):
    """A linear model and a deep one, whose logits are added."""

    def __init__(self):
        super().__init__()
        self.wide = keras.layers.Dense(1, name="wide")
        self.users = keras.layers.Embedding(USERS, 8)
        self.items = keras.layers.Embedding(ITEMS, 8)
        self.deep = keras.Sequential(
            [keras.layers.Dense(32, activation="relu"), keras.layers.Dense(1)], name="deep"
        )

    def compile(self, linear_optimizer, dnn_optimizer, **arguments):
        super().compile(optimizer=dnn_optimizer, **arguments)
        self.linear_optimizer = linear_optimizer

    def call(self, inputs):
        user = self.users(inputs["user"][:, 0])
        item = self.items(inputs["item"][:, 0])
        deep = keras.ops.concatenate([user, item, user * item, inputs["amounts"]], axis=-1)
        return self.wide(inputs["amounts"]) + self.deep(deep)

    def train_step(self, data):
        inputs, targets = data
        with tf.GradientTape() as tape:
            logits = self(inputs, training=True)
            loss = self.compute_loss(inputs, targets, logits)
        wide = self.wide.trainable_variables
        deep = [*self.users.trainable_variables, *self.items.trainable_variables]
        deep += self.deep.trainable_variables
        wide_gradients, deep_gradients = tape.gradient(loss, (wide, deep))
        self.linear_optimizer.apply(wide_gradients, wide)
        self.optimizer.apply(deep_gradients, deep)
        return self.compute_metrics(inputs, targets, logits)


model = WideAndDeep()
model.compile(
    linear_optimizer=keras.optimizers.RMSprop(0.003),
    dnn_optimizer=keras.optimizers.Adagrad(0.1),
    loss=keras.losses.BinaryCrossentropy(from_logits=True),
    metrics=[keras.metrics.BinaryAccuracy(name="accuracy", threshold=0.0)],
)
model = thinwire.distribute(model)
model.fit(train, y[:10_000], batch_size=64, epochs=8, verbose=2)

results = model.evaluate(test, y[10_000:], verbose=0, return_dict=True)
print(json.dumps({"metric": "accuracy", "value": results["accuracy"]}))
