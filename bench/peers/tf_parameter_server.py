"""Run TensorFlow's ParameterServerStrategy: the ps, a worker, or the coordinator.

Keras 3 does not support this strategy, so the model uses TensorFlow operations. The momentum step
is TensorFlow's fused operation for Keras' momentum, executed on the ps, which holds the variables.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from collections.abc import Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from bench.peers import work

#: With one inter-op thread the first steps do not end within five minutes. One intra-op thread does
#: the arithmetic.
_INTER_OP_THREADS = 3
#: Scheduled steps per worker: enough to keep workers busy, with few steps left over at the end.
_STEPS_AHEAD = 4
_POLL_SECONDS = 0.05


def _loss(weights: list[tf.Variable], images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    first, bias_1, second, bias_2, hidden, bias_3, logits, bias_4 = weights
    x = tf.nn.relu(tf.nn.conv2d(images, first, 1, "VALID") + bias_1)
    x = tf.nn.relu(tf.nn.conv2d(x, second, 1, "VALID") + bias_2)
    x = tf.nn.dropout(tf.nn.max_pool2d(x, 2, 2, "VALID"), 0.25)
    x = tf.nn.relu(tf.reshape(x, (-1, 9216)) @ hidden + bias_3)
    x = tf.nn.dropout(x, 0.5) @ logits + bias_4
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, x))


def _dataset(task: work.Work) -> tf.data.Dataset:
    """Return a data set that reads files on each worker; arrays would be sent inside the graph."""
    images, labels = work.files()
    together = tf.data.Dataset.zip(
        (
            tf.data.FixedLengthRecordDataset(str(images), 784, 16, compression_type="GZIP"),
            tf.data.FixedLengthRecordDataset(str(labels), 1, 8, compression_type="GZIP"),
        )
    )

    def decode(pixels: tf.Tensor, classes: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        values = tf.cast(tf.io.decode_raw(pixels, tf.uint8), tf.float32)
        scaled = (values - work.PIXEL_MEAN) / work.PIXEL_DEVIATION
        numbers = tf.cast(tf.io.decode_raw(classes, tf.uint8), tf.int64)
        return tf.reshape(scaled, (-1, 28, 28, 1)), tf.reshape(numbers, (-1,))

    endless = together.cache().shuffle(10_000).repeat()  # each worker has a different order
    return endless.batch(task.batch_size, drop_remainder=True).map(decode).prefetch(2)


def _serve(job: str, index: int, cluster: dict[str, list[str]]) -> None:
    """Run a ps or a worker until the harness kills the process."""
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=1, inter_op_parallelism_threads=_INTER_OP_THREADS
    )
    tf.distribute.Server(
        tf.train.ClusterSpec(cluster),
        job_name=job,
        task_index=index,
        protocol="grpc",
        config=config,
    ).join()


def _strategy(cluster: dict[str, list[str]]) -> tf.distribute.Strategy:
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), task_type="chief", task_id=0, rpc_layer="grpc"
    )
    return tf.distribute.ParameterServerStrategy(resolver)


class ParameterServerTrainer:
    """The coordinator, which schedules steps on workers that are free."""

    def __init__(self, strategy: tf.distribute.Strategy, task: work.Work) -> None:
        tf.random.set_seed(task.seed)
        tensors = work.unflatten(work.initial(task.seed))
        with strategy.scope():
            weights = [tf.Variable(values) for values in tensors]
            velocity = [tf.Variable(tf.zeros(values.shape)) for values in tensors]
            done = tf.Variable(0, dtype=tf.int64)

        @tf.function
        def replica_step(images: tf.Tensor, labels: tf.Tensor) -> None:
            with tf.GradientTape() as tape:
                loss = _loss(weights, images, labels)
            for variable, moving, gradient in zip(
                weights, velocity, tape.gradient(loss, weights), strict=True
            ):
                with tf.device(variable.device):
                    tf.raw_ops.ResourceApplyKerasMomentum(
                        var=variable.handle,
                        accum=moving.handle,
                        lr=task.learning_rate,
                        grad=gradient,
                        momentum=task.momentum,
                    )
            with tf.device(done.device):
                done.assign_add(1)

        @tf.function
        def step(iterator: tf.data.Iterator) -> None:
            strategy.run(replica_step, args=next(iterator))

        self._step, self._done, self._weights = step, done, weights
        self._ahead = _STEPS_AHEAD * task.workers
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self._iterator = iter(self._coordinator.create_per_worker_dataset(lambda: _dataset(task)))

    def weights(self) -> NDArray[np.float32]:
        """Return the current weights on the ps, flat in Keras' order."""
        return work.flatten([variable.numpy() for variable in self._weights])

    def run(self, report: Callable[[int], bool]) -> None:
        """Schedule steps until `report(steps)` returns True; `steps` counts the finished steps."""
        scheduled, over = 0, False
        while not over:
            done = int(self._done.numpy())
            while scheduled < done + self._ahead:
                self._coordinator.schedule(self._step, args=(self._iterator,))
                scheduled += 1
            if done:
                over = report(done)
            threading.Event().wait(_POLL_SECONDS)


def _coordinate(task: work.Work, cluster: dict[str, list[str]]) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    trainer = ParameterServerTrainer(_strategy(cluster), task)
    # The coordinator counts the steps of all workers.
    together = dataclasses.replace(task, steps=task.steps * task.workers)
    progress = work.PeerProgress(together, "all", snapshots=True)
    trainer.run(lambda steps: progress.report(steps, trainer.weights))


def main() -> None:
    options = work.parser(__doc__)
    options.add_argument("--cluster", required=True, help="addresses of each job, as JSON")
    options.add_argument("--job", choices=("chief", "ps", "worker"), required=True)
    options.add_argument("--index", type=int, default=0)
    arguments = options.parse_args()
    cluster = json.loads(arguments.cluster)
    if arguments.job == "chief":
        _coordinate(work.from_arguments(arguments), cluster)
        os._exit(0)  # else the strategy's threads retry killed servers for minutes
    _serve(arguments.job, arguments.index, cluster)


if __name__ == "__main__":
    main()
