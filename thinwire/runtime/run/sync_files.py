"""Files of a run's worker groups, fractions of the data and draws, which a later run reads.

A run's draws are a file whose lines list each round's sampled workers.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence

from thinwire.ops.sync.base import Draw
from thinwire.ops.sync.drawn import format_draw, parse_draws
from thinwire.ops.sync.groups import Groups, format_shares, shares
from thinwire.runtime.run.files import naming, read_text, replace_file

GROUPS_NAME = "groups.txt"
SHARES_NAME = "data_sharding.txt"
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


def write_groups(folder: pathlib.Path, groups: Groups, speeds: Mapping[int, float]) -> str:
    """Write a file of worker groups and a file of the workers' fractions of the data.

    Args:
        folder: Path of the run directory.
        groups: Groups of all workers, each a list of worker ids.
        speeds: Worker id -> samples per second; a worker without a measurement has no entry.

    Returns:
        The flags by which another run uses the two files.
    """
    measured = "".join(f"#   worker {w}: {speed:.4g}\n" for w, speed in sorted(speeds.items()))
    head = f"# Proposed from measured samples per second:\n{measured}"
    lines = "".join(",".join(map(str, group)) + "\n" for group in groups)
    parts = format_shares(shares(groups, speeds))
    replace_file(folder / GROUPS_NAME, f"{head}# One group a line.\n{lines}")
    replace_file(folder / SHARES_NAME, f"{head}# start and end of worker 1, 2, ...\n{parts}")
    return (
        f"--groups_file={folder / GROUPS_NAME} --partition=file "
        f"--data_sharding_file={folder / SHARES_NAME}"
    )
