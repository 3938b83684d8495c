"""Which pushes workers were told had been applied, against what shards have."""

from __future__ import annotations

import collections

from tests.chaos.process_cast import Cast
from tests.chaos.process_replay import Found
from thinwire.ops.types import State


class Ledger:
    """Kept from what proxies overhear: neither end's own records are believed."""

    def __init__(self, cast: Cast) -> None:
        """Begin with nothing."""
        self._cast = cast
        # (worker, shard) -> steps that are in the model; that may be, or may not.
        self._sure: dict[tuple[int, int], set[int]] = collections.defaultdict(set)
        self._maybe: dict[tuple[int, int], set[int]] = collections.defaultdict(set)

    @property
    def num_told(self) -> int:
        """How many pushes workers were told of, each shard's counted."""
        return sum(len(told.steps) for told in list(self._cast.hearing.told.values()))

    def worker_died(self, worker: int) -> None:
        """Hear that nobody will ask any more what became of a worker's last push."""
        for shard in range(self._cast.nb_ps):
            told = self._cast.hearing.told[worker, shard]
            if told.pushed not in told.steps:
                self._maybe[worker, shard].add(told.pushed)

    def check(self, shard: int, found: Found) -> None:
        """Compare a dead shard's state with what workers heard while it lived.

        Raises:
            AssertionError: A push that a worker was told of is not in it, or one is in it twice.
        """
        for worker in range(1, self._cast.nb_workers + 1):
            told = self._cast.hearing.told[worker, shard]
            where = f"worker {worker} and shard {shard}"
            applied, pushes = found.applied_step(worker), found.pushes(worker)
            newest = max(told.steps, default=0)
            assert applied >= newest, f"{where}: told of step {newest}, only {applied} is there"
            assert found.core.version >= told.version, (
                f"{where}: told of version {told.version}, {found.core.version} is there"
            )
            self._compare(worker, shard, applied, pushes, set())

    def check_end(self, shard: int, core: State) -> None:
        """Compare the state that a shard ended with; answers at the end say less."""
        for worker in range(1, self._cast.nb_workers + 1):
            told = self._cast.hearing.told[worker, shard]
            account = core["counters"]["workers"].get(str(worker), {"pushes": 0})
            applied = core["members"]["steps"].get(str(worker), 0)
            self._compare(worker, shard, applied, account["pushes"], told.at_end)

    def _compare(self, worker: int, shard: int, applied: int, pushes: int, late: set[int]) -> None:
        told = self._cast.hearing.told[worker, shard]
        sure, maybe = self._sure[worker, shard], self._maybe[worker, shard]
        sure |= told.steps
        if applied and applied not in told.refused and applied not in maybe | late:
            sure.add(applied)  # its answer did not come through any more
        most = len(sure | maybe | late)
        assert len(sure) <= pushes <= most, (
            f"worker {worker} and shard {shard}: {pushes} pushes were applied; by what the worker "
            f"heard, {len(sure)} to {most} are"
        )

    def undo(self, shard: int, before: Found, after: Found) -> None:
        """Hear that the newest event was taken from a shard that had it."""
        for worker in range(1, self._cast.nb_workers + 1):
            told, sure = self._cast.hearing.told[worker, shard], self._sure[worker, shard]
            if after.pushes(worker) < before.pushes(worker):
                sure.discard(before.applied_step(worker))
                told.steps.discard(before.applied_step(worker))
            told.version = min(told.version, after.core.version)
