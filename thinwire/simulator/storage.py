"""Files of a simulated shard (checkpoints and journal), and restarts from these files."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from collections.abc import Callable
from typing import Any, BinaryIO

from absl import logging

from thinwire.ops.types import ModelSpec, State
from thinwire.ps.core.members import CoreConfig
from thinwire.ps.datagrams.counters import DatagramCounts
from thinwire.ps.persistence.journal import Journal, JournaledCore
from thinwire.ps.persistence.journal_format import EventCoder
from thinwire.ps.persistence.policy import JournalPolicy
from thinwire.ps.persistence.replay import MakeCore
from thinwire.ps.persistence.shard_store import SavedShard
from thinwire.runtime.persistence.checkpoint import CheckpointStore
from thinwire.runtime.run.settings import Run
from thinwire.simulator.clock import Clock

#: Time to write a snapshot, in virtual seconds; a newer snapshot waits during that time.
WRITE_SECONDS = 0.05


class SimulatedKill(Exception):
    """The process was killed inside a call; data that the process had not written are lost."""


class SimulatedDisk:
    """Creates a shard's files; tests replace it by a disk that fails."""

    def create(self, path: pathlib.Path) -> BinaryIO:
        """Create and open a new file, without a buffer.

        Raises:
            OSError: The simulated disk failed.
            SimulatedKill: The shard's process was killed in this call.
        """
        return open(path, "xb", buffering=0)

    def save(self, checkpoints: CheckpointStore, version: int, state: State) -> None:
        """Write a snapshot of a shard; raises the same errors as `create`."""
        checkpoints.save(version, state)


class SimulatedSaver:
    """Writes a shard's snapshots on the virtual clock, one at a time.

    The class corresponds to `thinwire.ps.persistence.shard_store.Saver`.
    """

    def __init__(
        self,
        checkpoints: CheckpointStore,
        on_saved: Callable[[State], None],
        disk: SimulatedDisk,
        later: Callable[[float, Callable[[], None]], None],
    ) -> None:
        """Create a saver without a snapshot to write.

        Args:
            checkpoints: Store that writes the shard's checkpoint files.
            on_saved: Called with each shard state that was saved.
            disk: Disk that writes the snapshots.
            later: Function (seconds, call) that makes a call later, unless the process has died.
        """
        self._checkpoints, self._on_saved, self._disk = checkpoints, on_saved, disk
        self._later = later
        self._next: tuple[int, State] | None = None
        self._busy = False
        self.failure: Exception | None = None

    def put(self, version: int, state: State) -> None:
        """Schedule the write of a snapshot, which replaces a snapshot that still waits."""
        self._next = (version, state)
        if not self._busy:
            self._busy = True
            self._later(WRITE_SECONDS, self._write)

    def flush(self) -> None:
        """Write the waiting snapshot immediately.

        Raises:
            Exception: The last attempt to write a snapshot failed.
        """
        if self._next is not None:
            self._write()
        if self.failure is not None:
            raise self.failure

    def _write(self) -> None:
        self._busy = False
        if self._next is None:
            return
        (version, state), self._next = self._next, None
        try:
            self._disk.save(self._checkpoints, version, state)
            self._on_saved(state)
            self.failure = None
        except OSError as error:
            self.failure = error
            logging.error(
                "cannot write the simulated shard's checkpoint of model version %d: %s",
                version,
                error,
            )


class SimulatedShardStore(SavedShard):
    """The files of one shard, written on the virtual clock."""

    def __init__(
        self,
        run: Run,
        name: str,
        spec: ModelSpec,
        disk: SimulatedDisk,
        later: Callable[[float, Callable[[], None]], None],
    ) -> None:
        """Read the shard's saved state if one exists; check the state against the model."""
        super().__init__(run, name)
        self.check(spec)
        self._disk, self._later = disk, later

    def open(self) -> None:
        """Create the saver, so that `put` can write checkpoints."""
        saver = SimulatedSaver(self._checkpoints, self._remove_unneeded, self._disk, self._later)
        self._saver = saver  # type: ignore[assignment]  # the same methods

    def new_journal(self, coder: EventCoder, model_bytes: int) -> Journal:
        """Return a new journal; it continues the journal that was replayed at the restart."""
        end = self._replayed.place if self._replayed is not None else None
        return Journal(self.folder, coder, model_bytes, end, self._disk.create)


@dataclasses.dataclass(frozen=True)
class StorageSetup:
    """Storage of the shards of a simulated run."""

    journal: str  # value of --journal
    disks: tuple[SimulatedDisk, ...]  # disk of each shard, shard 0 first


class StoredShard:
    """Restarts one shard from the files that its previous process has written.

    Attributes:
        saved: Files of the current process; None before the first start.

    Args:
        run: The run's settings.
        keeps: Storage settings (journal, disks) of the run's shards.
        spec: Signature of the whole model.
        make_coder: Makes a coder that serializes the shard's events for the journal.
        make: Makes a PS core in its initial state.
        config: Function (generation, generations undone, whether the run is resumed) that returns
            the settings of the core.
    """

    def __init__(
        self,
        run: Run,
        keeps: StorageSetup,
        spec: ModelSpec,
        make_coder: Callable[[], EventCoder],
        make: MakeCore,
        config: Callable[[int, int, bool], CoreConfig],
    ) -> None:
        self._run, self._keeps, self._spec = run, keeps, spec
        self._make_coder, self._make, self._config = make_coder, make, config
        self.saved: SimulatedShardStore | None = None

    def begin(self, shard: Any) -> bool:
        """Restore the core of a shard from its files; return False if the run is finished."""
        run, coder = self._run, self._make_coder()
        disk = self._keeps.disks[shard.number]
        later = functools.partial(_later, shard, shard.clock)
        self.saved = saved = SimulatedShardStore(run, f"ps-{shard.number}", self._spec, disk, later)
        keeping = JournalPolicy(run, self._keeps.journal, saved, coder, self._spec)
        keeping.replay(self._make)
        config = self._config(saved.generation, saved.generations_undone, bool(saved.core))
        core = self._make(config, run.lease_seconds)
        if saved.core:
            core.load_state_dict(saved.core)
        if saved.finished:
            return False
        saved.open()
        shard.take_core(core, JournaledCore(core))
        keeping.begin(shard.journaled, shard.decoder, shard.lease_seconds)
        return True

    def save(self, shard: Any, version: int, state: State) -> None:
        """Schedule the write of a snapshot of the shard."""
        if self.saved is None:
            return
        journaled, received = shard.journaled, shard.received() or DatagramCounts()
        state, begun = journaled.consistent(state), journaled.begin()
        reports = shard.reports.copy()
        run_id = shard.identity.run_id
        self.saved.put(version, state, run_id, shard.bytes_down(), reports, received, begun)


def _later(shard: Any, clock: Clock, seconds: float, call: Callable[[], None]) -> None:
    """Schedule a call that is skipped if the shard's process dies before the call."""
    clock.at(clock.now + seconds, functools.partial(shard.if_it_lives, shard.life, call))
