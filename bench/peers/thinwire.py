"""Run Thinwire on the peers' work: a Cluster of real processes, measured after its warm-up."""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence

from bench.peers import work

ROOT = pathlib.Path(__file__).resolve().parents[2]
WARMUP_SECONDS = 12.0  # start, tracing and the first evaluation slow the run down
_TAIL_SECONDS = 200.0  # time to start and to end on a busy machine


def training_flags(task: work.Work) -> list[str]:
    """Return the flags of main.py that are common to all methods, models and links."""
    return [
        *_data_flags(task),
        f"--batch_size={task.batch_size}",
        f"--nb_workers={task.workers}",
        "--worker_threads=1",
        f"--learning_rate={task.learning_rate}",
        *([f"--momentum={task.momentum}"] if task.model != work.DECODER else []),
        f"--seed={task.seed}",
        "--iter_max=100000000",
    ]


def script_flags(task: work.Work) -> list[str]:
    """Return the flags of a run whose workers' scripts have the model, the optimizer and data."""
    return ["--model_from=worker", f"--nb_workers={task.workers}"]


def _data_flags(task: work.Work) -> list[str]:
    if task.model == work.DECODER:
        return ["--task=tokens", "--dataset=stdlib", f"--data_dir={task.text}"]
    full = work.full_set_is_installed()
    return [f"--dataset={'fashion_mnist' if full else 'fashion_mnist_sample'}"]


def flags(task: work.Work, method: str, extra: Sequence[str] = ()) -> list[str]:
    """Return the command line of main.py for the peers' work."""
    return [
        sys.executable,
        str(ROOT / "main.py"),
        f"--method={method}",
        "--network=mnist_cnn",
        *training_flags(task),
        f"--max_seconds={WARMUP_SECONDS + task.seconds}",
        "--eval_interval_seconds=100000",
        "--port=0",
        *extra,
    ]


def run(command: Sequence[str], seconds: float, folder: pathlib.Path) -> None:
    """Run main.py with the run directory `folder`, without output.

    Raises:
        RuntimeError: main.py failed; the message has the end of its output.
        subprocess.TimeoutExpired: main.py ran longer than `seconds`.
    """
    environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"}
    with open(folder / "output.txt", "w+") as output:
        cluster = subprocess.Popen(
            [*command, f"--run_dir={folder}"],
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=output,
        )
        try:
            code = cluster.wait(seconds)
        except BaseException:
            cluster.send_signal(
                signal.SIGINT
            )  # main.py then ends its children; SIGKILL would orphan them
            cluster.wait()
            raise
        if code != 0:
            output.seek(0)
            raise RuntimeError(f"main.py: exit code {code}: {output.read()[-2000:]}")


def statuses(folder: pathlib.Path) -> list[dict[str, float]]:
    """Return the status lines of a run's metrics.jsonl, in order."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [entry for line in lines if (entry := json.loads(line))["kind"] == "status"]


def steady(folder: pathlib.Path) -> dict[str, float]:
    """Return samples, seconds and bytes of a run's steady part.

    Samples and seconds count from the end of the warm-up to the last update. Bytes of an exchange
    are the mean of the whole run, because workers report their bytes only at intervals.
    """
    entries = [e for e in statuses(folder) if e["seconds"] >= WARMUP_SECONDS - 6.0]
    first, last = entries[0], entries[-1]
    differences = {name: last[name] - first[name] for name in ("samples", "seconds")}
    summary = json.loads((folder / "summary.json").read_text())
    up, down = summary["bytes_up_per_push"], summary["bytes_down_per_pull"]
    return {**differences, "bytes_per_exchange": up + down}


def measure(task: work.Work, method: str, extra: Sequence[str] = ()) -> dict[str, float]:
    """Run a cluster and return the result of `steady`."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        command = [*flags(task, method, extra), "--type_node=Cluster"]
        run(command, WARMUP_SECONDS + task.seconds + _TAIL_SECONDS, folder)
        return steady(folder)
