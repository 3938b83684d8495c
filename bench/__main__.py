"""What this machine does against its limits: ``python -m bench``; ``--peers`` adds the peers.

A part that fails is named, with its error, and the others go on; the exit code is then 1.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
import time
import traceback
from collections.abc import Sequence

from bench.table import Row, render

PARTS = ("kernels", "positions", "coding", "transport", "datagrams", "loop", "links")
#: Parts of real runs, whose length can be chosen.
_TIMED = ("loop", "links")
_PEERS = "peers"


def _rows(part: str, seconds: float) -> Sequence[Row]:
    """Return one part's rows; the part is imported only now, so that others work without it."""
    if part == _PEERS:
        return list(importlib.import_module("bench.peers.__main__").rows(seconds, rounds=2))
    module = importlib.import_module(f"bench.{part}")
    return module.rows(seconds) if part in _TIMED else module.rows()


def _measure(parts: Sequence[str], seconds: float) -> list[str]:
    """Print each part's table as it is ready; return the parts that failed."""
    failed = []
    for part in parts:
        start = time.perf_counter()
        try:
            table = render(_rows(part, seconds))
        except Exception:  # noqa: BLE001 - whatever fails, the other parts go on
            failed.append(part)
            table = traceback.format_exc()
        took = time.perf_counter() - start
        sys.stdout.write(f"\n{part} ({took:.0f} s)\n\n{table}")
        sys.stdout.flush()
    return failed


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    choices = (*PARTS, _PEERS)
    options.add_argument("--only", nargs="+", choices=choices, help="these parts and no others")
    options.add_argument("--peers", action="store_true", help="TensorFlow's and torch's too")
    options.add_argument("--seconds", type=float, default=20.0, help="of each run of processes")
    arguments = options.parse_args()
    parts = arguments.only or [*PARTS, *([_PEERS] if arguments.peers else [])]
    load = os.getloadavg()[0]
    sys.stdout.write(f"{os.cpu_count()} cores, load {load:.1f} before the start\n")
    failed = _measure(parts, arguments.seconds)
    if failed:
        sys.stdout.write(f"\nfailed: {', '.join(failed)}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
