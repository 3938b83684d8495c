"""Classify padded, masked sentences with Embedding(mask_zero), an LSTM and Adam."""

import argparse
import json

import keras
import numpy as np

import thinwire

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
options = parser.parse_args()
keras.utils.set_random_seed(options.seed)

VOCABULARY, LENGTH = 500, 30
rng = np.random.default_rng(options.seed)
mood = rng.normal(size=VOCABULARY)  # what a word adds to the sentence's mood
sentences = [rng.integers(1, VOCABULARY, rng.integers(8, LENGTH + 10)) for _ in range(6000)]
moods = np.array([mood[words].mean() for words in sentences])
labels = (moods + rng.normal(0, 0.05, moods.shape) > 0).astype("int32")
padded = keras.utils.pad_sequences(sentences, maxlen=LENGTH)
x_train, y_train, x_test, y_test = padded[:4000], labels[:4000], padded[4000:], labels[4000:]

model = keras.Sequential(
    [
        keras.Input((None,), dtype="int32"),
        keras.layers.Embedding(VOCABULARY, 16, mask_zero=True),
        keras.layers.Bidirectional(keras.layers.LSTM(16)),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(1, activation="sigmoid"),
    ]
)
model.compile(optimizer="adam", loss="binary_crossentropy", metrics=["accuracy"])
model = thinwire.distribute(model)
model.fit(x_train, y_train, batch_size=32, epochs=6, validation_data=(x_test, y_test), verbose=2)

loss, accuracy = model.evaluate(x_test, y_test, verbose=0)
print(json.dumps({"metric": "accuracy", "value": accuracy}))
