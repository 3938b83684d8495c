"""Flower's FedAvg: the server, or one client, which trains with torch.

A round is a number of local mini-batches of each client, with an SGD of its own that begins anew,
as FedAvg has it.
"""

from __future__ import annotations

import logging
import os
import warnings
from typing import Any

import flwr
import numpy as np
from numpy.typing import NDArray
from torch import nn
from torch.optim import SGD

from bench.peers import torch_model, work

_MOST_ROUNDS = 1_000_000


def _serve(task: work.Work, address: str, local_steps: int) -> None:
    """Average until the time is over; keep the models of rounds."""
    progress = work.PeerProgress(task, "server", snapshots=True)

    def keep(number: int, tensors: Any, config: Any) -> None:
        del config
        if number == 0:  # nobody has joined yet
            return
        last = 0 < task.steps <= number * local_steps
        if progress.report(None, lambda: tensors[0], last):
            os._exit(0)

    strategy = flwr.server.strategy.FedAvg(
        min_fit_clients=task.workers,
        min_available_clients=task.workers,
        fraction_evaluate=0.0,
        initial_parameters=flwr.common.ndarrays_to_parameters([work.initial(task.seed)]),
        evaluate_fn=keep,
    )
    config = flwr.server.ServerConfig(num_rounds=_MOST_ROUNDS)
    flwr.server.start_server(server_address=address, config=config, strategy=strategy)


class _Client(flwr.client.NumPyClient):
    def __init__(self, rank: int, task: work.Work, local_steps: int) -> None:
        self._task, self._local_steps = task, local_steps
        self._model = torch_model.build_model(work.initial(task.seed))
        self._batches = torch_model.Batches(task, rank)
        self._progress = work.PeerProgress(task, f"{rank}", snapshots=False)
        self._steps = 0

    def fit(
        self, parameters: list[NDArray[np.float32]], config: Any
    ) -> tuple[list[NDArray[np.float32]], int, dict[str, Any]]:
        """Train on from the server's model."""
        del config
        torch_model.set_weights(self._model, parameters[0])
        optimizer = SGD(
            self._model.parameters(), lr=self._task.learning_rate, momentum=self._task.momentum
        )
        for _ in range(self._local_steps):
            images, labels = self._batches.next()
            optimizer.zero_grad()
            nn.functional.cross_entropy(self._model(images), labels).backward()
            optimizer.step()
            self._steps += 1
            self._progress.report(self._steps)
        flat = torch_model.get_weights(self._model)
        return [flat], self._local_steps * self._task.batch_size, {}


def main() -> None:
    options = work.parser(__doc__)
    options.add_argument("--rank", type=int, default=-1, help="of a client; without: the server")
    options.add_argument("--address", required=True, help="host:port of the server")
    options.add_argument("--local_steps", type=int, default=50, help="mini-batches of a round")
    arguments = options.parse_args()
    task = work.from_arguments(arguments)
    logging.getLogger("flwr").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    if arguments.rank < 0:
        _serve(task, arguments.address, arguments.local_steps)
        return
    torch_model.use_one_thread(task, arguments.rank)
    client = _Client(arguments.rank, task, arguments.local_steps)
    flwr.client.start_client(server_address=arguments.address, client=client.to_client())


if __name__ == "__main__":
    main()
