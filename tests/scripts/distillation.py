"""Distill a frozen teacher inside the model with an overridden compute_loss and Adam."""

import argparse
import json

import keras
import numpy as np
from keras import ops

import thinwire

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
options = parser.parse_args()
keras.utils.set_random_seed(options.seed)

rng = np.random.default_rng(options.seed)
patterns = rng.normal(size=(8, 8, 8))
y = rng.integers(8, size=6000)
x = (patterns[y] + rng.normal(0, 2.0, (6000, 8, 8))).astype("float32")[..., None]
x_train, y_train, x_test, y_test = x[:4000], y[:4000], x[4000:], y[4000:]


def network(filters, name):
    """Return a small convolutional network that ends in logits."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(filters, 3, strides=2, padding="same"),
            keras.layers.LeakyReLU(negative_slope=0.2),
            keras.layers.Flatten(),
            keras.layers.Dense(8),
        ],
        name=name,
    )


class Distiller(keras.Model):
    """A student that learns from labels and from what the teacher answers."""

    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.teacher = student, teacher

    def compile(
        self, optimizer, metrics, student_loss_fn, distillation_loss_fn, alpha, temperature
    ):
        super().compile(optimizer=optimizer, metrics=metrics)
        self.student_loss_fn, self.distillation_loss_fn = student_loss_fn, distillation_loss_fn
        self.alpha, self.temperature = alpha, temperature

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        teacher = ops.softmax(self.teacher(x, training=False) / self.temperature, axis=1)
        student = ops.softmax(y_pred / self.temperature, axis=1)
        distillation = self.distillation_loss_fn(teacher, student) * self.temperature**2
        return self.alpha * self.student_loss_fn(y, y_pred) + (1 - self.alpha) * distillation

    def call(self, inputs):
        return self.student(inputs)


teacher, student = network(32, "teacher"), network(6, "student")
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
teacher.compile("adam", loss, metrics=["accuracy"])
teacher.fit(x_train, y_train, epochs=4, verbose=0)
teacher.trainable = False

model = Distiller(student, teacher)
model.compile(
    optimizer=keras.optimizers.Adam(),
    metrics=[keras.metrics.SparseCategoricalAccuracy(name="accuracy")],
    student_loss_fn=loss,
    distillation_loss_fn=keras.losses.KLDivergence(),
    alpha=0.1,
    temperature=5,
)
model = thinwire.distribute(model)
model.fit(x_train, y_train, epochs=10, verbose=2)

results = model.evaluate(x_test, y_test, verbose=0, return_dict=True)
print(json.dumps({"metric": "accuracy", "value": results["accuracy"]}))
