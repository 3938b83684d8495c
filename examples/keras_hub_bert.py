"""Train a small KerasHub BERT classifier from its configuration, without downloads.

In one process, without Thinwire's servers:

python examples/keras_hub_bert.py

On two workers:

thinwire run --nb_workers=2 --method=dgs examples/keras_hub_bert.py

KerasHub needs the package tensorflow, which conflicts with tensorflow-cpu in one environment.
Install KerasHub and Thinwire in a separate environment; Thinwire works with either package:

python3 -m venv runs/keras-hub
runs/keras-hub/bin/pip install keras-hub tensorflow .
runs/keras-hub/bin/thinwire run --nb_workers=2 --method=dgs examples/keras_hub_bert.py
"""

import argparse
import json

import keras
import keras_hub
import numpy as np

import thinwire

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
parser.add_argument("--epochs", type=int, default=4)
options = parser.parse_args()
keras.utils.set_random_seed(options.seed)

VOCABULARY, LENGTH, KINDS = 300, 24, 4
rng = np.random.default_rng(options.seed)
topics = rng.dirichlet(np.full(VOCABULARY - 1, 0.3), size=KINDS)
y = rng.integers(KINDS, size=3000)
tokens = 1 + np.stack([rng.choice(VOCABULARY - 1, LENGTH, p=topics[k]) for k in y])
lengths = rng.integers(LENGTH // 2, LENGTH + 1, size=3000)
mask = np.arange(LENGTH) < lengths[:, None]
x = {
    "token_ids": np.where(mask, tokens, 0).astype("int32"),
    "segment_ids": np.zeros_like(tokens, dtype="int32"),
    "padding_mask": mask.astype("int32"),
}


def rows(which):
    """Return the selected rows of every input, and the labels of these rows."""
    return {name: column[which] for name, column in x.items()}, y[which]


backbone = keras_hub.models.BertBackbone(
    vocabulary_size=VOCABULARY,
    num_layers=2,
    num_heads=2,
    hidden_dim=32,
    intermediate_dim=64,
    max_sequence_length=LENGTH,
)
model = keras_hub.models.BertTextClassifier(backbone, num_classes=KINDS, preprocessor=None)
model.compile(
    optimizer=keras.optimizers.AdamW(1e-3),
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    metrics=["accuracy"],
)
model = thinwire.distribute(model)
model.fit(
    *rows(slice(2400)),
    batch_size=32,
    epochs=options.epochs,
    validation_data=rows(slice(2400, None)),
    verbose=2,
)

_, accuracy = model.evaluate(*rows(slice(2400, None)), verbose=0)
print(json.dumps({"metric": "accuracy", "value": accuracy}))
