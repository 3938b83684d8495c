"""Datagrams as they were received, many in a row: whose they claim to be, and losing some."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from ops.routing.datagram_format import HEADER, MAGIC, VERSION

if TYPE_CHECKING:
    from numpy.typing import NDArray


def heads_of(data: memoryview, size: int) -> NDArray[np.void]:
    """Return the headers of whole enough datagrams of `size` bytes in a row, as a view."""
    count = len(data) // size if size >= HEADER.itemsize else 0
    if size >= HEADER.itemsize and len(data) - count * size >= HEADER.itemsize:
        count += 1  # the last one, shorter
    return np.ndarray((count,), HEADER, data, strides=(size,)) if count else np.empty(0, HEADER)


def runs(heads: NDArray[np.void]) -> list[tuple[int, int, int]]:
    """Return (first, behind the last, session) of datagrams in a row with one session number."""
    sessions = heads["session"]
    edges = np.flatnonzero(sessions[1:] != sessions[:-1]) + 1
    borders = [0, *edges.tolist(), len(heads)] if len(heads) else []
    return [(start, stop, int(sessions[start])) for start, stop in itertools.pairwise(borders)]


def num_ours(heads: NDArray[np.void]) -> int:
    """Return how many look like datagrams of this project at all."""
    return int(((heads["magic"] == MAGIC) & (heads["version"] == VERSION)).sum())


class Losses:
    """Loses datagrams on purpose.

    Args:
        rate: This fraction of them.
        seed: Of which.
    """

    def __init__(self, rate: float, seed: int) -> None:
        self._rate, self._random = rate, np.random.default_rng(seed)

    def thin(self, data: memoryview, size: int) -> tuple[memoryview, int]:
        """Return what is left of datagrams of `size` bytes in a row, and how many are not."""
        pieces = [data[start : start + size] for start in range(0, len(data), size)]
        lives = self._random.random(len(pieces)) >= self._rate
        left = [piece for piece, survives in zip(pieces, lives, strict=True) if survives]
        return memoryview(b"".join(left)), len(pieces) - len(left)
