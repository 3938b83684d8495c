"""Callbacks of its own: a warm-up that sets the rate at each batch, and a stop at an accuracy."""

import argparse
import json

import keras
import numpy as np

import thinwire

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
options = parser.parse_args()
keras.utils.set_random_seed(options.seed)

rng = np.random.default_rng(options.seed)
centres = rng.normal(size=(10, 24))
y = rng.integers(10, size=6000)
x = (centres[y] + rng.normal(0, 1.3, (6000, 24))).astype("float32")


class WarmUp(keras.callbacks.Callback):
    """Raises the rate linearly over the first batches."""

    def __init__(self, rate, batches):
        super().__init__()
        self.rate, self.batches, self.done = rate, batches, 0

    def on_train_batch_begin(self, batch, logs=None):
        if self.done < self.batches:
            self.done += 1
            self.model.optimizer.learning_rate = self.rate * self.done / self.batches


class StopAt(keras.callbacks.Callback):
    """Ends the training as soon as the validation is good enough."""

    def __init__(self, accuracy):
        super().__init__()
        self.accuracy, self.epoch = accuracy, None

    def on_epoch_end(self, epoch, logs=None):
        if logs["val_accuracy"] >= self.accuracy:
            self.epoch = epoch
            self.model.stop_training = True


model = keras.Sequential(
    [
        keras.Input((24,)),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(10, activation="softmax"),
    ]
)
model.compile("nadam", "sparse_categorical_crossentropy", metrics=["accuracy"])
model = thinwire.distribute(model)


def fall(epoch, rate):
    """Return the rate of an epoch: less by a tenth than before."""
    return rate * 0.9 if epoch else rate


seen = []
stop = StopAt(0.885)
callbacks = [
    WarmUp(2e-3, batches=60),
    keras.callbacks.LearningRateScheduler(fall),
    stop,
    keras.callbacks.TerminateOnNaN(),
    keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(logs["loss"])),
]
history = model.fit(
    x[:4000],
    y[:4000],
    batch_size=32,
    epochs=40,
    validation_data=(x[4000:5000], y[4000:5000]),
    callbacks=callbacks,
    verbose=2,
)
assert seen == history.history["loss"]
assert stop.epoch in (None, len(seen) - 1)

loss, accuracy = model.evaluate(x[5000:], y[5000:], verbose=0)
print(json.dumps({"metric": "accuracy", "value": accuracy, "epochs": len(seen)}))
