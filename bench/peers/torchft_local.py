"""Run torchft's DiLoCo or LocalSGD on gloo: one worker, or the workers' lighthouse.

Each worker is a replica group of size one and has its own manager.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import os
import threading
from typing import Any

import torch
import torchft
from torch.distributed import TCPStore
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo, LocalSGD

from bench.peers import torch_model, work

_PATIENCE = datetime.timedelta(minutes=10)  # an exchange takes half a minute at 1 Mbit/s
_OUTER_RATE, _OUTER_MOMENTUM = 0.7, 0.9  # DiLoCo's defaults
_JOIN_MS = 60_000


def _be_lighthouse(task: work.Work, port: int) -> None:
    """Run the lighthouse until the harness kills the process."""
    lighthouse = LighthouseServer(
        bind=f"[::]:{port}", min_replicas=task.workers, join_timeout_ms=_JOIN_MS
    )
    threading.Event().wait()
    lighthouse.shutdown()


def _manager(task: work.Work, rank: int, store: TCPStore, address: str, lighthouse: str) -> Any:
    return torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=_PATIENCE),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=task.workers,
        use_async_quorum=False,
        timeout=_PATIENCE,
        quorum_timeout=_PATIENCE,
        rank=0,
        world_size=1,
        store_addr=address,
        store_port=store.port,
        lighthouse_addr=f"http://{lighthouse}",
        replica_id=f"worker{rank}",
        hostname=address,
        init_sync=False,  # all workers have the same initial weights
    )


def _exchange(
    method: str, manager: Any, own: torch_model.Trainee, optimizer: Any, round_steps: int
) -> contextlib.AbstractContextManager[Any]:
    if method == "localsgd":
        return LocalSGD(manager, own.model, optimizer, sync_every=round_steps)
    outer = torch.optim.SGD(
        own.model.parameters(), lr=_OUTER_RATE, momentum=_OUTER_MOMENTUM, nesterov=True
    )
    return DiLoCo(
        manager, [own.model], optimizer, outer, sync_every=round_steps, use_bucketization=True
    )


def _train(task: work.Work, rank: int, method: str, round_steps: int, manager: Any) -> None:
    """Train until worker 0 has trained long enough; the harness then kills the other workers."""
    trainee = torch_model.Trainee(task, rank)
    optimizer = trainee.optimizer()
    progress = work.PeerProgress(task, f"{rank}", rank == 0)
    steps, over = 0, False
    with _exchange(method, manager, trainee, optimizer, round_steps):
        while not over or rank:
            trainee.step(optimizer)
            steps += 1
            exchanged = steps % round_steps == 0
            over = progress.report(steps, (lambda: trainee.weights) if exchanged else None)


def main() -> None:
    options = work.parser(__doc__)
    options.add_argument("--method", choices=("diloco", "localsgd"), default="diloco")
    options.add_argument("--local_steps", type=int, default=50)
    options.add_argument(
        "--rank", type=int, default=-1, help="rank of a worker; -1: be the lighthouse"
    )
    options.add_argument("--lighthouse", required=True, help="host:port of the lighthouse")
    options.add_argument("--address", default="", help="address of this worker")
    options.add_argument("--interface", default="", help="network interface to the other workers")
    arguments = options.parse_args()
    task = work.from_arguments(arguments)
    if arguments.rank < 0:
        _be_lighthouse(task, int(arguments.lighthouse.rpartition(":")[2]))
        return
    logging.getLogger().setLevel(logging.WARNING)
    torch_model.use_one_thread(task, arguments.rank)
    os.environ["GLOO_SOCKET_IFNAME"] = arguments.interface
    address = arguments.address
    store = TCPStore(host_name=address, port=0, is_master=True, wait_for_workers=False)
    manager = _manager(task, arguments.rank, store, address, arguments.lighthouse)
    _train(task, arguments.rank, arguments.method, arguments.local_steps, manager)
    os._exit(0)  # leaving the quorum would wait for the other workers, which still train


if __name__ == "__main__":
    main()
