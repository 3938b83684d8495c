"""A script that `thinwire run` starts on every backend; it writes its weights and its History.

The first argument is the folder for the files. With the second argument "interrupt", worker 2
interrupts the launcher in the middle of an epoch, once.
"""

import json
import os
import pathlib
import signal
import sys

import keras
import numpy as np

import thinwire

FOLDER = pathlib.Path(sys.argv[1])
RNG = np.random.default_rng(5)
X = RNG.normal(size=(192, 6)).astype("float32")
Y = (X @ RNG.normal(size=(6, 4))).argmax(1).astype("int32")


class Interrupt(keras.callbacks.Callback):
    """Interrupts the launcher as Ctrl-C does, in the middle of an epoch of worker 2, once."""

    batches = 0

    def on_train_batch_begin(self, batch, logs=None):
        self.batches += 1
        mark = FOLDER / "called"
        if self.batches == 8 and thinwire.worker_id() == 2 and not mark.exists():
            mark.touch()
            os.kill(int(os.environ["LAUNCHER"]), signal.SIGINT)


def build():
    """Return a compiled model with the same weights in every process and on every backend."""
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, activation="tanh", name="hidden"),
            keras.layers.Dense(4, name="logits"),
        ],
        name="life",
    )
    rng = np.random.default_rng(7)
    model.set_weights([rng.normal(0, 0.3, weight.shape) for weight in model.weights])
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.01), loss=loss, metrics=["accuracy"])
    return model


model = thinwire.distribute(build())
callbacks = [Interrupt()] if sys.argv[2:] == ["interrupt"] else []
history = model.fit(
    X[:144],
    Y[:144],
    batch_size=24,
    epochs=4,
    shuffle=False,
    verbose=0,
    validation_data=(X[144:], Y[144:]),
    callbacks=callbacks,
).history
name = f"{keras.backend.backend()}-{thinwire.worker_id()}"
np.savez(FOLDER / f"{name}.npz", *model.get_weights())
(FOLDER / f"{name}.json").write_text(json.dumps(history))
