"""Mixup in a PyDataset with two workers: dicts, weights of samples, an epoch that ends short."""

import argparse
import json
import math

import keras
import numpy as np

import thinwire

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
options = parser.parse_args()
keras.utils.set_random_seed(options.seed)

KINDS = 6
rng = np.random.default_rng(options.seed)
templates = rng.normal(size=(KINDS, 32))
y = rng.integers(KINDS, size=5000)
x = (templates[y] + rng.normal(0, 1.7, (5000, 32))).astype("float32")
size = rng.normal(y / 4, 1.0).astype("float32")[:, None]


class Mixup(keras.utils.PyDataset):
    """Batches of pairs of rows, mixed; pairs of one kind count twice."""

    def __init__(self, rows, batch_size, alpha=0.2, **arguments):
        super().__init__(**arguments)
        self.rows, self.batch_size, self.alpha = np.array(rows), batch_size, alpha

    def __len__(self):
        return math.ceil(len(self.rows) / self.batch_size)

    def __getitem__(self, index):
        one = self.rows[index * self.batch_size : (index + 1) * self.batch_size]
        rng = np.random.default_rng([options.seed, *one[:4]])
        other = rng.permutation(one)
        share = rng.beta(self.alpha, self.alpha, (len(one), 1)).astype("float32")
        labels = np.eye(KINDS, dtype="float32")
        inputs = {
            "signal": share * x[one] + (1 - share) * x[other],
            "size": share * size[one] + (1 - share) * size[other],
        }
        targets = share * labels[y[one]] + (1 - share) * labels[y[other]]
        return inputs, targets, np.where(y[one] == y[other], 2.0, 1.0).astype("float32")

    def on_epoch_end(self):
        np.random.shuffle(self.rows)


inputs = {"signal": keras.Input((32,), name="signal"), "size": keras.Input((1,), name="size")}
hidden = keras.layers.Concatenate()([inputs["signal"], inputs["size"]])
hidden = keras.layers.Dense(64, activation="relu")(hidden)
hidden = keras.layers.BatchNormalization()(hidden)
outputs = keras.layers.Dense(KINDS, activation="softmax")(hidden)
model = keras.Model(inputs, outputs)
model.compile("rmsprop", "categorical_crossentropy", metrics=["accuracy"])
model = thinwire.distribute(model)
model.fit(Mixup(range(3510), batch_size=32, workers=2), epochs=12, verbose=2)

test = {"signal": x[3600:], "size": size[3600:]}
loss, accuracy = model.evaluate(test, np.eye(KINDS)[y[3600:]], verbose=0)
print(json.dumps({"metric": "accuracy", "value": accuracy}))
