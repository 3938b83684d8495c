"""Fashion-MNIST with Keras: alone with

python examples/fit.py

and on two workers with

thinwire run --nb_workers=2 --method=dgs examples/fit.py
"""

import keras

import thinwire
from thinwire.data.registry import load

EPOCHS = 10


def build_model():
    """Return the network."""
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


def rate_of(epoch):
    """Return the learning rate of an epoch: from 0.03 down to nearly 0."""
    return 0.03 * (1 - epoch / EPOCHS) ** 2


def main():
    data = load("fashion_mnist_sample", None, 28, 1, 10, "unit", seed=1)
    x, y = data.train_images, data.train_labels
    keras.utils.set_random_seed(1)
    model = build_model()
    model.compile(
        optimizer=keras.optimizers.SGD(0.03, momentum=0.7),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model = thinwire.distribute(model)
    test = (data.test_images, data.test_labels)
    decay = keras.callbacks.LearningRateScheduler(rate_of)
    model.fit(
        x, y, batch_size=16, epochs=EPOCHS, validation_data=test, callbacks=[decay], verbose=2
    )


if __name__ == "__main__":
    main()
