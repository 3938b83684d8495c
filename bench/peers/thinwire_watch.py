"""Watch a Thinwire run from its server: record the applied samples, and snapshots of the model.

The watcher connects to the shard as a Supervisor does, but it does not evaluate: the harness
evaluates the snapshots of every contender after the run.
"""

from __future__ import annotations

import dataclasses
import os
import queue
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ["CUDA_VISIBLE_DEVICES"] = "-1"

import numpy as np
from numpy.typing import NDArray

from bench.peers import work
from thinwire.models.flat_model import SharedModel
from thinwire.ops.sharding.split import place_tensors
from thinwire.ops.types import ModelSpec
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.grpc import StreamLost, Unreachable
from thinwire.proto.grpc.session import ClientSession, RequestRejected, payload_limit
from thinwire.runtime.run.settings import ModelChoice
from thinwire.supervisor.evaluator import ModelFetcher
from thinwire.supervisor.shard_stream import ShardStream

_START_SECONDS = 120.0
_RETRY_SECONDS = 0.3
_POLL_SECONDS = 0.1


def _choice(network: str, file: str, *sizes: int, task: str = "classification") -> ModelChoice:
    return ModelChoice(network, str(Path(__file__).with_name(file)), *sizes, task=task)


_CHOICES = {
    work.MNIST_CNN: _choice("mnist_cnn", "thinwire_model.py", 28, 1, 10),
    work.WIDE: _choice("mnist_cnn", "thinwire_wide.py", 28, 1, 10),
    work.DECODER: _choice("decoder", "thinwire_decoder.py", 28, 1, 256, task="tokens"),
}


def _connect(spec: ModelSpec, address: str) -> ShardStream:
    """Connect to the shard; retry until the shard listens.

    Raises:
        Unreachable: The shard does not listen within `_START_SECONDS`.
    """
    hello = pb.Hello(
        protocol_version=messages.PROTOCOL_VERSION,
        role=pb.ROLE_SUPERVISOR,
        model=messages.tensors_of(spec),
        num_shards=1,
    )
    (layout,) = place_tensors(spec, 1)
    deadline = time.monotonic() + _START_SECONDS
    while True:
        session = ClientSession(address, hello, payload_limit(layout, 0))
        try:
            session.open(2.0)
            return ShardStream(session, queue.SimpleQueue())
        except (StreamLost, Unreachable, RequestRejected):
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_SECONDS)


def _weights(viewer: ModelFetcher, shard: ShardStream) -> NDArray[np.float32]:
    view = viewer.fetch([shard])
    if view is None:
        raise RuntimeError("the shard did not answer a request for the model")
    return view.weights


def watch(
    task: work.Work,
    address: str,
    spec: ModelSpec,
    to_keras: Callable[[NDArray[np.float32]], NDArray[np.float32]],
    step_samples: int,
) -> None:
    """Record the steps and snapshots of a run until it has trained long enough.

    Args:
        task: Work that is trained.
        address: host:port of the shard.
        spec: Names and shapes of the model's variables at the shard.
        to_keras: Function that returns the shard's flat weights in Keras' order and layout.
        step_samples: Samples that the shard counts for one step of a worker.
    """
    shard = _connect(spec, address)
    viewer = ModelFetcher(spec, place_tensors(spec, 1), 0, in_step=False)
    # The shard counts the samples of all workers.
    together = dataclasses.replace(task, steps=task.steps * task.workers)
    progress = work.PeerProgress(together, "all", snapshots=True)
    over = False
    while not over:
        if shard.lost.is_set():
            raise RuntimeError(f"lost the shard: {shard.halt_cause!r}")
        if shard.status is not None and shard.status.samples:
            steps = shard.status.samples // step_samples
            over = progress.report(steps, lambda: to_keras(_weights(viewer, shard)))
        time.sleep(_POLL_SECONDS)


def main() -> None:
    options = work.parser(__doc__)
    options.add_argument("--address", required=True, help="host:port of the shard")
    arguments = options.parse_args()
    task = work.from_arguments(arguments)
    spec = SharedModel(_CHOICES[task.model], task.seed).spec
    watch(task, arguments.address, spec, lambda weights: weights, task.batch_size)
    os._exit(0)  # the stream's reader would wait for the shard


if __name__ == "__main__":
    main()
