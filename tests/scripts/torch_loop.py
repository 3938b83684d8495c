"""Train a network with BatchNormalization and Dropout in an eager loop of PyTorch."""

import argparse
import json

import keras
import numpy as np
import torch

import thinwire

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
options = parser.parse_args()
keras.utils.set_random_seed(options.seed)

rng = np.random.default_rng(options.seed)
x = rng.normal(size=(4200, 12)).astype("float32")
y = np.sin(x[:, :4]).sum(axis=1) + x[:, 4] * x[:, 5] + rng.normal(0, 0.3, 4200)
y = y.astype("float32")[:, None]
x_train, y_train, x_test, y_test = x[:3200], y[:3200], x[3200:], y[3200:]

model = keras.Sequential(
    [
        keras.Input((12,)),
        keras.layers.Dense(64),
        keras.layers.BatchNormalization(),
        keras.layers.ReLU(),
        keras.layers.Dropout(0.05),
        keras.layers.Dense(1),
    ]
)
optimizer = keras.optimizers.Adam(learning_rate=4e-3)
loss_fn = keras.losses.MeanSquaredError()
optimizer = thinwire.distribute(optimizer, model=model)

for epoch in range(12):
    order, losses = rng.permutation(len(x_train)), []
    for start in range(0, len(order), 40):
        batch = order[start : start + 40]
        predicted = model(torch.from_numpy(x_train[batch]), training=True)
        loss = loss_fn(torch.from_numpy(y_train[batch]), predicted)
        model.zero_grad()
        loss.backward()
        gradients = [weight.value.grad for weight in model.trainable_weights]
        with torch.no_grad():
            optimizer.apply(gradients, model.trainable_weights)
        losses.append(float(loss))
    print(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}")

error = np.mean((model.predict(x_test, verbose=0) - y_test) ** 2)
print(json.dumps({"metric": "r2", "value": float(1 - error / y_test.var())}))
