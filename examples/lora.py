"""Fine-tune a model with Keras' Dense.enable_lora; workers exchange only the adapters.

In one process, without Thinwire's servers:

python examples/lora.py

On two workers:

thinwire run --nb_workers=2 --method=bsp examples/lora.py

The script trains 10,908 of the model's 280,230 weights, so an exchange is a 25th of the model's
size. Thinwire never sends frozen weights. Every worker must therefore have the same frozen weights:
from a file, or from the same deterministic pretraining, as in this script.
"""

import argparse
import json
import math

import keras
import tensorflow as tf

import thinwire
from thinwire.data.registry import load

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--epochs", type=int, default=5)
options = parser.parse_args()
keras.utils.set_random_seed(options.seed)
tf.config.experimental.enable_op_determinism()

data = load("fashion_mnist_sample", None, 28, 1, 10, "unit", seed=1)
dense = [
    keras.layers.Dense(256, activation="relu", name="hidden1"),
    keras.layers.Dense(256, activation="relu", name="hidden2"),
    keras.layers.Dense(10, name="logits"),
]
model = keras.Sequential([keras.Input((28, 28, 1)), keras.layers.Flatten(), *dense], name="lora")
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

# Pretrain on upright images. A real script would call keras.models.load_model instead.
model.compile("adam", loss)
model.fit(data.train_images, data.train_labels, batch_size=64, epochs=2, verbose=0)

# Fine-tune the adapters on images that are turned on their side.
for layer in dense:
    layer.enable_lora(6)
    layer.bias.trainable = False
x_train, x_test = (images.swapaxes(1, 2) for images in (data.train_images, data.test_images))
model.compile(keras.optimizers.Adam(1e-3), loss, metrics=["accuracy"])
before = model.evaluate(x_test, data.test_labels, verbose=0)[1]
model = thinwire.distribute(model)
model.fit(
    x_train,
    data.train_labels,
    batch_size=64,
    epochs=options.epochs,
    validation_data=(x_test, data.test_labels),
    verbose=2,
)

_, accuracy = model.evaluate(x_test, data.test_labels, verbose=0)
trained = sum(math.prod(weight.shape) for weight in model.trainable_weights)
print(f"{before:.3f} before; {trained:,} of {model.count_params():,} weights were trained")
print(json.dumps({"metric": "accuracy", "value": accuracy}))
