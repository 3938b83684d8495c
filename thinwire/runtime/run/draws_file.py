"""Reads and writes a run's draws, a file whose lines list each round's sampled workers."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from thinwire.ops.sync.base import Draw
from thinwire.ops.sync.drawn import format_draw, parse_draws
from thinwire.runtime.run.files import naming, read_text, replace_file

#: Name of the file in the run directory with the run's draws (sampled workers of each round).
DRAWS_NAME = "draws.txt"
_HEAD = "# The workers of each round, one round a line, as --draws reads them.\n"


def read_draws(path: str, nb_workers: int) -> tuple[tuple[int, ...], ...]:
    """Read the ids of each round's sampled workers from the file that --draws names.

    Raises:
        ConfigurationError: The file of --draws cannot be read, or a line holds no worker ids.
    """
    expected = "Expected a text file with the worker ids of one round per line."
    return parse_draws(read_text("draws", path, expected), path, nb_workers)


class DrawsFile:
    """File of a run's draws (each round's sampled workers), which --draws repeats in a later run.

    If the workers of a training round are drawn again, or the round is repeated after a restart,
    the new line of the draws file replaces the round's old line.

    Args:
        folder: Path of the run directory.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.path = folder / DRAWS_NAME
        self._newest = 0  # number of the newest draw (sampled workers) in the file
        self._num_rounds = -1  # number of lines (rounds) in the file; -1: unknown

    def record(self, draws: Sequence[Draw]) -> None:
        """Write the draws (sampled workers of rounds) that the file does not contain yet.

        Raises:
            OSError: The file of draws cannot be written.
        """
        for draw in draws:
            if draw.number > self._newest:
                self._write(draw)
                self._newest = draw.number

    def _write(self, drawn: Draw) -> None:
        line = format_draw(drawn.workers)
        if drawn.of_round == self._num_rounds:
            with naming(self.path), self.path.open("a", encoding="utf-8") as file:
                file.write(line)
        else:
            before = self.path.read_text(encoding="utf-8") if drawn.of_round else ""
            rounds = [row for row in before.splitlines(True) if not row.startswith("#")]
            text = "".join([_HEAD, *rounds[: drawn.of_round], line])
            replace_file(self.path, text)
        self._num_rounds = drawn.of_round + 1
