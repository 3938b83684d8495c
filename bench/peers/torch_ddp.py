"""torch's DistributedDataParallel on gloo, one process a worker, optionally with a gradient hook.

Run it with the interpreter that setup.sh makes:
``bench/peers/.venv-torch/bin/python -m bench.peers.torch_ddp --hook none``.
"""

from __future__ import annotations

import math
import os
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from bench.peers import work


def build_model() -> nn.Module:
    """Return Keras' mnist_cnn with Keras' initialisation."""
    model = nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(0.25),
        nn.Flatten(),
        nn.Linear(9216, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, 10),
    )
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(module.weight)
            nn.init.zeros_(module.bias)
    return model


def _add_hook(model: nn.parallel.DistributedDataParallel, hook: str) -> None:
    if hook == "fp16":
        model.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)
    elif hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            dist.group.WORLD, matrix_approximation_rank=1, start_powerSGD_iter=10
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


class Trainer:
    """One worker: its model, its half of the data, its steps."""

    def __init__(self, rank: int, task: work.Work, hook: str) -> None:
        torch.manual_seed(task.seed)
        model = build_model()
        assert sum(weights.numel() for weights in model.parameters()) == work.NUM_PARAMETERS
        # PowerSGD chains its collectives: with two buckets the ranks may start them in another
        # order, which gloo answers by aborting. A set capacity makes one bucket of the model.
        capacity_mb = 25 if hook == "powersgd" else None
        self._model = nn.parallel.DistributedDataParallel(model, bucket_cap_mb=capacity_mb)
        _add_hook(self._model, hook)
        self._optimizer = torch.optim.SGD(
            self._model.parameters(), lr=task.learning_rate, momentum=task.momentum
        )
        images, labels = work.load()
        self._images = torch.from_numpy(images[rank :: task.workers, None])
        self._labels = torch.from_numpy(labels[rank :: task.workers])
        self._batch_size = task.batch_size
        self._generator = torch.Generator().manual_seed(task.seed + rank)

    def run(self, steps: int) -> float:
        """Take that many steps together with the others; return the seconds."""
        dist.barrier()
        start = time.perf_counter()
        for _ in range(steps):
            chosen = torch.randint(
                len(self._labels), (self._batch_size,), generator=self._generator
            )
            self._optimizer.zero_grad()
            logits = self._model(self._images[chosen])
            nn.functional.cross_entropy(logits, self._labels[chosen]).backward()
            self._optimizer.step()
        dist.barrier()
        return time.perf_counter() - start


def _worker(rank: int, rendezvous: str, task: work.Work, hook: str) -> None:
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=task.workers
    )
    trainer = Trainer(rank, task, hook)
    trainer.run(task.warmup_steps)
    pace = torch.tensor([trainer.run(task.warmup_steps) / task.warmup_steps])
    dist.broadcast(pace, 0)
    steps = max(1, math.ceil(task.seconds / pace.item()))
    before = work.loopback_bytes()
    seconds = trainer.run(steps)
    if rank == 0:
        carried = work.loopback_bytes() - before
        work.report(f"torch DDP, {hook}", task, steps * task.workers, seconds, carried)
    dist.destroy_process_group()


def main() -> None:
    options = work.parser(__doc__)
    options.add_argument("--hook", choices=("none", "fp16", "powersgd"), default="none")
    arguments = options.parse_args()
    task = work.from_arguments(arguments)
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(
            _worker, (os.path.join(folder, "rendezvous"), task, arguments.hook), task.workers
        )


if __name__ == "__main__":
    main()
