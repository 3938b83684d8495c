"""Run one worker of torch's DistributedDataParallel on gloo, optionally with a gradient hook.

The harness starts one process per worker, with the interpreter that setup.sh installs.
"""

from __future__ import annotations

import os
import sys

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from bench.peers import torch_model, work


def _add_hook(model: nn.parallel.DistributedDataParallel, hook: str) -> None:
    if hook == "fp16":
        model.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)
    elif hook == "powersgd":
        state = powerSGD_hook.PowerSGDState(
            dist.group.WORLD, matrix_approximation_rank=1, start_powerSGD_iter=10
        )
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


def _train(rank: int, task: work.Work, hook: str) -> None:
    """Train until worker 0 has trained long enough; the harness then kills the other workers."""
    trainee = torch_model.Trainee(task, rank)
    # PowerSGD chains its collectives. With two buckets the ranks may start them in different
    # orders, and gloo aborts. With this capacity the whole model is one bucket.
    capacity_mb = 25 if hook == "powersgd" else None
    model = nn.parallel.DistributedDataParallel(trainee.model, bucket_cap_mb=capacity_mb)
    _add_hook(model, hook)
    optimizer = trainee.optimizer_of(model.parameters())
    progress = work.PeerProgress(task, f"{rank}", rank == 0)
    steps, over = 0, False
    while not over or rank:
        trainee.step(optimizer, model)
        steps += 1
        over = progress.report(steps, lambda: trainee.weights)


def main() -> None:
    options = work.parser(__doc__)
    options.add_argument("--hook", choices=("none", "fp16", "powersgd"), default="none")
    options.add_argument("--rank", type=int, required=True)
    options.add_argument("--address", required=True, help="host:port of the first worker")
    options.add_argument(
        "--interface", required=True, help="network interface to the other workers"
    )
    arguments = options.parse_args()
    task = work.from_arguments(arguments)
    torch_model.use_one_thread(task, arguments.rank)
    os.environ["GLOO_SOCKET_IFNAME"] = arguments.interface
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{arguments.address}",
        rank=arguments.rank,
        world_size=task.workers,
    )
    _train(arguments.rank, task, arguments.hook)
    sys.stdout.flush()
    os._exit(0)  # leaving the group would wait for the other workers, which still train


if __name__ == "__main__":
    main()
