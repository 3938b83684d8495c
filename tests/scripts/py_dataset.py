"""Train on a keras.utils.PyDataset that shuffles itself at each end of an epoch; use Nadam."""

import argparse
import json
import math

import keras
import numpy as np

import thinwire

parser = argparse.ArgumentParser()
parser.add_argument("--seed", type=int, default=1)
options = parser.parse_args()
keras.utils.set_random_seed(options.seed)


class Bars(keras.utils.PyDataset):
    """Pictures with bars across or down, made when they are needed."""

    def __init__(self, numbers, batch_size, **arguments):
        super().__init__(**arguments)
        self.numbers, self.batch_size = np.array(numbers), batch_size

    def __len__(self):
        return math.ceil(len(self.numbers) / self.batch_size)

    def __getitem__(self, index):
        numbers = self.numbers[index * self.batch_size : (index + 1) * self.batch_size]
        pictures, labels = zip(*(self.picture(number) for number in numbers), strict=True)
        return np.stack(pictures), np.array(labels)

    def picture(self, number):
        rng = np.random.default_rng([options.seed, number])
        label = rng.integers(3)
        picture = rng.normal(0, 1.0, (14, 14))
        if label != 1:
            picture[rng.integers(14)] += 1.3
        if label != 0:
            picture[:, rng.integers(14)] += 1.3
        return picture[..., None].astype("float32"), label

    def on_epoch_end(self):
        np.random.shuffle(self.numbers)


train = Bars(range(4001), batch_size=32, workers=1, use_multiprocessing=False)
test = Bars(range(10_000, 11_500), batch_size=100)

model = keras.Sequential(
    [
        keras.Input((14, 14, 1)),
        keras.layers.Conv2D(12, (1, 14), activation="relu", padding="same"),
        keras.layers.Conv2D(12, (14, 1), activation="relu", padding="same"),
        keras.layers.MaxPooling2D(2),
        keras.layers.Flatten(),
        keras.layers.Dropout(0.3),
        keras.layers.Dense(3, activation="softmax"),
    ]
)
model.compile("nadam", "sparse_categorical_crossentropy", metrics=["accuracy"])
model = thinwire.distribute(model)
model.fit(train, epochs=20, validation_data=test, verbose=2)

_, accuracy = model.evaluate(test, verbose=0)
print(json.dumps({"metric": "accuracy", "value": accuracy}))
