"""Run a custom training loop as a worker of examples/server.py.

python examples/loop_worker.py FLAGS
"""

import sys

import keras
import numpy as np
import tensorflow as tf
from convnet import build_model

from thinwire import GradientSGD
from thinwire.data.registry import load

BATCH_SIZE = 16


def main():
    data = load("fashion_mnist_sample", None, 28, 1, 10, "unit", seed=1)
    model = build_model()
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    @tf.function
    def compute(images, labels):
        with tf.GradientTape() as tape:
            loss = loss_of(labels, model(images, training=True))
        return loss, tape.gradient(loss, [v.value for v in model.trainable_variables])

    with GradientSGD(model, args=sys.argv[1:]) as optimizer:
        x, y = optimizer.shard(data.train_images, data.train_labels)
        rng = np.random.default_rng(1)
        while not optimizer.stopped:
            batch = rng.integers(len(y), size=BATCH_SIZE)
            loss, gradients = compute(x[batch], y[batch])
            pairs = zip(gradients, model.trainable_variables, strict=True)
            info = optimizer.step(pairs, loss=loss, samples=BATCH_SIZE)
            if info.version % 100 == 0:
                sys.stdout.write(f"version {info.version}: loss {loss:.3f}, {info.bytes_up} B up\n")
    model.compile(loss=loss_of, metrics=["accuracy"])
    model.evaluate(data.test_images, data.test_labels, verbose=2)


if __name__ == "__main__":
    main()
