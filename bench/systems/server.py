"""Measure a shard's cost of an update against raw sockets and the memory traffic of an update.

A real shard's server runs in a separate process. Light workers use the real client code to send
prepared gradients, and drop the replies. The cost is processor time, so other processes on the
machine hardly change it.

    python -m bench.systems.server
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import IO

import numpy as np

from bench.systems.shard_end import MOMENTUM, RUN_ID, method_of, spec_of
from bench.table import Row, render
from bench.transport.far_end import receive
from thinwire.ops.kernels.numpy_ops import peak
from thinwire.ops.optimizers.momentum_sgd import MomentumSGD
from thinwire.ops.push_head import PushHead, PushOrigin
from thinwire.ops.sharding.flat_updates import joined
from thinwire.ops.types import Block, CodedValues, ModelSpec, ShardLayout, Update
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import frames
from thinwire.proto.grpc.session import ClientSession, payload_limit
from thinwire.worker.client.messages import PushEncoder
from thinwire.worker.core.messages import PushRequest

_KEPT = 0.01  # share of the entries that a sparse push contains
_WARM_PUSHES = 20
_READY = 8  # number of prepared gradients, which are sent in rotation
_TIMEOUT_SECONDS = 60.0


class ReadyWorker:
    """A worker that pushes prepared gradients, and stores only the version of each reply."""

    def __init__(self, port: int, worker: int, name: str, workers: int, spec: ModelSpec) -> None:
        method = method_of(name, workers)
        (layout,) = method.place(spec, 1)
        hello = pb.Hello(
            protocol_version=messages.PROTOCOL_VERSION,
            role=pb.ROLE_WORKER,
            id=worker,
            fingerprint=messages.settings_of(method.fingerprint()),
            model=messages.tensors_of(spec),
            num_shards=1,
            run_id=RUN_ID,
        )
        self._kind, self._encoder = method.kind, PushEncoder(0, None)
        self._session = ClientSession(f"127.0.0.1:{port}", hello, 2 * payload_limit(layout))
        welcome = self._session.open(_TIMEOUT_SECONDS)
        self._incarnation, self._epoch = welcome.incarnation, welcome.epoch
        dense = name == "asgd"
        seeds = (worker + 100 * number for number in range(_READY))
        self._ready = [joined(list(_blocks(layout, dense, seed)), layout) for seed in seeds]
        self._session.send_control(pb.ToServer(pull=pb.Pull()), counted=True)
        self._step, self._version = 0, self._reply().version

    def _reply(self) -> pb.Reply:
        while True:
            message, _ = self._session.receive(_TIMEOUT_SECONDS)
            if message.WhichOneof("body") == "refusal":
                if message.refusal.reason == pb.REASON_STALE_EPOCH:
                    self._epoch = message.refusal.epoch
                    self._send()
                    continue
                raise RuntimeError(message.refusal.message)
            if message.WhichOneof("body") == "reply":
                self._epoch = max(self._epoch, message.reply.epoch)
                return message.reply

    def exchange_often(self, times: int) -> None:
        """Push and wait for the reply, `times` times."""
        for _ in range(times):
            self._step += 1
            self._send()
            self._version = self._reply().version

    def _send(self) -> None:
        request = PushRequest(
            PushHead(self._step, samples=64, local_steps=1, loss=0.5, schedule_rate=0.001),
            origins=[PushOrigin(self._version)],
            kind=self._kind,
            shards=[self._ready[self._step % _READY]],
        )
        for message, pieces in self._encoder.encode(request, self._incarnation, self._epoch):
            session = self._session
            session.stream.send(frames(message, pieces, session.chunk_bytes))

    def close(self) -> None:
        """Close the session."""
        self._session.close(0.0)


def _blocks(layout: ShardLayout, dense: bool, seed: int) -> Iterator[Block]:
    rng = np.random.default_rng(seed)
    for slot, piece in enumerate(layout.slices):
        at = None if dense else np.flatnonzero(rng.random(piece.size) < _KEPT)
        count = piece.size if at is None else len(at)
        values = (1e-3 * rng.normal(size=count)).astype(np.float32)
        if at is None or count:
            yield Block(slot, piece.size, at, CodedValues("float32", values))


class BenchedShard:
    """A shard in a separate process, and its light workers."""

    def __init__(self, name: str, workers: int, shards: int = 1, number: int = 0) -> None:
        place = [f"--shards={shards}", f"--number={number}"]
        command = [sys.executable, "-m", "bench.systems.shard_end", name, str(workers), *place]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._in: IO[str] = self._process.stdin  # type: ignore[assignment]
        self._out: IO[str] = self._process.stdout  # type: ignore[assignment]
        ports = json.loads(self._out.readline())
        self.pid = self._process.pid
        self._raw = socket.create_connection(("127.0.0.1", ports["raw"]))
        self._raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._workers = [
            ReadyWorker(ports["shard"], worker, name, workers, spec_of(shards, number))
            for worker in range(1, workers + 1)
        ]

    def _look(self) -> tuple[float, int]:
        self._in.write("?\n")
        self._in.flush()
        report = json.loads(self._out.readline())
        return report["seconds"], report["updates"]

    def cost(self, pushes: int) -> float:
        """Return the shard's processor seconds per update, over `pushes` pushes of every worker."""
        before = self._look()
        threads = [
            threading.Thread(target=worker.exchange_often, args=(pushes,))
            for worker in self._workers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        after = self._look()
        return (after[0] - before[0]) / (after[1] - before[1])

    def raw_cost(self, num_bytes: int, times: int) -> float:
        """Return the processor seconds to receive and return `num_bytes` over a raw socket."""
        data = memoryview(bytearray(num_bytes))
        before = self._look()[0]
        for _ in range(times):
            self._raw.sendall(num_bytes.to_bytes(8, "little"))
            self._raw.sendall(data)
            receive(self._raw, data)
        return (self._look()[0] - before) / times

    def close(self) -> None:
        """Close the workers, and end the shard's process."""
        self._raw.close()
        for worker in self._workers:
            worker.close()
        self._in.close()
        self._process.wait(_TIMEOUT_SECONDS)


@contextlib.contextmanager
def shard(name: str, workers: int, shards: int = 1, number: int = 0) -> Iterator[BenchedShard]:
    """Start shard `number` of `shards` with its light workers, and warm it up."""
    process = BenchedShard(name, workers, shards, number)
    try:
        process.cost(_WARM_PUSHES)
        yield process
    finally:
        process.close()


def memory_cost(size: int, repeats: int = 20) -> float:
    """Return the seconds that any server needs in memory for a dense gradient [size].

    The work is a check for non-finite values, and a step of SGD with momentum.
    """
    theta, gradients = np.ones(size, np.float32), [np.ones(size, np.float32) for _ in range(4)]
    optimizer, spent = MomentumSGD(0.9, theta), []
    for turn in range(repeats):
        update = Update(None, gradients[turn % 4])
        start = time.thread_time()
        peak(update.values)
        optimizer.step(theta, update, 1e-9, negate=False)
        spent.append(time.thread_time() - start)
    return statistics.median(spent)


@contextlib.contextmanager
def all_shards(name: str, workers: int, shards: int) -> Iterator[list[BenchedShard]]:
    """Start all `shards` shards; each shard has its own light workers."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(shard(name, workers, shards, n)) for n in range(shards)]


def rows(rounds: int = 6) -> Iterator[Row]:
    """Measure the shards, and yield the rows of the table."""
    size = spec_of().num_parameters
    with shard("asgd", 1) as single, all_shards("asgd", 1, 4) as four:
        ours, raw, divided = [], [], []
        for _ in range(rounds):
            ours.append(single.cost(40))
            raw.append(single.raw_cost(4 * size, 40))
            divided.append(sum(part.cost(60) for part in four))
    limit = statistics.median(raw) + memory_cost(size)
    cost = statistics.median(ours)
    note = f"raw TCP both ways {1e3 * statistics.median(raw):.2f} ms"
    yield _row("server's update, dense 4.8 MB", cost, limit, note)
    yield _row("servers' update, dense, shards: 4", statistics.median(divided), cost, "", 1.3)
    with contextlib.ExitStack() as stack:
        cases = [(1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (2, 4)]
        runs = [stack.enter_context(all_shards("dgs", *case)) for case in cases]
        costs: list[list[float]] = [[] for _ in cases]
        for _ in range(rounds):
            for parts, case_costs, (workers, _) in zip(runs, costs, cases, strict=True):
                case_costs.append(sum(part.cost(240 // workers) for part in parts))
    medians = [statistics.median(case_costs) for case_costs in costs]
    for (workers, shards), cost in zip(cases, medians, strict=True):
        if shards == 1:
            yield _row(f"server's update, dgs, workers: {workers}", cost, medians[0], "")
        else:
            yield _row(f"servers' update, dgs, 2 workers, shards: {shards}", cost, medians[1], "")


def _row(name: str, cost: float, limit: float, note: str, goal: float = 1.5) -> Row:
    return Row(name, 1e3 * cost, "ms", 1e3 * limit, cost / limit, goal, "lower", note)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    options.add_argument("--rounds", type=int, default=6)
    options.add_argument("--method", choices=MOMENTUM, help="run only this method, for a profiler")
    options.add_argument("--workers", type=int, default=1)
    options.add_argument(
        "--shards", type=int, default=1, help="number of shards; the first is measured"
    )
    options.add_argument("--pushes", type=int, default=400)
    arguments = options.parse_args()
    if arguments.method is None:
        sys.stdout.write(render(rows(arguments.rounds)))
        return
    with shard(arguments.method, arguments.workers, arguments.shards) as measured:
        sys.stdout.write(f"pid {measured.pid}\n")
        sys.stdout.flush()
        sys.stdout.write(f"{1e3 * measured.cost(arguments.pushes):.3f} ms\n")


if __name__ == "__main__":
    main()
