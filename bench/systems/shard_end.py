"""Run one shard for `bench.systems.server`: ``python -m bench.systems.shard_end METHOD WORKERS``.

The process serves a model of the size of mnist_cnn, or one shard's part of this model. As a limit
for comparison it also serves raw sockets that receive and return bytes. For each line on standard
input it prints its processor seconds and the number of updates so far.
"""

from __future__ import annotations

import argparse
import json
import socket
import sys
import threading
import time

import numpy as np

from bench.transport.far_end import receive
from thinwire.ops.kernels import load_kernels
from thinwire.ops.methods.builder import Choices, compose
from thinwire.ops.methods.method import Method
from thinwire.ops.optimizers.schedule import Budget, Schedule
from thinwire.ops.sharding.split import shard_spec
from thinwire.ops.types import ModelSpec, TensorSpec
from thinwire.ps.core.core import PsCore
from thinwire.ps.core.members import CoreConfig
from thinwire.ps.core.membership import Coordinator
from thinwire.ps.service.handshake import Identity
from thinwire.ps.service.served_model import ServedModel
from thinwire.ps.service.server import ShardServer
from thinwire.runtime.malloc import keep_freed_memory

#: Name of a measured method -> momentum.
MOMENTUM = {"asgd": 0.9, "dgs": 0.0}
RUN_ID = "bench"
_LEARNING_RATE = 0.001


def spec_of(shards: int = 1, number: int = 0) -> ModelSpec:
    """Return variables with mnist_cnn's shapes, or shard `number`'s pieces if `shards` > 1."""
    shapes: tuple[tuple[int, ...], ...] = (
        *((3, 3, 1, 32), (32,), (3, 3, 32, 64), (64,)),
        *((9216, 128), (128,), (128, 10), (10,)),
    )
    whole = ModelSpec(tuple(TensorSpec(f"w{i}", shape) for i, shape in enumerate(shapes)))
    if shards == 1:
        return whole
    pieces = method_of("asgd", 1).place(whole, shards)[number].slices
    return ModelSpec(tuple(TensorSpec(f"w{i}", (piece.size,)) for i, piece in enumerate(pieces)))


def method_of(name: str, workers: int) -> Method:
    """Return a composed method with the momentum in `MOMENTUM`."""
    choices = Choices.of(
        name, workers, compression_rate=0.01, momentum=MOMENTUM[name], overrides={}
    )
    return compose(choices)


def serve_shard(name: str, workers: int, spec: ModelSpec) -> ShardServer:
    """Return a shard server that listens; the caller runs it with `run_until`."""
    method, bodies = method_of(name, workers), load_kernels("numpy")
    (layout,) = method.place(spec, 1)
    config = CoreConfig(
        Budget(1 << 40), Schedule(_LEARNING_RATE), workers, spec=shard_spec(spec, layout)
    )
    theta = np.random.default_rng(1).normal(size=layout.size).astype(np.float32)
    core = PsCore(config, method, theta, bodies, Coordinator(workers, 1e9))
    server = ShardServer(ServedModel.of(core, spec, layout), 60.0)
    server.listen("127.0.0.1", 0)
    server.open_for(Identity(RUN_ID, 0, 1, 0, method.fingerprint(), spec, []), "{}")
    return server


def _answer_raw(listener: socket.socket) -> None:
    """Serve connections: read an 8-byte size and this number of bytes, and send the bytes back."""
    data = memoryview(bytearray(64 << 20))
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection:
            while order := connection.recv(8, socket.MSG_WAITALL):
                view = data[: int.from_bytes(order, "little")]
                receive(connection, view)
                connection.sendall(view)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    options.add_argument("method", choices=MOMENTUM)
    options.add_argument("workers", type=int)
    options.add_argument("--shards", type=int, default=1)
    options.add_argument("--number", type=int, default=0, help="number of this shard, from 0")
    arguments = options.parse_args()
    keep_freed_memory()
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_answer_raw, args=(listener,), daemon=True).start()
    spec = spec_of(arguments.shards, arguments.number)
    server = serve_shard(arguments.method, arguments.workers, spec)
    over = threading.Event()

    def report() -> None:
        for _ in sys.stdin:
            figures = {"seconds": time.process_time(), "updates": server.core.version}
            sys.stdout.write(json.dumps(figures) + "\n")
            sys.stdout.flush()
        over.set()

    threading.Thread(target=report, daemon=True).start()
    ports = {"raw": listener.getsockname()[1], "shard": server.server.port}  # type: ignore[union-attr]
    sys.stdout.write(json.dumps(ports) + "\n")
    sys.stdout.flush()
    server.run_until(over.is_set)


if __name__ == "__main__":
    main()
