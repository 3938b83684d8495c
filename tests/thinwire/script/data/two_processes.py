"""Reads one worker's part of unseeded pipelines, in a process with the launcher's seeds.

``two_processes.py WORKER NUM_WORKERS``: prints, as JSON, pipeline -> epoch -> rows.
"""

import json
import sys

import keras
import numpy as np
import tensorflow as tf

from tests.thinwire.script.data.places import batches, places
from tests.thinwire.script.data.test_batches import Rows
from thinwire.script.data.data import share
from thinwire.script.data.randomness import own_randomness

N, EPOCHS = 100, 3


def pipelines():
    """Return typical pipelines of scripts, all without a seed."""
    data = tf.data.Dataset.from_tensor_slices(np.arange(N)[:, None])
    permuted = np.random.permutation(N)
    return {
        "shuffled": data.shuffle(N).batch(8),
        "shuffled batches": data.batch(8).shuffle(20).prefetch(2),
        "counted after a shuffle": data.shuffle(N).take(N).map(lambda x: x).batch(8),
        "two shuffles": data.shuffle(30).repeat(1).take(N).shuffle(N).batch(8),
        "traced for a batch": data.shuffle(N)
        .batch(10, drop_remainder=True)
        .map(lambda x: tf.reshape(x, [10, 1])),
        "zipped": tf.data.Dataset.zip((data.shuffle(N), data.shuffle(N))).batch(8),
        "arrays": permuted[:, None],
        "PyDataset": Rows(N, 8, np.random),
    }


def main(worker, num_workers):
    keras.utils.set_random_seed(1)
    result = {}
    for one_group in (True, False):
        place = places(num_workers, one_group)[worker - 1]
        for name, x in pipelines().items():
            shared = share({"x": x, "y": None, "shuffle": True}, place)
            with own_randomness(place):
                result[f"{name}, {'one group' if one_group else 'alone'}"] = [
                    [row for batch in batches(shared.arguments) for row in batch]
                    for _ in range(EPOCHS)
                ]
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
