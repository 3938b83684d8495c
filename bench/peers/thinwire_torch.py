"""Run one worker of Thinwire that trains a torch module: the loop of the torch peers.

The words that this program does not know are Thinwire's flags, which give the worker its place in
the run and the method. The script does not report its steps: the watcher counts them at the shard.
"""

from __future__ import annotations

import sys

import thinwire
from bench.peers import torch_model, work
from thinwire.runtime.run.settings import EXIT_OF_STOP


def _train(task: work.Work, rank: int, settings: list[str]) -> str:
    """Train until the run ends, or the harness ends this process; return the run's stop reason."""
    trainee = torch_model.Trainee(task, rank)
    optimizer = thinwire.distribute(trainee.optimizer(), settings, model=trainee.model)
    with optimizer.thinwire:
        while not optimizer.thinwire.stopped:
            trainee.step(optimizer)
    return str(optimizer.thinwire.stop_reason)


def main() -> None:
    options = work.parser(__doc__)
    options.add_argument("--rank", type=int, required=True)
    arguments, settings = options.parse_known_args()
    task = work.from_arguments(arguments)
    torch_model.use_one_thread(task, arguments.rank)
    sys.exit(EXIT_OF_STOP.get(_train(task, arguments.rank, settings), 0))


if __name__ == "__main__":
    main()
