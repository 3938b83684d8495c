"""``measure/worker-N.jsonl``: a line a round, appended as rounds arrive; each round once."""

from __future__ import annotations

import os
import pathlib
from typing import TextIO

from absl import logging

from ops.rounds import Round, line_of, unpack
from ops.run_dir import rounds_of
from supervisor.metrics import read_lines


class RoundsLog:
    """Appends the rounds of all workers.

    Within one life of a worker rounds are numbered in order, so what is not newer than the last
    line has been written before, by this Supervisor or an earlier one.

    Args:
        run_dir: Of the run; nothing is made there before the first round.
    """

    def __init__(self, run_dir: pathlib.Path) -> None:
        self._run_dir = run_dir
        self._files: dict[int, TextIO] = {}
        self._last: dict[int, dict[str, int]] = {}  # worker -> its life -> last round written

    def add(self, worker: int, batch: str) -> None:
        """Append a batch of a worker; one that cannot be read is logged and left out."""
        try:
            rounds = unpack(batch)
        except ValueError as error:
            logging.log_every_n_seconds(
                logging.WARNING, "rounds of worker %d cannot be read: %s", 10, worker, error
            )
            return
        if worker not in self._files:
            self._open(worker)
        last = self._last[worker]
        new = []
        for each in rounds:
            if each.num_iters > last.get(each.life, 0):
                last[each.life] = each.num_iters
                new.append(line_of(each))
        if new:
            self._files[worker].write("".join(new))
            self._files[worker].flush()

    def close(self) -> None:
        """Finish the files; harmless when repeated."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _open(self, worker: int) -> None:
        path = rounds_of(self._run_dir, worker)
        path.parent.mkdir(parents=True, exist_ok=True)
        last = self._last[worker] = {}
        if path.exists():
            lines, num_bytes = read_lines(path)
            os.truncate(path, num_bytes)  # of a torn end
            for line in lines:
                number, life = line.get("num_iters"), str(line.get("life", ""))
                if type(number) is int:
                    last[life] = max(number, last.get(life, 0))
        self._files[worker] = open(path, "a", encoding="utf-8")  # noqa: SIM115


def read_rounds(path: pathlib.Path) -> list[Round]:
    """Return the rounds of one worker's file, in order; a torn last line is left out.

    Raises:
        OSError: The file cannot be read.
        ValueError: A line is not a round of this version.
    """
    lines, _ = read_lines(path)
    return [Round.from_dict(line, f"{path.name}:{n}") for n, line in enumerate(lines, 1)]
