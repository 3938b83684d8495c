"""Train a convolutional network on Fashion-MNIST; a callback sets the learning rate.

In one process, without Thinwire's servers:

python examples/convnet.py

On two workers:

thinwire run --nb_workers=2 --method=dgs examples/convnet.py
"""

import argparse
import json

import keras

import thinwire
from thinwire.data.registry import load


def build_model():
    """Return the uncompiled convolutional network for images [28, 28, 1] and 10 classes."""
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(16, 3, strides=2, activation="relu", name="conv1"),
            keras.layers.Conv2D(32, 3, strides=2, activation="relu", name="conv2"),
            keras.layers.Flatten(name="flatten"),
            keras.layers.Dense(64, activation="relu", name="hidden"),
            keras.layers.Dense(10, name="logits"),
        ],
        name="convnet",
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    keras.utils.set_random_seed(options.seed)

    data = load("fashion_mnist_sample", None, 28, 1, 10, "unit", seed=1)
    test = (data.test_images, data.test_labels)
    model = build_model()
    model.compile(
        optimizer=keras.optimizers.SGD(0.03, momentum=0.7),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model = thinwire.distribute(model)
    decay = keras.callbacks.LearningRateScheduler(
        # Quadratic decay from 0.03 to almost 0 in the last epoch.
        lambda epoch: 0.03 * (1 - epoch / options.epochs) ** 2
    )
    model.fit(
        data.train_images,
        data.train_labels,
        batch_size=16,
        epochs=options.epochs,
        validation_data=test,
        callbacks=[decay],
        verbose=2,
    )
    _, accuracy = model.evaluate(*test, verbose=0)
    print(json.dumps({"metric": "accuracy", "value": accuracy}))


if __name__ == "__main__":
    main()
