"""Train in an eager custom loop with a GradientTape, apply_gradients and early stopping."""

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

rng = np.random.default_rng(options.seed)
x = rng.normal(size=(2200, 12)).astype("float32")
y = np.sin(x[:, :4]).sum(axis=1) + x[:, 4] * x[:, 5] + rng.normal(0, 0.3, 2200)
y = y.astype("float32")[:, None]
x_train, y_train, x_val, y_val = x[:1200], y[:1200], x[1200:1500], y[1200:1500]
x_test, y_test = x[1500:], y[1500:]

model = keras.Sequential(
    [
        keras.Input((12,)),
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dense(1),
    ]
)
optimizer = keras.optimizers.Adam(learning_rate=4e-3, clipnorm=5.0)
loss_fn = keras.losses.MeanSquaredError()
train_loss = keras.metrics.Mean()
optimizer = thinwire.distribute(optimizer, model=model)

best, waited = np.inf, 0
for epoch in range(10):
    order = rng.permutation(len(x_train))
    for start in range(0, len(order), 40):
        batch = order[start : start + 40]
        with tf.GradientTape() as tape:
            predicted = model(x_train[batch], training=True)
            loss = loss_fn(y_train[batch], predicted)
        gradients = tape.gradient(loss, model.trainable_weights)
        optimizer.apply_gradients(zip(gradients, model.trainable_weights, strict=True))
        train_loss.update_state(loss)
    val_loss = float(loss_fn(y_val, model(x_val, training=False)))
    print(f"epoch {epoch + 1}: loss {float(train_loss.result()):.4f}, val_loss {val_loss:.4f}")
    train_loss.reset_state()
    waited = 0 if val_loss < best else waited + 1
    best = min(best, val_loss)
    if waited == 4:
        break

error = np.mean((model.predict(x_test, verbose=0) - y_test) ** 2)
print(json.dumps({"metric": "r2", "value": float(1 - error / y_test.var())}))
