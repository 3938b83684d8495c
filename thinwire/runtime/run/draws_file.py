"""Reader and writer of the file of a run's draws: the workers of each round, one round a line."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from thinwire.ops.sync.base import Draw
from thinwire.ops.sync.drawn import format_draw, parse_draws
from thinwire.ops.types import ConfigurationError
from thinwire.runtime.run.files import naming, read_bounded, replace_file

#: Name of the file that a run writes into its run directory.
DRAWS_NAME = "draws.txt"
_HEAD = "# The workers of each round, one round a line, as --draws reads them.\n"


def read_draws(path: str, nb_workers: int) -> tuple[tuple[int, ...], ...]:
    """Read the workers of each round from the file that --draws names.

    Raises:
        ConfigurationError: The file cannot be read, or a line holds no worker ids.
    """
    try:
        text = read_bounded(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"--draws={path} cannot be read: {error}. Expected a text file with the worker "
            "ids of one round a line."
        ) from error
    return parse_draws(text, path, nb_workers)


class DrawsFile:
    """File of a run's draws, which --draws of another run repeats.

    If a round is drawn again, or repeated after a restart, the new line replaces the old line.

    Args:
        folder: The run directory.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.path = folder / DRAWS_NAME
        self._newest = 0  # number of the newest draw in the file
        self._num_rounds = -1  # number of rounds in the file; -1: not known

    def record(self, draws: Sequence[Draw]) -> None:
        """Write the draws that are not in the file yet.

        Raises:
            OSError: The file cannot be written.
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
