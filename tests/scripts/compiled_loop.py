"""Train in a custom tf.data loop with a tf.function step, optimizer.apply and a schedule."""

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

BATCH_SIZE, EPOCHS = 32, 8
rng = np.random.default_rng(options.seed)
centres = rng.normal(size=(6, 2, 20))  # six kinds, each of two clusters
y = rng.integers(6, size=6000)
x = (centres[y, rng.integers(2, size=6000)] + rng.normal(0, 1.2, (6000, 20))).astype("float32")
train = tf.data.Dataset.from_tensor_slices((x[:4000], y[:4000]))
train = train.shuffle(4000).batch(BATCH_SIZE).prefetch(tf.data.AUTOTUNE)
validation = tf.data.Dataset.from_tensor_slices((x[4000:], y[4000:])).batch(200)

inputs = keras.Input((20,), name="digits")
hidden = keras.layers.Dense(64, activation="relu")(inputs)
hidden = keras.layers.Dropout(0.1)(hidden)
hidden = keras.layers.Dense(64, activation="relu")(hidden)
model = keras.Model(inputs, keras.layers.Dense(6, name="predictions")(hidden))

steps = EPOCHS * (4000 // BATCH_SIZE)
optimizer = keras.optimizers.Adam(keras.optimizers.schedules.CosineDecay(3e-3, steps))
loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
train_accuracy = keras.metrics.SparseCategoricalAccuracy()
val_accuracy = keras.metrics.SparseCategoricalAccuracy()
optimizer = thinwire.distribute(optimizer, model=model)


@tf.function
def train_step(batch, labels):
    """Step once."""
    with tf.GradientTape() as tape:
        logits = model(batch, training=True)
        loss = loss_fn(labels, logits)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    train_accuracy.update_state(labels, logits)
    return loss


@tf.function
def test_step(batch, labels):
    """Count what is right."""
    val_accuracy.update_state(labels, model(batch, training=False))


for epoch in range(EPOCHS):
    for batch, labels in train:
        loss = train_step(batch, labels)
    for batch, labels in validation:
        test_step(batch, labels)
    results = (float(loss), float(train_accuracy.result()), float(val_accuracy.result()))
    print("epoch {}: loss {:.3f}, accuracy {:.3f}, val_accuracy {:.3f}".format(epoch + 1, *results))
    train_accuracy.reset_state()
    val_accuracy.reset_state()

for batch, labels in validation:
    test_step(batch, labels)
print(json.dumps({"metric": "accuracy", "value": float(val_accuracy.result())}))
