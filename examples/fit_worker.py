"""Fashion-MNIST with Keras alone: PYTHONPATH=. python examples/fit_single.py"""

import sys

import keras

from data.datasets import load
from thinwire import distribute


def build_model():
    """Return the network, with names of its own: they are the same on every node."""
    return keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            keras.layers.Conv2D(16, 3, strides=2, activation="relu", name="conv1"),
            keras.layers.Conv2D(32, 3, strides=2, activation="relu", name="conv2"),
            keras.layers.Flatten(name="flatten"),
            keras.layers.Dense(64, activation="relu", name="hidden"),
            keras.layers.Dense(10, name="logits"),
        ],
        name="fit_example",
    )


def main():
    data = load("fashion_mnist_sample", None, 28, 1, 10, "unit", seed=1)
    x, y = data.train_images, data.train_labels
    keras.utils.set_random_seed(1)
    model = build_model()
    model.compile(
        optimizer=keras.optimizers.SGD(0.05),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    x, y = distribute(model, sys.argv[1:]).shard(x, y)
    test = (data.test_images, data.test_labels)
    model.fit(x, y, batch_size=16, epochs=8, validation_data=test, verbose=2)


if __name__ == "__main__":
    main()
