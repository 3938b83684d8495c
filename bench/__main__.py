"""What this machine does against its limits: ``python -m bench``; ``--peers`` adds the peers.

``--peers_from FILE`` takes the peers' rows from records that ``python -m bench.peers`` has made.

Every part prints its rows as it ends; all of them go to bench/results/ as Markdown and CSV, dated,
with machine, versions and commit, and index.md there has every row over time (`bench.history`). A
part that fails is named, with its error, and the others go
on; the exit code is then 1. A row that misses its goal is marked, and is no failure.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import importlib.util
import io
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import history, origin
from bench.table import Row, render

#: Parts and their modules, in the order in which they run.
PARTS = {
    "kernels": "bench.machine.kernels",
    "positions": "bench.machine.positions",
    "coding": "bench.machine.coding",
    "transport": "bench.transport.throughput",
    "datagrams": "bench.transport.datagrams",
    "journal": "bench.systems.journal",
    "loop": "bench.systems.loop",
    "links": "bench.transport.links",
    "scaling": "bench.systems.scaling",
    "server": "bench.systems.server",
}
#: Parts of real runs, whose length can be chosen.
_TIMED = ("loop", "links", "scaling")
_PEERS = "peers"
_PEER_ROUNDS = 2


def present() -> list[str]:
    """Return the parts that this checkout has."""
    return [part for part, module in PARTS.items() if importlib.util.find_spec(module) is not None]


def _rows(part: str, seconds: float, records: Path | None) -> Sequence[Row]:
    """Return one part's rows; the part is imported only now, so that others work without it."""
    if part == _PEERS:
        peers = importlib.import_module("bench.peers.__main__")
        return list(peers.rows_of(records) if records else peers.rows(seconds, _PEER_ROUNDS))
    module = importlib.import_module(PARTS[part])
    return list(module.rows(seconds) if part in _TIMED else module.rows())


def _measure(
    parts: Sequence[str], seconds: float, records: Path | None
) -> tuple[dict[str, Sequence[Row]], list[str]]:
    """Print each part's table as it is ready; return the rows, and the parts that failed."""
    found: dict[str, Sequence[Row]] = {}
    failed = []
    for part in parts:
        start = time.perf_counter()
        try:
            found[part] = _rows(part, seconds, records)
            table = render(found[part])
        except Exception:  # noqa: BLE001 - whatever fails, the other parts go on
            failed.append(part)
            table = traceback.format_exc()
        took = time.perf_counter() - start
        sys.stdout.write(f"\n{part} ({took:.0f} s)\n\n{table}")
        sys.stdout.flush()
    return found, failed


def documents(
    facts: Mapping[str, Any], found: Mapping[str, Sequence[Row]], failed: Sequence[str]
) -> dict[str, str]:
    """Return the whole table as Markdown and as CSV, by suffix."""
    lines = [("part", *Row.HEAD)]
    lines += [(part, *row.cells()) for part, rows in found.items() for row in rows]
    short = [row.work for rows in found.values() for row in rows if row.met is False]
    text = f"# Costs as ratios to their limits\n\n{origin.describe(facts)}\n\n"
    text += origin.markdown(lines)
    text += f"\nFall short: {'; '.join(short) if short else 'none'}.\n"
    if failed:
        text += f"\nFailed, and not in the table: {', '.join(failed)}.\n"
    sheet = io.StringIO()
    csv.writer(sheet, lineterminator="\n").writerows(lines)
    return {"md": text, "csv": sheet.getvalue()}


def main() -> int:
    options = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    choices = (*present(), _PEERS)
    options.add_argument("--only", nargs="+", choices=choices, help="these parts and no others")
    options.add_argument("--peers", action="store_true", help="the peers on the same work too")
    options.add_argument("--seconds", type=float, default=20.0, help="of each run of processes")
    options.add_argument("--peers_from", type=Path, help="records of bench.peers for those rows")
    arguments = options.parse_args()
    records = arguments.peers_from
    if records is not None and not records.is_file():
        options.error(f"--peers_from: no file {records}; python -m bench.peers writes one")
    wants_peers = arguments.peers or records is not None
    parts = arguments.only or [*present(), *([_PEERS] if wants_peers else [])]
    facts = origin.facts()
    sys.stdout.write(origin.describe(facts) + "\n")
    found, failed = _measure(parts, arguments.seconds, records)
    stem = "bench" if arguments.only is None else "bench-" + "-".join(parts)
    paths = origin.write(stem, facts, documents(facts, found, failed))
    paths.append(history.write())
    sys.stdout.write(f"\nwritten: {', '.join(map(str, paths))}\n")
    if failed:
        sys.stdout.write(f"\nfailed: {', '.join(failed)}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
