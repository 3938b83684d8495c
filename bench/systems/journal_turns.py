"""Run a PS that writes its journal in every other turn.

A disturbance of the machine affects turns with and without the journal alike.
``bench.systems.journal`` starts this program: ``python -m bench.systems.journal_turns REPORT
SECONDS TURNS FLAGS...``. It writes an entry for each turn to the file REPORT.
"""

from __future__ import annotations

import json
import pathlib
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from absl import flags

from thinwire.cli import node as command_line
from thinwire.flags import run as run_flags
from thinwire.ps import flags as ps_flags
from thinwire.ps.core import events
from thinwire.ps.scripts.initial_model import model_of_flags
from thinwire.ps.shard.preparation import PreparedShard
from thinwire.ps.shard.process import ShardProcess

_WARM_UPDATES = 60  # both workers have traced their steps after these updates


class Turns:
    """Switches a shard's journal off and on, and records each turn."""

    def __init__(self, shard: ShardProcess, seconds: float, count: int) -> None:
        """Prepare `count` turns of `seconds` seconds each."""
        self._shard, self._seconds, self._count = shard, seconds, count
        self.lines: list[dict[str, Any]] = []
        self._since = (0.0, 0, 0.0)
        self._done = threading.Event()

    def take(self) -> None:
        """Take all turns, then stop the run. Runs in a separate thread."""
        put = self._shard.server.queue.put
        while self._shard.core.version < _WARM_UPDATES:
            time.sleep(0.1)
        for number in range(self._count + 1):
            self._done.clear()
            put(lambda number=number: self._turn(bool(number % 2)))  # type: ignore[misc]
            self._done.wait()
            time.sleep(self._seconds if number < self._count else 0.0)
        put(events.Stop("max_seconds"))

    def _turn(self, writes: bool) -> None:
        """Record the turn that ends, and start the next turn. Runs in the shard's writer thread."""
        server = self._shard.server
        now = (time.perf_counter(), server.core.version, time.thread_time())
        if self._since[0]:
            seconds, updates, writer_seconds = (
                b - a for a, b in zip(self._since, now, strict=True)
            )
            line = {"on": server.journaled._writes, "seconds": seconds, "updates": updates}
            self.lines.append(line | {"writer_seconds": writer_seconds})
        server.journaled._writes = server.served.decoder.keeps_coded = writes
        self._since = now
        self._done.set()


def main(arguments: Sequence[str]) -> None:
    """Run a PS that switches its journal off and on; write the report at its end."""
    report, seconds, count, *words = arguments
    command_line.define_flags()
    flags.FLAGS(["main.py", *words])
    run = run_flags.read_run()
    prepared = PreparedShard.of(run, ps_flags.read(run.addresses), model_of_flags(run, 0))
    shard = ShardProcess.open(prepared)
    if shard is None:
        raise RuntimeError("the run in --run_dir is finished; give a new directory")
    turns = Turns(shard, float(seconds), int(count))
    threading.Thread(target=turns.take, daemon=True).start()
    shard.run_to_end()
    pathlib.Path(report).write_text(json.dumps(turns.lines))


if __name__ == "__main__":
    main(sys.argv[1:])
