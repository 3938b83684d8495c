"""Measure the minimum time of `bench.studies.federated`: a run's mini-batches alone, on all cores.

``python -m bench.studies.federated_floor FOLDER METHOD`` reads one seed's FOLDER, which
`bench.studies.federated` wrote. It takes the SGD steps of every drawn client's epoch and prints the
seconds. One compiled function executes each mini-batch, with one thread per core. Rounds do not
wait for each other, and the clients' weights are not merged.
"""

from __future__ import annotations

import itertools
import os
import pathlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from thinwire.models.fast_bias import plain_bias_sums
from thinwire.ops.sync.drawn import parse_draws

BATCH, RATE = 10, 0.05


def main(folder: pathlib.Path, method: str) -> None:
    """Take the steps; print their number, the seconds, and the processor seconds."""
    cores = len(os.sched_getaffinity(0))
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(cores)
    model = keras.models.load_model(folder / "model.keras", compile=False)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    variables = model.trainable_variables
    data = np.load(folder / "data.npz")
    images, labels = data["train_x"], data["train_y"]
    lines = (folder / "parts.txt").read_text().splitlines()
    parts = [np.array(line.split(), dtype=np.int64) for line in lines]
    draws = parse_draws((folder / method / "draws.txt").read_text(), "draws", len(parts))

    @tf.function(reduce_retracing=True, autograph=False)
    def step(weights: list[Any], x: Any, y: Any) -> list[Any]:
        with keras.StatelessScope(list(zip(variables, weights, strict=True))):
            with plain_bias_sums(), tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch(weights)
                loss = loss_of(y, model(x, training=True))
            gradients = tape.gradient(loss, weights)
        return [w - RATE * g for w, g in zip(weights, gradients, strict=True)]

    def train(client: int) -> int:
        weights = [tf.convert_to_tensor(variable.value) for variable in variables]
        client_rows = parts[client - 1]
        batches = [
            client_rows[start : start + BATCH] for start in range(0, len(client_rows), BATCH)
        ]
        for chosen in batches:
            weights = step(weights, images[chosen], labels[chosen])
        return len(batches)

    began = time.perf_counter(), time.process_time()
    with ThreadPoolExecutor(cores) as threads:
        steps = sum(threads.map(train, itertools.chain.from_iterable(draws[:50])))
    seconds, of_cores = time.perf_counter() - began[0], time.process_time() - began[1]
    sys.stdout.write(f"{steps} steps in {seconds:.1f} s, {of_cores:.1f} s of processor time\n")


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]), sys.argv[2])
