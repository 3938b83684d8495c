"""Fine-tuning by Keras' own Dense.enable_lora, where only the adapters travel. Alone with

python examples/lora.py

and on two workers with

thinwire run --nb_workers=2 --method=bsp examples/lora.py

Of 280,230 weights 10,908 are trained, so an exchange is a 25th of the model's size. Frozen
weights never travel: every worker has them from the same file, or trains them alike, as here.
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

# In the place of keras.models.load_model: a model that knows Fashion-MNIST's pictures upright.
model.compile("adam", loss)
model.fit(data.train_images, data.train_labels, batch_size=64, epochs=2, verbose=0)

# Now they lie on their side.
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
