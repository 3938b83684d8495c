"""A small made-up run for the tests of reports, dashboards and other outputs."""

from __future__ import annotations

import json
import math
import pathlib

from thinwire.runtime.persistence.documents import write_json_atomically
from thinwire.runtime.telemetry.evaluation import Evaluation
from thinwire.runtime.telemetry.run_status import Histogram, RunStatus, WorkerMetrics, summarise


def make_worker(number: int, version: int, **changes) -> WorkerMetrics:
    """A worker that has done its share of ``version`` updates."""
    values = {
        "state": "training",
        "clock": version // 4,
        "lag": number - 1,
        "pushes": version // 4,
        "samples": 10 * version // 4,
        "bytes_up": 9_000 * version // 4,
        "bytes_down": 30_000 * version // 4,
        "compute_seconds": 0.008 * version * (1 + 0.2 * number),
        "encode_seconds": 0.001 * version,
        "send_seconds": 0.0015 * version,
        "wait_seconds": 0.006 * version * (1 - 0.15 * number),
        "loss": 2.3 * math.exp(-version / 1500),
        "steps_per_second": 12.5 / number,
    }
    return WorkerMetrics(number, **values | changes)


def make_status(version: int = 800, **changes) -> RunStatus:
    """Four workers of an AdaComp run after ``version`` updates."""
    values = {
        "run_id": "a1b2c3",
        "method": "adacomp",
        "seams": {"pacer": "every", "codec": "topk", "down_codec": "delta", "sync": "asp"},
        "nb_workers": 4,
        "nb_ps": 1,
        "num_parameters": 421_642,
        "seed": 1,
        "iter_max": 2000,
        "version": version,
        "samples": 10 * version,
        "seconds": 0.02 * version,
        "learning_rate": 0.02,
        "staleness": Histogram(
            {0: version // 20, 1: version // 8, 2: version // 4, 3: version // 2}
        ),
        "bytes_up": 9_000 * version,
        "bytes_down": 30_000 * version,
        "pushes": version,
        "pulls": version + 4,
        "workers": [make_worker(number, version) for number in (1, 2, 3, 4)],
    }
    return RunStatus(**values | changes)


def make_evaluation(version: int, best: float = 0.85, **changes) -> Evaluation:
    """An evaluation on a plausible learning curve; changes may be of its metrics, too."""
    accuracy = best - (best - 0.1) * math.exp(-version / 400)
    metrics = {"accuracy": accuracy, "loss": 2.3 * (1 - accuracy)}
    metrics |= {name: changes.pop(name) for name in tuple(metrics) if name in changes}
    values = {
        "samples": 10 * version,
        "seconds": 0.02 * version,
        "metrics": metrics,
        "bytes_up": 9_000 * version,
        "bytes_down": 30_000 * version,
        "versions": [version],
    }
    return Evaluation(version, **values | changes)


#: A run's datagram figures, equal in its status and its summary.
DATAGRAMS = {
    "pushes": 160,
    "k": 0.5,
    "fresh": 0.932,
    "fill": 0.95,
    "lateness": 1.25,
    "announced": 1200,
    "arrived": 1100,
    "late": 60,
    "lost": 40,
    "incomplete": 3,
    "late_used": 55,
    "blocks": {"all": 5000, "reliable": 2500, "skipped": 0, "dropped": 0, "non_finite": 1},
    "channels": [
        {"channel": 0, "blocks": 2500, "bytes_sent": 7_000_000},
        {
            "channel": 1,
            "blocks": 2499,
            "bytes_sent": 1_765_432,
            "datagrams_sent": 1201,
            "datagrams_received": 1160,
            "bytes_received": 1_700_000,
            "announced": 1200,
            "arrived": 1100,
            "late": 60,
            "lost": 40,
        },
    ],
    "dropped": {"duplicate": 7, "unknown session": 2},
    "unsent": {},
    "fallen_back": [2],
    "workers": [
        {
            "id": number,
            "pushes": 40,
            "k": 0.5,
            "fresh": 0.9 + number / 100,
            "fill": 0.97,
            "lateness": None,
            "announced": 300,
            "arrived": 280,
            "late": 10,
            "lost": 10,
            "datagrams_sent": 301,
            "fallen_back": number == 2,
        }
        for number in (1, 2, 3)
    ],
}


def write_run(
    run_dir: pathlib.Path, best: float = 0.85, metrics=None, target=None, **changes
) -> pathlib.Path:
    """Write summary.json and metrics.jsonl of a finished run; the evaluations may be given."""
    values = {} if metrics is None else {"metrics": metrics}
    run_dir.mkdir(parents=True)
    workers = [make_worker(number, 2000, state="done") for number in (1, 2, 3, 4)]
    status = make_status(2000, **{"stop_reason": "iter_max", "workers": workers} | changes)
    evaluations = [
        make_evaluation(version, best, bytes_up=status.bytes_up * version // 2000, **values)
        for version in range(0, 2001, 200)
    ]
    lines = [{"kind": "eval", **evaluation.to_dict()} for evaluation in evaluations]
    lines.append({"kind": "status", **status.to_dict()})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (run_dir / "metrics.jsonl").write_text(text, encoding="utf-8")
    write_json_atomically(run_dir / "summary.json", summarise(status, evaluations, target))
    return run_dir
