"""Run one worker of Thinwire in plain torch, with the model code of the other torch peers.

The harness starts one process per worker, with the interpreter that setup.sh installs, and a PS
that gets its model from the workers.
"""

from __future__ import annotations

import thinwire
from bench.peers import torch_model, work


def _train(rank: int, task: work.Work, settings: list[str]) -> None:
    """Train until worker 0 has trained long enough; the harness then kills the other workers."""
    trainee = torch_model.Trainee(task, rank)
    optimizer = trainee.optimizer()
    optimizer = thinwire.distribute(optimizer, settings, model=trainee.model)
    progress = work.PeerProgress(task, f"{rank}", rank == 0)
    steps, over = 0, False
    while not over or rank:
        trainee.step(optimizer)
        steps += 1
        over = progress.report(steps, lambda: trainee.weights)


def main() -> None:
    options = work.parser(__doc__)
    options.add_argument("--rank", type=int, required=True)
    options.add_argument("--address", required=True, help="host:port of the PS")
    options.add_argument("--flag", action="append", default=[], help="flag of the method")
    arguments = options.parse_args()
    task = work.from_arguments(arguments)
    torch_model.use_one_thread(task, arguments.rank)
    settings = [
        f"--nb_workers={task.workers}",
        f"--id_worker={arguments.rank + 1}",
        f"--ps_hosts={arguments.address}",
        "--model_from=worker",
        "--insecure",
        *arguments.flag,
    ]
    _train(arguments.rank, task, settings)


if __name__ == "__main__":
    main()
