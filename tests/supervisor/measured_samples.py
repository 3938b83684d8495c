"""Small made-up runs with measurements."""

from __future__ import annotations

import json
import pathlib

from tests.supervisor.samples import make_evaluation
from thinwire.runtime.persistence.documents import write_json_atomically
from thinwire.runtime.run.directory import rounds_of
from thinwire.runtime.telemetry.round_trace import Round, line_of


def make_round(number: int, seconds_a_round: float = 2.0, **changes) -> Round:
    """A round of an ESync worker with three local steps."""
    values = {
        "num_iters": number,
        "num_samples": 96,
        "total_time": seconds_a_round * number,
        "n_local": 3,
        "version": number,
        "bytes_sent": 1000,
        "bytes_received": 2000,
        "barrier_wait": 0.2,
        "transfer": 0.1,
        "time": {
            "check ready": 0.04,
            "get_batch": 0.03,
            "forward and backward": 0.9,
            "local update": 0.3,
            "encode": 0.01,
            "global update": 0.5,
        },
        "host": "alpha",
        "life": "1",
    }
    return Round(**values | changes)


def write_measured(
    run_dir: pathlib.Path,
    method: str = "esync",
    accuracies=(0.1, 0.5, 0.9),
    seconds_a_round: float = 2.0,
    workers: int = 2,
    num_rounds: int = 10,
    partition: str = "iid",
    **summary,
) -> pathlib.Path:
    """Write the input of the drawer and the exporter: evaluations are of rounds 0, 5, 10 ..."""
    for worker in range(1, workers + 1):
        path = rounds_of(run_dir, worker)
        path.parent.mkdir(parents=True, exist_ok=True)
        lines = [
            line_of(make_round(number, seconds_a_round, rank=worker - 1))
            for number in range(1, num_rounds + 1)
        ]
        path.write_text("".join(lines))
    evaluations = [
        make_evaluation(5 * at, accuracy=accuracy, seconds=5.0 * at * seconds_a_round)
        for at, accuracy in enumerate(accuracies)
    ]
    lines = [json.dumps({"kind": "eval", **each.to_dict()}) + "\n" for each in evaluations]
    (run_dir / "metrics.jsonl").write_text("".join(lines))
    values = {
        "schema": 1,
        "method": method,
        "network": "lenet",
        "partition": partition,
        "num_parameters": 1 << 18,
        "bytes_up": 40_000_000,
        "bytes_down": 60_000_000,
        "test_accuracy": accuracies[-1] if accuracies else None,
    }
    write_json_atomically(run_dir / "summary.json", values | summary)
    return run_dir
