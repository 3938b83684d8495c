"""Compare the start of a PS that waits for a worker's model with a PS that builds its model.

The program measures wall-clock seconds, processor seconds and resident memory at the moment when
the PS logs that it listens. The figures are medians of several starts.

    python -m bench.systems.ps_start
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import re
import statistics
import subprocess
import sys
import tempfile
import time

_MAIN = pathlib.Path(__file__).parents[2] / "main.py"
#: Kind of a PS -> flags of main.py.
_KINDS = {
    "waits for a worker's model": ("--model_from=worker", "--method=bsp"),
    "builds mnist_cnn, sgd": ("--network=mnist_cnn", "--method=bsp"),
}
_LISTENS = "listens on"
_STARTS = 5
_PATIENCE_SECONDS = 120.0


def main() -> None:
    """Print a line for each kind."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    starts_of: dict[str, list[tuple[float, float, float]]] = {kind: [] for kind in _KINDS}
    for _ in range(_STARTS):
        for kind, flags in _KINDS.items():  # alternate: the machine's load changes over time
            starts_of[kind].append(_start(flags))
    for kind, starts in starts_of.items():
        wall, processor, memory = (
            statistics.median(column) for column in zip(*starts, strict=True)
        )
        sys.stdout.write(
            f"{kind:28} {wall:6.2f} s until it listens, {processor:5.2f} s of processor, "
            f"{memory:5.0f} MiB resident\n"
        )


def _start(flags: tuple[str, ...]) -> tuple[float, float, float]:
    """Start a PS; return its seconds, processor seconds and MiB until it listens."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        log = pathlib.Path(folder) / "log"
        words = ["--type_node=PS", "--port=0", "--nb_workers=2", f"--run_dir={folder}/run", *flags]
        began = time.monotonic()
        with open(log, "wb") as out:
            process = subprocess.Popen([sys.executable, str(_MAIN), *words], stdout=out, stderr=out)
        stack.callback(process.wait)
        stack.callback(process.kill)
        while _LISTENS not in log.read_text():
            if process.poll() is not None or time.monotonic() - began > _PATIENCE_SECONDS:
                raise RuntimeError(log.read_text())
            time.sleep(0.005)
        wall = time.monotonic() - began
        status = pathlib.Path(f"/proc/{process.pid}/status").read_text()
        stat = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        resident = int(re.findall(r"VmRSS:\s+(\d+) kB", status)[0]) / 1024
        ticks = int(stat[11]) + int(stat[12])
        return wall, ticks / os.sysconf("SC_CLK_TCK"), resident


if __name__ == "__main__":
    main()
