"""Train a small byte-level language model on the sources of Python's standard library.

In one process, without Thinwire's servers:

python examples/language_model.py

On two workers that take 16 AdamW steps between two exchanges, over links of 10 Mbit/s:

thinwire run --nb_workers=2 --method=diloco --local_steps=16 --link_mbps=10 \
    examples/language_model.py
"""

import argparse
import hashlib
import json
import pathlib
import sysconfig

import keras
import numpy as np
from keras import layers, ops

import thinwire

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--sequences", type=int, default=9_600, help="number of training sequences")
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument(
    "--width", type=int, default=128, help="width of the model; 128 gives 867,328 parameters"
)
parser.add_argument("--blocks", type=int, default=4)
options = parser.parse_args()
keras.utils.set_random_seed(options.seed)

CONTEXT, VOCABULARY, BATCH_SIZE = 64, 256, 16
folder = pathlib.Path(sysconfig.get_path("stdlib"))
files = sorted(path for path in folder.glob("*.py"))
text = np.frombuffer(b"".join(path.read_bytes() for path in files), np.uint8).astype("int32")
print(f"{len(text):,} bytes, digest {hashlib.sha256(text.tobytes()).hexdigest()[:12]}")
text = text[: len(text) // CONTEXT * CONTEXT + 1]
x, y = text[:-1].reshape(-1, CONTEXT), text[1:].reshape(-1, CONTEXT)
order = np.random.default_rng(0).permutation(len(x))
x, y = x[order], y[order]
x_test, y_test = x[:1024], y[:1024]
x_train, y_train = x[1024:][: options.sequences], y[1024:][: options.sequences]

tokens = keras.Input((CONTEXT,), dtype="int32")
places = ops.cumsum(ops.ones_like(tokens), axis=1) - 1
hidden = layers.Embedding(VOCABULARY, options.width, name="token")(tokens)
hidden = hidden + layers.Embedding(CONTEXT, options.width, name="position")(places)
for number in range(1, options.blocks + 1):
    normed = layers.LayerNormalization(name=f"norm{number}a")(hidden)
    attention = layers.MultiHeadAttention(4, options.width // 4, name=f"attention{number}")
    hidden = hidden + attention(normed, normed, use_causal_mask=True)
    normed = layers.LayerNormalization(name=f"norm{number}b")(hidden)
    wide = layers.Dense(4 * options.width, activation="gelu", name=f"wide{number}")(normed)
    hidden = hidden + layers.Dense(options.width, name=f"narrow{number}")(wide)
hidden = layers.LayerNormalization(name="norm")(hidden)
model = keras.Model(tokens, layers.Dense(VOCABULARY, name="logits")(hidden), name="decoder")

# The schedule covers all batches of the run, as if one process trained all of them.
steps = options.epochs * -(-len(x_train) // BATCH_SIZE)
rate = keras.optimizers.schedules.CosineDecay(
    0.0, steps - steps // 20, alpha=0.1, warmup_target=2e-3, warmup_steps=steps // 20
)
optimizer = keras.optimizers.AdamW(rate, weight_decay=0.1, beta_2=0.99, global_clipnorm=1.0)
optimizer.exclude_from_weight_decay(var_names=["bias", "gamma", "beta", "embeddings"])
model.compile(
    optimizer=optimizer,
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
model = thinwire.distribute(model)
model.fit(
    x_train,
    y_train,
    batch_size=BATCH_SIZE,
    epochs=options.epochs,
    validation_data=(x_test, y_test),
    verbose=2,
)

loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
print(f"loss {loss:.4f}, perplexity {np.exp(loss):.3f}")
print(json.dumps({"metric": "accuracy", "value": accuracy}))
