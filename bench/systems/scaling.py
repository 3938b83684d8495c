"""Measure the server's cost of an update with more workers and with more shards.

Real processes train mnist_cnn with batch size 64. The cost is the processor time of all shards'
processes, divided by the number of updates. Processor time shows the server's limit even if the
workers' computing fills all cores.

    python -m bench.systems.scaling --seconds 20
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import pathlib
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence

from bench.peers import thinwire, work
from bench.table import Row, render

METHODS = {"asgd": (), "dgs": ("--momentum=0",)}
WORKERS = (1, 2, 4, 8)
SHARDS = (1, 2, 4)
_WORKERS_OF_SHARDS = 2
#: Maximum of the processor time of an update with several workers or shards, divided by the time
#: with one worker or shard.
_GOAL = 1.5
_POLL_SECONDS = 0.25
#: The cost is independent of this rate; 0.01 makes eight asynchronous momentum workers diverge.
_LEARNING_RATE = 0.001
_TICKS = os.sysconf("SC_CLK_TCK")
#: Seconds of the run that are excluded as warm-up; `bench.peers.thinwire` excludes the same time.
_WARM_SECONDS = 6.0


def rows(seconds: float = 20.0) -> Iterator[Row]:
    """Measure each case, and yield its row of the table."""
    for method in METHODS:
        alone: float | None = None
        for number in WORKERS:
            cost = cost_of_update(method, number, 1, seconds)
            alone = cost if alone is None else alone
            yield _row(f"server's update, {method}, workers: {number}", cost, alone, number)
        alone = None
        for number in SHARDS:
            cost = cost_of_update(method, _WORKERS_OF_SHARDS, number, seconds)
            alone = cost if alone is None else alone
            yield _row(
                f"servers' update, {method}, 2 workers, shards: {number}", cost, alone, number
            )


def _row(name: str, cost: float, alone: float, number: int) -> Row:
    goal = _GOAL if number > 1 else None
    return Row(
        name,
        1e3 * cost,
        "ms",
        1e3 * alone,
        cost / alone,
        goal,
        "lower",
        f"at most {1 / cost:.0f} updates/s of a core",
    )


def cost_of_update(method: str, workers: int, shards: int, seconds: float) -> float:
    """Run a cluster; return the processor seconds of all shards per update.

    Raises:
        RuntimeError: The run failed, or was too short to measure.
    """
    task = work.Work(seconds, 0, workers, 64, _LEARNING_RATE, 0.9, 1)
    extra = (*METHODS[method], f"--nb_ps={shards}", "--type_node=Cluster")
    with tempfile.TemporaryDirectory(prefix="thinwire-") as name:
        folder = pathlib.Path(name)
        with _watching(folder) as seen:
            thinwire.run(thinwire.flags(task, method, extra), seconds + 300.0, folder)
        return cost_between(seen, _WARM_SECONDS)


def cost_between(seen: Sequence[tuple[float, int, float]], warm: float) -> float:
    """Return the processor seconds per update from samples after the warm-up.

    Args:
        seen: Samples (seconds of the run, updates, processor seconds), in order of time.
        warm: Warm-up at the start of the run, in seconds.

    Raises:
        RuntimeError: No updates were made between the samples.
    """
    late = [entry for entry in seen if entry[0] >= warm]
    if len(late) < 2 or late[-1][1] <= late[0][1]:
        raise RuntimeError(f"no updates between {len(late)} samples: give the run more seconds")
    return (late[-1][2] - late[0][2]) / (late[-1][1] - late[0][1])


@contextlib.contextmanager
def _watching(folder: pathlib.Path) -> Iterator[list[tuple[float, int, float]]]:
    """Sample a run's status and its shards' processor time until the block ends."""
    seen: list[tuple[float, int, float]] = []
    over = threading.Event()

    def look() -> None:
        while not over.wait(_POLL_SECONDS):
            status = _newest(folder / "metrics.jsonl")
            if status is not None and (not seen or status[1] > seen[-1][1]):
                seen.append((*status, _processor_seconds(_is_shard_of(folder))))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def _newest(path: pathlib.Path) -> tuple[float, int] | None:
    """Return (seconds, updates) of the newest status line of a training run, or None."""
    with contextlib.suppress(OSError, ValueError):
        for line in reversed(path.read_text().splitlines()):
            entry = json.loads(line)
            if entry["kind"] == "status" and entry["stop_reason"] is None:
                return entry["seconds"], entry["version"]
    return None


def _is_shard_of(folder: pathlib.Path) -> Callable[[bytes], bool]:
    return lambda command: b"--type_node=PS" in command and str(folder).encode() in command


def _processor_seconds(wanted: Callable[[bytes], bool]) -> float:
    """Return the user and system seconds of all processes that `wanted(command line)` accepts."""
    total = 0
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # the process has just ended
            if wanted((process / "cmdline").read_bytes()):
                total += ticks((process / "stat").read_text())
    return total / _TICKS


def ticks(stat: str) -> int:
    """Return the user and system ticks in a line of /proc/PID/stat.

    The process name in the line may contain spaces and parentheses, so fields count from its end.
    """
    fields = stat.rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    options.add_argument("--seconds", type=float, default=20.0)
    sys.stdout.write(render(rows(options.parse_args().seconds)))


if __name__ == "__main__":
    main()
