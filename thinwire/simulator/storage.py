"""Files of a simulated PS shard (checkpoints and journal), and restarts from the files."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable
from typing import Any, BinaryIO

from absl import logging

from thinwire.ops.types import ModelSpec, State
from thinwire.ps.core.members import CoreConfig
from thinwire.ps.datagrams.counters import DatagramCounts
from thinwire.ps.persistence.journal import Journal, JournalPosition
from thinwire.ps.persistence.journal_format import EventCoder
from thinwire.ps.persistence.policy import JournalPolicy
from thinwire.ps.persistence.replay import MakeCore
from thinwire.ps.persistence.shard_checkpoint import ShardCheckpoint, model_rows
from thinwire.ps.persistence.shard_store import SavedShard
from thinwire.runtime.persistence.checkpoint import Checkpoints
from thinwire.runtime.persistence.checkpoint_log import Fenced
from thinwire.runtime.run.settings import Run

#: Run id in the records of a simulated run.
RUN_ID = "simulated"
#: Time to write a snapshot, in virtual seconds, during which a newer snapshot waits.
WRITE_SECONDS = 0.05


class SimulatedKill(Exception):
    """A simulated process was killed while it wrote a file; unwritten data are lost."""


class SimulatedDisk:
    """Creates the files of a simulated PS shard; tests replace the class by a failing disk."""

    def create(self, path: pathlib.Path) -> BinaryIO:
        """Create and open a new file of the PS shard, without a buffer.

        Raises:
            OSError: The simulated disk failed.
            SimulatedKill: The PS shard's process was killed while it created the file.
        """
        return open(path, "xb", buffering=0)

    def save(self, checkpoints: Checkpoints, version: int, state: State) -> None:
        """Write a snapshot of a PS shard's state; raise OSError if the simulated disk fails."""
        checkpoints.save(version, state)


class SimulatedSaver:
    """Writes a PS shard's snapshots one at a time, on the virtual clock.

    `SimulatedSaver` corresponds to `thinwire.ps.persistence.shard_store.Saver` of a real PS shard.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        on_saved: Callable[[State], None],
        disk: SimulatedDisk,
        later: Callable[[Callable[[], None]], None],
    ) -> None:
        """Create a saver without a snapshot of the PS shard to write.

        Args:
            checkpoints: Store that writes the PS shard's checkpoint files.
            on_saved: Function that is called with each state of the PS shard that was saved.
            disk: Simulated disk that writes the snapshots.
            later: Function that calls a function after WRITE_SECONDS, unless the PS shard's process
                has died.
        """
        self._checkpoints, self._on_saved, self._disk = checkpoints, on_saved, disk
        self._later = later
        self._next: tuple[int, State] | None = None
        self._busy = False
        self.failure: Exception | None = None

    def put(self, version: int, state: State) -> None:
        """Schedule the write of a snapshot, which replaces a snapshot that waits to be written."""
        self._next = (version, state)
        if not self._busy:
            self._busy = True
            self._later(self._write)

    def flush(self) -> None:
        """Write the snapshot that waits to be written immediately.

        Raises:
            Exception: The last attempt to write a snapshot of the PS shard failed.
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
            logging.error("cannot write the checkpoint of model version %d: %s", version, error)


class SimulatedShardStore(SavedShard):
    """The files of one simulated PS shard, written on the virtual clock."""

    def __init__(
        self,
        run: Run,
        name: str,
        spec: ModelSpec,
        disk: SimulatedDisk,
        later: Callable[[Callable[[], None]], None],
    ) -> None:
        """Read the PS shard's saved state, if it exists, and check that it fits the model."""
        super().__init__(run, name)
        self.check(spec)
        self._disk, self._later = disk, later

    def open(self, on_fenced: Callable[[Fenced], None] = lambda error: None) -> None:
        """Create the object that writes the PS shard's snapshots to checkpoint files; no other
        process takes over a simulated shard, so `on_fenced` is never called.
        """
        saver = SimulatedSaver(self._checkpoints, self._remove_unneeded, self._disk, self._later)
        self._saver = saver  # type: ignore[assignment]  # the same methods

    def new_journal(
        self, coder: EventCoder, model_bytes: int, after: JournalPosition | None
    ) -> Journal:
        """Return a new journal on the simulated disk; see `SavedShard.new_journal`."""
        return Journal(self.folder, coder, model_bytes, after, self._disk.create)


@dataclasses.dataclass(frozen=True)
class StorageSetup:
    """Settings of the storage of a simulated run's PS shards."""

    journal: str  # value of --journal
    disks: tuple[SimulatedDisk, ...]  # disk of each PS shard, shard 0 first


@dataclasses.dataclass
class StoredShard:
    """Restarts a simulated PS shard from the files that its previous process has written.

    Attributes:
        run: Settings of the simulated training run.
        journal: Value of --journal.
        disk: Disk of the PS shard.
        spec: Names and shapes of the whole model's tensors.
        make_coder: Function that returns a coder, which serializes the PS core's events for the
            journal.
        make: Function that returns a PS core (state machine) in its initial state.
        config: Function of (generation (number of restarts), number of undone generations, whether
            the run is resumed) that returns the settings of the PS core.
        saved: Files of the PS shard's current process; None before the first start.
    """

    run: Run
    journal: str
    disk: SimulatedDisk
    spec: ModelSpec
    make_coder: Callable[[], EventCoder]
    make: MakeCore
    config: Callable[[int, int, bool], CoreConfig]
    saved: SimulatedShardStore | None = None

    def begin(self, shard: Any) -> bool:
        """Restore a PS shard's core from the shard's files; return False if the run is finished."""
        run, coder, name = self.run, self.make_coder(), f"ps-{shard.number}"

        def later(call: Callable[[], None]) -> None:
            shard.at(shard.clock.now + WRITE_SECONDS, call)

        self.saved = saved = SimulatedShardStore(run, name, self.spec, self.disk, later)
        keeping = JournalPolicy(run, self.journal, saved, coder, self.spec)
        keeping.replay(self.make)
        config = self.config(saved.generation, saved.generations_undone, bool(saved.last.core))
        core = self.make(config, run.lease_seconds)
        if saved.last.core:
            core.load_state_dict(saved.last.core)
        if saved.finished:
            return False
        saved.open()
        shard.take_core(core)
        keeping.begin(shard.journaled, shard.decoder, shard.lease_seconds)
        return True

    def save(self, shard: Any, version: int, state: State) -> None:
        """Schedule the write of a snapshot of the PS shard."""
        if self.saved is None:
            return
        journaled = shard.journaled
        state, begun = journaled.consistent(state), journaled.begin()
        contents = ShardCheckpoint(
            core=state,
            run_id=RUN_ID,
            model=model_rows(self.spec),
            bytes_down=shard.bytes_down(),
            reports=shard.reports.copy(),
            datagrams=shard.received() or DatagramCounts(),
            **begun,
        )
        self.saved.put(version, contents)
