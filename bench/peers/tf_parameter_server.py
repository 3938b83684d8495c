"""TensorFlow's ParameterServerStrategy: 1 ps, n workers and this coordinator as real processes.

Keras 3 does not support the strategy, so the model is written with TensorFlow's own operations and
the momentum step is the fused one that Keras' optimizer used, on the ps, where the variables are.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import tensorflow as tf

from bench.peers import work

_DIE_WITH_PARENT = 1  # Linux' PR_SET_PDEATHSIG
#: With one the first steps were not done after five minutes; the arithmetic has one thread.
_INTER_OP_THREADS = 3

#: name, shape, fan-in, fan-out (0: a bias, starts at zero)
_LAYERS = (
    ("convolution_1", (3, 3, 1, 32), 9, 288),
    ("bias_1", (32,), 0, 0),
    ("convolution_2", (3, 3, 32, 64), 288, 576),
    ("bias_2", (64,), 0, 0),
    ("hidden", (9216, 128), 9216, 128),
    ("bias_3", (128,), 0, 0),
    ("logits", (128, 10), 128, 10),
    ("bias_4", (10,), 0, 0),
)


def _initial(shape: tuple[int, ...], fan_in: int, fan_out: int) -> tf.Tensor:
    """Return Glorot-uniform weights, or zeros for a bias."""
    if fan_in == 0:
        return tf.zeros(shape)
    limit = math.sqrt(6.0 / (fan_in + fan_out))
    return tf.random.uniform(shape, -limit, limit)


def _loss(weights: list[tf.Variable], images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    first, bias_1, second, bias_2, hidden, bias_3, logits, bias_4 = weights
    x = tf.nn.relu(tf.nn.conv2d(images, first, 1, "VALID") + bias_1)
    x = tf.nn.relu(tf.nn.conv2d(x, second, 1, "VALID") + bias_2)
    x = tf.nn.dropout(tf.nn.max_pool2d(x, 2, 2, "VALID"), 0.25)
    x = tf.nn.relu(tf.reshape(x, (-1, 9216)) @ hidden + bias_3)
    x = tf.nn.dropout(x, 0.5) @ logits + bias_4
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, x))


def _dataset(task: work.Work) -> tf.data.Dataset:
    """Read the files on each worker; arrays would travel there inside the graph."""
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

    endless = together.cache().shuffle(10_000, seed=task.seed).repeat()
    return endless.batch(task.batch_size, drop_remainder=True).map(decode).prefetch(2)


def _serve(job: str, index: int, cluster: dict[str, list[str]]) -> None:
    """Be a ps or worker until killed."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
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


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@contextlib.contextmanager
def _servers(cluster: dict[str, list[str]]) -> Iterator[None]:
    """Run one process for every ps and worker; kill them at the end."""
    command = [sys.executable, "-m", "bench.peers.tf_parameter_server", "--cluster"]
    children = [
        subprocess.Popen([*command, json.dumps(cluster), "--job", job, "--index", str(index)])
        for job in ("ps", "worker")
        for index in range(len(cluster[job]))
    ]
    try:
        yield
    finally:
        for child in children:
            child.send_signal(signal.SIGKILL)
            child.wait()


def _strategy(cluster: dict[str, list[str]]) -> tf.distribute.Strategy:
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(cluster), task_type="chief", task_id=0, rpc_layer="grpc"
    )
    return tf.distribute.ParameterServerStrategy(resolver)


class Trainer:
    """The coordinator's part: schedules steps on whichever worker is free."""

    def __init__(self, strategy: tf.distribute.Strategy, task: work.Work) -> None:
        tf.random.set_seed(task.seed)
        with strategy.scope():
            weights = [tf.Variable(_initial(*rest), name=name) for name, *rest in _LAYERS]
            velocity = [tf.Variable(tf.zeros(shape)) for _, shape, *_ in _LAYERS]
        assert sum(math.prod(shape) for _, shape, *_ in _LAYERS) == work.NUM_PARAMETERS

        @tf.function
        def replica_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
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
            return loss

        @tf.function
        def step(iterator: tf.data.Iterator) -> tf.Tensor:
            return strategy.run(replica_step, args=next(iterator))

        self._step = step
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
        self._iterator = iter(self._coordinator.create_per_worker_dataset(lambda: _dataset(task)))

    def run(self, steps: int) -> float:
        """Let the workers take that many steps together; return the seconds."""
        start = time.perf_counter()
        results = [
            self._coordinator.schedule(self._step, args=(self._iterator,)) for _ in range(steps)
        ]
        self._coordinator.join()
        seconds = time.perf_counter() - start
        last_loss = float(results[-1].fetch())
        if not math.isfinite(last_loss):
            raise ArithmeticError(f"the loss became {last_loss}")
        return seconds


def _coordinate(task: work.Work) -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    addresses = [f"127.0.0.1:{port}" for port in _free_ports(task.workers + 2)]
    cluster = {"chief": addresses[:1], "ps": addresses[1:2], "worker": addresses[2:]}
    with _servers(cluster):
        trainer = Trainer(_strategy(cluster), task)
        warmup = task.warmup_steps * task.workers
        trainer.run(warmup)
        steps = math.ceil(task.seconds * warmup / trainer.run(warmup))
        before = work.loopback_bytes()
        seconds = trainer.run(steps)
        carried = work.loopback_bytes() - before
        work.report("TensorFlow ParameterServerStrategy", task, steps, seconds, carried)
        sys.stdout.flush()


def main() -> None:
    options = work.parser(__doc__)
    options.add_argument("--cluster", default="", help="JSON; given to the processes started here")
    options.add_argument("--job", default="")
    options.add_argument("--index", type=int, default=0)
    arguments = options.parse_args()
    if arguments.job:
        _serve(arguments.job, arguments.index, json.loads(arguments.cluster))
    else:
        _coordinate(work.from_arguments(arguments))
        os._exit(0)  # the strategy's threads retry their dead servers for minutes


if __name__ == "__main__":
    main()
