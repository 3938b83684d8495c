"""Run Flower's FedAvg: the server, or one client, which trains with torch.

In a round each client trains on a number of local mini-batches. SGD's momentum is reset in each
round, as FedAvg defines it; AdamW's moments persist, as with the other local-step methods.
"""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

import flwr
import numpy as np
from numpy.typing import NDArray

from bench.peers import torch_model, work

_MOST_ROUNDS = 1_000_000


def _serve(task: work.Work, address: str) -> None:
    """Run the server until the harness kills it; write snapshots of the averaged models."""
    progress = work.PeerProgress(task, "server", snapshots=True)
    initial = torch_model.initial(task)

    def keep(number: int, tensors: Any, config: Any) -> None:
        del config
        if number == 0:  # round 0 is the initial model
            return
        progress.report(None, lambda: tensors[0])

    strategy = flwr.server.strategy.FedAvg(
        min_fit_clients=task.workers,
        min_available_clients=task.workers,
        fraction_evaluate=0.0,
        initial_parameters=flwr.common.ndarrays_to_parameters([initial]),
        evaluate_fn=keep,
    )
    config = flwr.server.ServerConfig(num_rounds=_MOST_ROUNDS)
    flwr.server.start_server(server_address=address, config=config, strategy=strategy)


class _Client(flwr.client.NumPyClient):
    def __init__(self, rank: int, task: work.Work, local_steps: int) -> None:
        self._task, self._local_steps, self._leads = task, local_steps, rank == 0
        self._own = torch_model.Trainee(task, rank)
        self._optimizer = self._own.optimizer()
        self._progress = work.PeerProgress(task, f"{rank}", snapshots=False)
        self._steps = 0

    def fit(
        self, parameters: list[NDArray[np.float32]], config: Any
    ) -> tuple[list[NDArray[np.float32]], int, dict[str, Any]]:
        """Take the local steps of one round, starting from the server's weights."""
        del config
        self._own.weights = parameters[0]
        if self._task.model != work.DECODER:
            self._optimizer = self._own.optimizer()
        for _ in range(self._local_steps):
            self._own.step(self._optimizer)
            self._steps += 1
            if self._progress.report(self._steps) and self._leads:
                os._exit(0)
        return [self._own.weights], self._local_steps * self._task.batch_size, {}


def main() -> None:
    options = work.parser(__doc__)
    options.add_argument("--rank", type=int, default=-1, help="rank of a client; -1: be the server")
    options.add_argument("--address", required=True, help="host:port of the server")
    options.add_argument(
        "--local_steps", type=int, default=50, help="mini-batches of a client per round"
    )
    arguments = options.parse_args()
    task = work.from_arguments(arguments)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if arguments.rank < 0:
        _serve(task, arguments.address)
        return
    torch_model.use_one_thread(task, arguments.rank)
    client = _Client(arguments.rank, task, arguments.local_steps)
    flwr.client.start_client(server_address=arguments.address, client=client.to_client())


if __name__ == "__main__":
    main()
