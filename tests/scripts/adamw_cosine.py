"""Train an image transformer with AdamW, warm-up, cosine decay, clipping and undecayed biases."""

import argparse
import json

import keras
import numpy as np

import thinwire

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
options = parser.parse_args()
keras.utils.set_random_seed(options.seed)

rng = np.random.default_rng(options.seed)
ROWS, PATCHES, WIDTH, BATCH_SIZE, EPOCHS = 6000, 16, 32, 32, 6
shapes = rng.normal(size=(5, 4, 12))  # five kinds, each of four patches somewhere in the image
labels = rng.integers(5, size=ROWS)
patches = rng.normal(0, 1.1, (ROWS, PATCHES, 12))
for row, label in enumerate(labels):
    patches[row, rng.choice(PATCHES, 4, replace=False)] += shapes[label]
patches = patches.astype("float32")
split = 4500


class PatchEncoder(keras.layers.Layer):
    """A projection of each patch and an embedding of its position."""

    def __init__(self):
        super().__init__()
        self.projection = keras.layers.Dense(WIDTH)
        self.position = keras.layers.Embedding(PATCHES, WIDTH)

    def call(self, inputs):
        return self.projection(inputs) + self.position(keras.ops.arange(PATCHES))


inputs = keras.Input((PATCHES, 12))
x = PatchEncoder()(inputs)
for _ in range(2):
    normed = keras.layers.LayerNormalization(epsilon=1e-6)(x)
    attention = keras.layers.MultiHeadAttention(num_heads=2, key_dim=16, dropout=0.1)
    x = keras.layers.Add()([x, attention(normed, normed)])
    normed = keras.layers.LayerNormalization(epsilon=1e-6)(x)
    x = keras.layers.Add()([x, keras.layers.Dense(WIDTH, activation="gelu")(normed)])
x = keras.layers.GlobalAveragePooling1D()(keras.layers.LayerNormalization(epsilon=1e-6)(x))
model = keras.Model(inputs, keras.layers.Dense(5)(x))

total_steps = EPOCHS * (split // BATCH_SIZE + 1)
schedule = keras.optimizers.schedules.CosineDecay(
    initial_learning_rate=1e-5,
    decay_steps=total_steps - total_steps // 10,
    warmup_target=3e-3,
    warmup_steps=total_steps // 10,
)
optimizer = keras.optimizers.AdamW(schedule, weight_decay=0.01, global_clipnorm=1.0)
optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta"])
model.compile(
    optimizer=optimizer,
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy", keras.metrics.SparseTopKCategoricalAccuracy(2, name="top2")],
)
model = thinwire.distribute(model)
model.fit(patches[:split], labels[:split], batch_size=BATCH_SIZE, epochs=EPOCHS, verbose=2)

_, accuracy, _ = model.evaluate(patches[split:], labels[split:], verbose=0)
print(json.dumps({"metric": "accuracy", "value": accuracy}))
