"""Run hivemind with local updates: one worker, or the DHT's first node, which workers connect to.

A worker takes local steps. When all workers together have processed the samples of a round, they
average their parameters in the background, which is hivemind's default.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import hivemind

from bench.peers import torch_model, work

_PATIENCE = 600.0  # seconds; an exchange takes half a minute at 1 Mbit/s
_MATCHMAKING = 3.0
_POLL = 0.2
_MEETING = "hivemind-address"  # file with the first node's addresses, in the progress folder


def _dht(address: str, port: int, others: list[str]) -> hivemind.DHT:
    return hivemind.DHT(
        host_maddrs=[f"/ip4/{address}/tcp/{port}"], initial_peers=others, start=True
    )


def _meet(task: work.Work, address: str, port: int) -> None:
    """Run the DHT's first node until the harness kills the process."""
    dht = _dht(address, port, [])
    path = Path(task.folder) / _MEETING
    new = path.with_suffix(".new")
    new.write_text("\n".join(map(str, dht.get_visible_maddrs())))
    new.rename(path)
    threading.Event().wait()


def _train(task: work.Work, rank: int, round_steps: int, dht: hivemind.DHT) -> None:
    """Train until worker 0 has trained long enough; the harness then kills the other workers."""
    trainee = torch_model.Trainee(task, rank)
    optimizer = hivemind.Optimizer(
        dht=dht,
        run_id="peers",
        params=trainee.model.parameters(),
        optimizer=trainee.optimizer_of,
        batch_size_per_step=task.batch_size,
        target_batch_size=task.batch_size * task.workers * round_steps,
        use_local_updates=True,
        matchmaking_time=_MATCHMAKING,
        averaging_timeout=_PATIENCE,
        next_chunk_timeout=_PATIENCE,
    )
    progress = work.PeerProgress(task, f"{rank}", rank == 0)
    steps, over = 0, False
    while not over or rank:
        trainee.step(optimizer)
        steps += 1
        over = progress.report(steps, lambda: trainee.weights)


def main() -> None:
    options = work.parser(__doc__)
    options.add_argument("--local_steps", type=int, default=50)
    options.add_argument(
        "--rank", type=int, default=-1, help="rank of a worker; -1: be the first node"
    )
    options.add_argument("--address", required=True, help="host:port of this process")
    arguments = options.parse_args()
    task = work.from_arguments(arguments)
    address, _, port = arguments.address.rpartition(":")
    if arguments.rank < 0:
        _meet(task, address, int(port))
        return
    torch_model.use_one_thread(task, arguments.rank)
    meeting = Path(task.folder) / _MEETING
    while not meeting.exists():  # no time limit: the harness kills a run that does not start
        time.sleep(_POLL)
    dht = _dht(address, int(port), meeting.read_text().split())
    _train(task, arguments.rank, arguments.local_steps, dht)
    os._exit(0)  # an orderly shutdown could wait for the other workers, which still train


if __name__ == "__main__":
    main()
