"""Partial participation: only some workers, drawn at random, train in each round.

Source: McMahan et al., AISTATS 2017, algorithm 1: a random set of max(C K, 1) clients per round.
Differences: the workers of a round are the live workers with the lowest ranks. Each worker has a
pseudorandom rank in each round. A worker that leaves thus changes only the draws that contain it.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from thinwire.ops.sync.base import Agreement, Ready, SyncRule
from thinwire.ops.sync.groups import Groups
from thinwire.ops.types import OWN, ConfigurationError

if TYPE_CHECKING:
    from thinwire.ops.sync.rounds import Rounds


def draw(seed: int, number: int, live: Sequence[int], fraction: float) -> tuple[int, ...]:
    """Draw the workers that participate in a training round.

    The drawn workers depend only on the arguments of `draw`.

    Args:
        seed: Random seed of the run.
        number: Number of the training round, from 0.
        live: Ids of the live workers to draw from, at least one.
        fraction: Fraction of the live workers to draw, rounded to the nearest number of workers; at
            least one worker is drawn.

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
    """Read the worker ids of each round, one round per line; lines with ``#`` first are comments.

    Raises:
        ConfigurationError: The text has no rounds, or a line without worker ids or with a worker id
            that is not in 1..nb_workers.
    """
    rounds = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.startswith("#"):
            continue
        try:
            workers = {int(word) for word in line.replace(",", " ").split()}
        except ValueError:
            workers = set()
        if not workers or not all(1 <= worker <= nb_workers for worker in workers):
            raise ConfigurationError(
                f"--draws={path} line {number} reads {line[:60]!r}; expected worker ids of "
                f"1..{nb_workers} (--nb_workers), like `3 17 42`. Correct this line."
            )
        rounds.append(tuple(sorted(workers)))
    if not rounds:
        raise ConfigurationError(
            f"--draws={path}: the file holds no round; expected one line of worker ids per round."
        )
    return tuple(rounds)


def format_draw(workers: Sequence[int]) -> str:
    """Format the worker ids of one round as a line that `parse_draws` reads."""
    return " ".join(map(str, workers)) + "\n"


@dataclasses.dataclass(frozen=True)
class DrawnSync(SyncRule):
    """A synchronous rule in which only some workers, drawn at random, train in each round.

    Attributes:
        nb_workers: Number of workers; ids are 1..nb_workers.
        fraction: Fraction of the live workers that takes part in a round.
        seed: Seed of the draws. Only shard 0 draws.
        draws: Worker ids of the first rounds, one tuple per round; None if all rounds are drawn.
            Only the process that starts the rule needs the ids: in other processes, `draws` may be
            empty.
        groups: One group of all workers.
    """

    agreement: ClassVar[Agreement] = Agreement.DRAWS
    nb_workers: int
    fraction: float
    seed: int = dataclasses.field(default=0, metadata=OWN)
    draws: tuple[tuple[int, ...], ...] | None = dataclasses.field(default=None, metadata=OWN)
    groups: Groups = dataclasses.field(init=False, metadata=OWN)

    def __post_init__(self) -> None:
        """Raise an error if the fraction, number of workers or seed is out of range."""
        if not 0 < self.fraction <= 1:
            raise ConfigurationError(
                f"--fraction={self.fraction:g}: expected a fraction of the live workers, above 0 "
                "and at most 1."
            )
        if self.nb_workers < 1 or self.seed < 0:
            raise ConfigurationError(
                f"--nb_workers={self.nb_workers}, --seed={self.seed}: expected 1 or more workers, "
                "and a seed of 0 or more."
            )
        object.__setattr__(self, "groups", (tuple(range(1, self.nb_workers + 1)),))

    @property
    def sizes(self) -> Sequence[int]:
        """Number of workers in a round, if all workers are live."""
        return [_size(self.fraction, self.nb_workers)]

    def ready(self, rounds: Rounds, now: float) -> Ready:
        """Release the oldest push of each worker of the round if all these workers pushed."""
        return Ready([rounds.oldest(rounds.members(0))] if rounds.is_complete(0) else ())

    def draw(self, number: int, live: Sequence[int]) -> tuple[int, ...]:
        """Return the live workers of the round from `draws`; draw if there are none."""
        planned = self.draws[number] if self.draws and number < len(self.draws) else ()
        workers = tuple(worker for worker in planned if worker in live)
        return workers or draw(self.seed, number, live, self.fraction)
