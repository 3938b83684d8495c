"""train_steps and a loop in the style of each backend, as a script writes them."""

import keras

from tests.backends.fits import LOSS

BACKEND = keras.backend.backend()

if BACKEND == "jax":
    import jax

    class OwnStep(keras.Sequential):
        """A train_step of the script's own, which returns the loss under another name."""

        clips = False

        def train_step(self, state, data):
            weights, others, slots, metrics = state
            x, y = data

            def compute(weights, others):
                logits, others = self.stateless_call(weights, others, x, training=True)
                return LOSS(y, logits), others

            (loss, others), grads = jax.value_and_grad(compute, has_aux=True)(weights, others)
            weights, slots = self.optimizer.stateless_apply(slots, grads, weights)
            if self.clips:
                weights = [jax.numpy.clip(weight, -0.4, 0.4) for weight in weights]
            return {"own": loss}, (weights, others, slots, metrics)

elif BACKEND == "tensorflow":
    import tensorflow as tf

    class OwnStep(keras.Sequential):
        """A train_step of the script's own, which returns the loss under another name."""

        clips = False

        def train_step(self, data):
            x, y = data
            with tf.GradientTape() as tape:
                loss = LOSS(y, self(x, training=True))
            weights = self.trainable_weights
            self.optimizer.apply(tape.gradient(loss, weights), weights)
            return {"own": loss}

else:
    import torch

    class OwnStep(keras.Sequential):
        """A train_step of the script's own, which returns the loss under another name."""

        clips = False

        def train_step(self, data):
            x, y = data
            self.zero_grad()
            loss = LOSS(y, self(x, training=True))
            loss.backward()
            weights = self.trainable_weights
            with torch.no_grad():
                self.optimizer.apply([weight.value.grad for weight in weights], weights)
                if self.clips:
                    for weight in weights:
                        weight.assign(torch.clip(weight.value, -0.4, 0.4))
            return {"own": loss.detach()}


class Clipping(OwnStep):
    """Clips the weights after each step."""

    clips = True


class Twice(OwnStep):
    """Steps twice on each batch."""

    def train_step(self, *state_and_data):
        first = OwnStep.train_step(self, *state_and_data)
        if len(state_and_data) == 2:
            state_and_data = first[1], state_and_data[1]
        return OwnStep.train_step(self, *state_and_data)


def sgd():
    return keras.optimizers.SGD(0.1)


def loop(model, optimizer, pairs):
    """Train by a loop in the style of the backend; the model has its weights at the end."""
    optimizer.build(model.trainable_variables)
    if BACKEND == "jax":

        def compute(weights, others, x, y):
            logits, others = model.stateless_call(weights, others, x, training=True)
            return LOSS(y, logits), others

        @jax.jit
        def step(state, x, y):
            weights, others, slots = state
            gradient = jax.value_and_grad(compute, has_aux=True)
            (loss, others), grads = gradient(weights, others, x, y)
            weights, slots = optimizer.stateless_apply(slots, grads, weights)
            return loss, (weights, others, slots)

        variables = model.trainable_variables, model.non_trainable_variables, optimizer.variables
        state = tuple([variable.value for variable in part] for part in variables)
        for x, y in pairs:
            _, state = step(state, x, y)
        for part, values in zip(variables, state, strict=True):
            for variable, value in zip(part, values, strict=True):
                variable.assign(value)
        return
    if BACKEND == "tensorflow":
        for x, y in pairs:
            with tf.GradientTape() as tape:
                value = LOSS(y, model(x, training=True))
            weights = model.trainable_weights
            optimizer.apply(tape.gradient(value, weights), weights)
        return
    for x, y in pairs:
        model.zero_grad()
        LOSS(torch.as_tensor(y), model(torch.as_tensor(x), training=True)).backward()
        weights = model.trainable_weights
        with torch.no_grad():
            optimizer.apply([weight.value.grad for weight in weights], weights)
