"""Partial participation: only some workers, drawn at random, train in each round.

Source: McMahan et al., AISTATS 2017, algorithm 1, draws max(C K, 1) of K clients for each round,
with the fraction C. Difference from algorithm 1: each worker has a pseudorandom rank in each round,
and the round's workers are the live workers with the lowest ranks. If a worker leaves, the other
workers keep their ranks, so their order in later draws does not change.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from typing import ClassVar

from thinwire.ops.options import FlagRule, number, words
from thinwire.ops.policy import OWN, setting
from thinwire.ops.sync.base import Agreement, Ready, RoundsView, SyncRule, complete_rounds
from thinwire.ops.sync.groups import Groups
from thinwire.ops.types import ConfigurationError


def draw(seed: int, number: int, live: Sequence[int], fraction: float) -> tuple[int, ...]:
    """Return the workers that participate in a training round, drawn at random from live workers.

    The drawn workers depend only on the arguments of `draw`.

    Args:
        seed: Random seed of the run.
        number: Number of the training round, from 0.
        live: Ids of the live workers to draw from, at least one.
        fraction: Fraction of the live workers to draw. The number of drawn workers is rounded to
            the nearest integer, and is at least one.

    Returns:
        Ids of the drawn workers, ascending.

    >>> draw(1, 0, [1, 2, 3, 4], 0.5) == draw(1, 0, [4, 3, 2, 1], 0.5)
    True
    """
    ranked = sorted(live, key=lambda worker: (_rank(seed, number, worker), worker))
    return tuple(sorted(ranked[: _size(fraction, len(live))]))


def _size(fraction: float, num_live: int) -> int:
    return max(1, math.floor(fraction * num_live + 0.5))


def _rank(seed: int, number: int, worker: int) -> bytes:
    return hashlib.blake2b(f"{seed} {number} {worker}".encode(), digest_size=8).digest()


def parse_draws(text: str, path: str, nb_workers: int) -> tuple[tuple[int, ...], ...]:
    """Return the worker ids of each training round in a text with one line of ids per round.

    Lines of the text that start with ``#`` are comments.

    Raises:
        ConfigurationError: The text has no line of worker ids, or one of its lines has no worker
            ids or a worker id that is not in 1..nb_workers.
    """
    rounds = []
    for place, line in enumerate(text.splitlines(), start=1):
        if line.startswith("#"):
            continue
        try:
            workers = {int(word) for word in line.replace(",", " ").split()}
        except ValueError:
            workers = set()
        if not workers or not all(1 <= worker <= nb_workers for worker in workers):
            raise ConfigurationError(
                f"--draws={path} line {place} reads {line[:60]!r}; expected worker ids of "
                f"1..{nb_workers} (--nb_workers), like `3 17 42`. Correct this line."
            )
        rounds.append(tuple(sorted(workers)))
    if not rounds:
        raise ConfigurationError(
            f"--draws={path}: the file holds no round; expected one line of worker ids per round."
        )
    return tuple(rounds)


def format_draw(workers: Sequence[int]) -> str:
    """Return the worker ids of one training round as a line of text that `parse_draws` reads."""
    return " ".join(map(str, workers)) + "\n"


@dataclasses.dataclass(frozen=True)
class DrawnSync(SyncRule):
    """A synchronization rule in which only some workers, drawn at random, train in each round.

    Attributes:
        nb_workers: Number of workers of the run; worker ids are 1..nb_workers.
        fraction: Fraction of the live workers that train in each round, above 0 and at most 1.
        seed: Random seed that shard 0 uses to draw the workers of each round.
        draws: Planned worker ids of the first training rounds, one tuple per round; None if the
            workers of all rounds are drawn. Only shard 0 reads the planned worker ids, so `draws`
            may be empty in other processes.
        groups: One worker group with all workers of the run.
    """

    agreement: ClassVar[Agreement] = Agreement.DRAWS
    nb_workers: int
    fraction: float = setting(
        number(
            "fraction",
            1.0,
            "Fraction of the live workers that train in each round of --sync=bsp; --seed "
            "determines the random choice.",
            "fraction",
            rule=FlagRule(lambda value: 0 < value <= 1, "must be above 0 and at most 1"),
        ),
        shown=True,
    )
    seed: int = dataclasses.field(default=0, metadata=OWN)
    draws: tuple[tuple[int, ...], ...] | None = setting(
        words(
            "draws",
            None,
            "File with the ids of the workers that train in each round, one round per line; "
            "replaces the random choice of --fraction.",
            "file",
            unset="drawn by --seed",
        ),
        own=True,
    )
    groups: Groups = dataclasses.field(init=False, metadata=OWN)

    def __post_init__(self) -> None:
        """Raise an error if `fraction`, `nb_workers` or `seed` is out of range; set `groups`."""
        super().__post_init__()
        if self.nb_workers < 1 or self.seed < 0:
            raise ConfigurationError(
                f"--nb_workers={self.nb_workers}, --seed={self.seed}: expected 1 or more workers, "
                "and a seed of 0 or more."
            )
        object.__setattr__(self, "groups", (tuple(range(1, self.nb_workers + 1)),))

    @property
    def sizes(self) -> Sequence[int]:
        """A list with the number of workers in each training round, if all workers are live."""
        return [_size(self.fraction, self.nb_workers)]

    def ready(self, rounds: RoundsView, now: float) -> Ready:
        """Return the oldest push of each drawn worker of a round if all drawn workers pushed."""
        return complete_rounds(rounds, [0])

    def draw(self, number: int, live: Sequence[int]) -> tuple[int, ...]:
        """Return the live workers that `draws` plans for a round; if none, draw at random."""
        planned = self.draws[number] if self.draws and number < len(self.draws) else ()
        workers = tuple(worker for worker in planned if worker in live)
        return workers or draw(self.seed, number, live, self.fraction)
