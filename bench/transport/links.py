"""Measure the methods' rates and bytes on thin links, and the advantage of sparse methods there.

Rates are measured with mnist_cnn, batch size 64 and 2 workers of one thread; bytes with 4 workers.
Methods that send weight changes or drop entries run without momentum on the server, which dense
methods use.

    python -m bench.transport.links --seconds 20
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping

from bench.peers import thinwire, work
from bench.table import Row, render, spread

_ROUNDS = 2
_FAST, _SLOW = "--link_mbps=100", "--link_mbps=10"
_PLAIN, _OVERLAP = "--momentum=0", "--overlap"
_FLOAT32 = ("--value_dtype=float32", "--down_value_dtype=float32")
_BFLOAT16 = ("--value_dtype=bfloat16", "--down_codec=sparse", "--down_value_dtype=bfloat16")
#: Name of a run -> method, then flags of main.py.
RUNS: Mapping[str, tuple[str, ...]] = {
    "asgd": ("asgd",),
    "asgd 100": ("asgd", _FAST),
    "asgd 10": ("asgd", _SLOW),
    "adacomp": ("adacomp", _PLAIN),
    "adacomp 100": ("adacomp", _PLAIN, _FAST),
    "dgs": ("dgs", _PLAIN),
    "dgs 100": ("dgs", _PLAIN, _FAST),
    "dgs float32 100": ("dgs", _PLAIN, *_FLOAT32, _FAST),
    "dgs 10": ("dgs", _PLAIN, _SLOW),
    "asgd ahead": ("asgd", _OVERLAP),
    "adacomp ahead": ("adacomp", _PLAIN, _OVERLAP),
    "adacomp ahead 100": ("adacomp", _PLAIN, _OVERLAP, _FAST),
    "dgs ahead": ("dgs", _PLAIN, _OVERLAP),
    "dgs ahead 100": ("dgs", _PLAIN, _OVERLAP, _FAST),
}
#: Rows of rates: (name of the row, run, run to compare with, goal of the ratio of samples/s).
_RATES: tuple[tuple[str, str, str, float | None], ...] = (
    ("asgd at 100 Mbit/s / without limit", "asgd 100", "asgd", None),
    ("adacomp at 100 Mbit/s / without limit", "adacomp 100", "adacomp", 0.9),
    ("dgs at 100 Mbit/s / without limit", "dgs 100", "dgs", 0.9),
    ("asgd with / without --overlap, no limit", "asgd ahead", "asgd", None),
    ("adacomp --overlap at 100 Mbit/s / no limit", "adacomp ahead 100", "adacomp ahead", 0.9),
    ("dgs --overlap at 100 Mbit/s / no limit", "dgs ahead 100", "dgs ahead", 0.9),
    ("dgs, float32 / asgd, at 100 Mbit/s", "dgs float32 100", "asgd 100", 8.0),
    ("dgs / asgd, at 10 Mbit/s", "dgs 10", "asgd 10", 40.0),
)
#: Rows of bytes: (name of the row, flags, maximum share of asgd's bytes).
_BYTES = (
    ("dgs, float32 both ways / asgd", _FLOAT32, 1 / 20),
    ("dgs, bfloat16 both ways / asgd", _BFLOAT16, 1 / 35),
)


def rows(seconds: float = 20.0) -> list[Row]:
    """Measure all runs, and return the rows of the table."""
    return [*_rate_rows(seconds), *_byte_rows(seconds)]


def _rate_rows(seconds: float) -> list[Row]:
    rounds = [
        {name: _measure(seconds, 2, *run) for name, run in RUNS.items()} for _ in range(_ROUNDS)
    ]
    rates = {name: [_rate(results[name]) for results in rounds] for name in RUNS}
    return [_rate_row(name, rates[ours], rates[other], goal) for name, ours, other, goal in _RATES]


def _rate_row(name: str, ours: list[float], other: list[float], goal: float | None) -> Row:
    rate, limit = statistics.median(ours), statistics.median(other)
    ratios = spread(own_rate / other_rate for own_rate, other_rate in zip(ours, other, strict=True))
    return Row(name, rate, "samples/s", limit, rate / limit, goal, "higher", spread=ratios)


def _byte_rows(seconds: float) -> list[Row]:
    dense = _measure(seconds, 4, "asgd")["bytes_per_exchange"]
    table_rows = []
    for name, flags, goal in _BYTES:
        ours = _measure(seconds, 4, "dgs", _PLAIN, *flags)["bytes_per_exchange"]
        row = Row(f"bytes of a step of {name}", ours, "B", dense, ours / dense, goal, "lower")
        table_rows.append(row)
    return table_rows


def _measure(seconds: float, workers: int, method: str, *flags: str) -> dict[str, float]:
    """Run a cluster. Runs at 10 Mbit/s are longer, because a dense exchange takes 8 s."""
    length = 4 * seconds if _SLOW in flags else seconds
    return thinwire.measure(work.Work(length, 0, workers, 64, 0.01, 0.9, 1), method, flags)


def _rate(found: Mapping[str, float]) -> float:
    return found["samples"] / found["seconds"]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    options.add_argument("--seconds", type=float, default=20.0)
    sys.stdout.write(render(rows(options.parse_args().seconds)))


if __name__ == "__main__":
    main()
