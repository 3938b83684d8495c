"""Measure Thinwire against the machine's limits: ``python -m bench``; ``--peers`` adds the peers.

``--peers_from FILE`` reads the peers' rows from records that ``python -m bench.peers`` wrote.

Every part prints its rows when it ends. All rows are written to bench/results/ as dated Markdown
and CSV files with the machine, versions and commit; bench/results/index.md shows every row over
time (`bench.history`). If a part fails, its error is printed, the next parts run, and the exit code
is 1. A row that misses its goal is marked; a missed goal is no failure.
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

#: Name of a part -> the module that measures the part, in the order of the runs.
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
#: Parts that start real runs; ``--seconds`` sets the length of these runs.
_TIMED = ("loop", "links", "scaling")
_PEERS = "peers"
_PEER_ROUNDS = 2


def present() -> list[str]:
    """Return the parts whose modules exist in this checkout."""
    return [part for part, module in PARTS.items() if importlib.util.find_spec(module) is not None]


def _rows(part: str, seconds: float, records: Path | None) -> Sequence[Row]:
    """Return one part's rows. Import the part late: a part that cannot be imported fails alone."""
    if part == _PEERS:
        peers = importlib.import_module("bench.peers.__main__")
        return list(peers.rows_of(records) if records else peers.rows(seconds, _PEER_ROUNDS))
    module = importlib.import_module(PARTS[part])
    return list(module.rows(seconds) if part in _TIMED else module.rows())


def _measure(
    parts: Sequence[str], seconds: float, records: Path | None
) -> tuple[dict[str, Sequence[Row]], list[str]]:
    """Measure the parts and print each part's table; return the rows and the failed parts."""
    rows: dict[str, Sequence[Row]] = {}
    failed = []
    for part in parts:
        start = time.perf_counter()
        try:
            rows[part] = _rows(part, seconds, records)
            table = render(rows[part])
        except Exception:  # noqa: BLE001 - any failure must not stop the other parts
            failed.append(part)
            table = traceback.format_exc()
        took = time.perf_counter() - start
        sys.stdout.write(f"\n{part} ({took:.0f} s)\n\n{table}")
        sys.stdout.flush()
    return rows, failed


def documents(
    facts: Mapping[str, Any], found: Mapping[str, Sequence[Row]], failed: Sequence[str]
) -> dict[str, str]:
    """Return the table of all parts as {"md": Markdown text, "csv": CSV text}."""
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
    options.add_argument("--only", nargs="+", choices=choices, help="run only these parts")
    options.add_argument(
        "--peers", action="store_true", help="also measure the peers on the same work"
    )
    options.add_argument("--seconds", type=float, default=20.0, help="length of each real run")
    options.add_argument(
        "--peers_from", type=Path, help="records of bench.peers to read the peers' rows from"
    )
    arguments = options.parse_args()
    records = arguments.peers_from
    if records is not None and not records.is_file():
        options.error(f"--peers_from: no file {records}; python -m bench.peers writes one")
    wants_peers = arguments.peers or records is not None
    parts = arguments.only or [*present(), *([_PEERS] if wants_peers else [])]
    facts = origin.facts()
    sys.stdout.write(origin.describe(facts) + "\n")
    rows, failed = _measure(parts, arguments.seconds, records)
    stem = "bench" if arguments.only is None else "bench-" + "-".join(parts)
    paths = origin.write(stem, facts, documents(facts, rows, failed))
    paths.append(history.write())
    sys.stdout.write(f"\nwritten: {', '.join(map(str, paths))}\n")
    if failed:
        sys.stdout.write(f"\nfailed: {', '.join(failed)}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
