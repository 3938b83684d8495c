"""Train a model with two inputs, two outputs, named losses and loss weights; use RMSprop."""

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
ROWS, WORDS, DEPARTMENTS = 6000, 60, 4
words = rng.poisson(0.6, (ROWS, WORDS)).astype("float32")
tags = rng.integers(0, 2, (ROWS, 8)).astype("float32")
to_department = rng.normal(size=(WORDS + 8, DEPARTMENTS))
to_urgency = rng.normal(size=WORDS + 8) / 8
everything = np.concatenate([words, tags], axis=1)
scores = everything @ to_department + rng.normal(0, 4, (ROWS, DEPARTMENTS))
departments = scores.argmax(axis=1)
urgency = np.tanh(everything @ to_urgency) + rng.normal(0, 0.3, ROWS)
urgency = urgency.astype("float32")[:, None]

text_input = keras.Input((WORDS,), name="words")
tags_input = keras.Input((8,), name="tags")
x = keras.layers.Concatenate()([keras.layers.Dense(32, activation="relu")(text_input), tags_input])
x = keras.layers.Dense(32, activation="relu")(x)
department = keras.layers.Dense(DEPARTMENTS, name="department")(x)
priority = keras.layers.Dense(1, name="urgency")(x)
model = keras.Model(
    {"words": text_input, "tags": tags_input}, {"department": department, "urgency": priority}
)
model.compile(
    optimizer=keras.optimizers.RMSprop(1e-3),
    loss={
        "department": keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        "urgency": keras.losses.MeanSquaredError(),
    },
    loss_weights={"department": 1.0, "urgency": 0.5},
    metrics={"department": ["accuracy"], "urgency": ["mae"]},
)
model = thinwire.distribute(model)

split = 4500
model.fit(
    {"words": words[:split], "tags": tags[:split]},
    {"department": departments[:split], "urgency": urgency[:split]},
    epochs=15,
    batch_size=32,
    verbose=2,
)

results = model.evaluate(
    {"words": words[split:], "tags": tags[split:]},
    {"department": departments[split:], "urgency": urgency[split:]},
    verbose=0,
    return_dict=True,
)
print(json.dumps({"metric": "accuracy", "value": results["department_accuracy"], "all": results}))
