"""Train a network with Dropout in a loop with a jitted step of JAX."""

import argparse
import json

import jax
import keras
import numpy as np

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
        keras.layers.Dense(64, activation="relu"),
        keras.layers.Dropout(0.05),
        keras.layers.Dense(1),
    ]
)
optimizer = keras.optimizers.Adam(learning_rate=4e-3)
optimizer.build(model.trainable_variables)
loss_fn = keras.losses.MeanSquaredError()
optimizer = thinwire.distribute(optimizer, model=model)


def compute_loss(trainable, non_trainable, x, y):
    predicted, non_trainable = model.stateless_call(trainable, non_trainable, x, training=True)
    return loss_fn(y, predicted), non_trainable


compute_gradients = jax.value_and_grad(compute_loss, has_aux=True)


@jax.jit
def train_step(state, x, y):
    trainable, non_trainable, slots = state
    (loss, non_trainable), gradients = compute_gradients(trainable, non_trainable, x, y)
    trainable, slots = optimizer.stateless_apply(slots, gradients, trainable)
    return loss, (trainable, non_trainable, slots)


lists = model.trainable_variables, model.non_trainable_variables, optimizer.variables
state = tuple([variable.value for variable in variables] for variables in lists)
for epoch in range(12):
    order, losses = rng.permutation(len(x_train)), []
    for start in range(0, len(order), 40):
        batch = order[start : start + 40]
        loss, state = train_step(state, x_train[batch], y_train[batch])
        losses.append(float(loss))
    print(f"epoch {epoch + 1}: loss {np.mean(losses):.4f}")
for variables, values in zip(lists, state, strict=True):
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)

error = np.mean((model.predict(x_test, verbose=0) - y_test) ** 2)
print(json.dumps({"metric": "r2", "value": float(1 - error / y_test.var())}))
