"""DGT against a reliable push, in the Simulator: same router, assembler and links, virtual time.

    python -m bench.dgt --results runs/dgt.jsonl --models mnist_cnn --links congested --arms diff
    python -m bench.dgt --results runs/dgt.jsonl --table

Plays what is asked for and not in the results yet, so that a long grid goes on after a break.
``--commands`` prints the runs as command lines of main.py.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any

from bench.dgt_arms import ARMS, LINKS, MODELS, Case, case
from bench.dgt_table import tables


def cases(options: argparse.Namespace) -> list[Case]:
    """Return what was asked for, each once."""
    found = [
        case(model, link, arm, k, seed)
        for seed in options.seeds
        for model in options.models
        for link in options.links
        for arm in options.arms
        for k in ARMS[arm].ks
        if not k or not options.ks or k in options.ks or arm == "marked"
    ]
    return list(dict.fromkeys(found))


def read(results: pathlib.Path) -> dict[Case, dict[str, Any]]:
    """Return what is in the results; a line that was cut off does not count."""
    found = {}
    for line in results.read_text().splitlines() if results.exists() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        found[Case(**entry["case"])] = entry
    return found


def play(wanted: Iterable[Case], results: pathlib.Path, threads: int) -> None:
    """Play cases and add each to the results as it ends."""
    from bench.dgt_play import Player  # imports TensorFlow

    player = Player(threads)
    results.parent.mkdir(parents=True, exist_ok=True)
    for each in wanted:
        begun = time.monotonic()
        entry = {"case": dataclasses.asdict(each)} | player.play(each)
        with results.open("a") as file:
            file.write(json.dumps(entry) + "\n")
        seconds = time.monotonic() - begun
        sys.stdout.write(f"{seconds:6.0f} s  {each}\n")
        sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> int:
    """Play what is missing, or print."""
    parser = argparse.ArgumentParser(prog="python -m bench.dgt", description=__doc__)
    parser.add_argument("--results", type=pathlib.Path, default=pathlib.Path("runs/dgt.jsonl"))
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["mnist_cnn"])
    parser.add_argument("--links", nargs="+", choices=LINKS, default=list(LINKS))
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--ks", nargs="+", help="default: all")
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--threads", type=int, default=1, help="of TensorFlow")
    parser.add_argument("--table", action="store_true", help="print all results as Markdown")
    parser.add_argument("--commands", action="store_true", help="print command lines of main.py")
    options = parser.parse_args(arguments)
    found = read(options.results)
    if options.table:
        sys.stdout.write(tables(found))
        return 0
    if options.commands:
        for each in cases(options):
            sys.stdout.write(f"python main.py {' '.join(each.flags())}\n")
        return 0
    play([each for each in cases(options) if each not in found], options.results, options.threads)
    return 0


if __name__ == "__main__":
    sys.exit(main())
