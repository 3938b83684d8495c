"""Reads and writes the files of a PS shard: checkpoints, journals, and the high-water mark.

A separate thread (`Saver`) writes each snapshot of the shard as a checkpoint. While the thread
writes a checkpoint, only the newest snapshot waits to be written. The shard removes each journal
file that no checkpoint needs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pathlib
import secrets
import threading
from collections.abc import Callable

from absl import logging

from thinwire.ops.offer import Offer, read_offer
from thinwire.ops.types import ConfigurationError, ModelSpec, State
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.ps.persistence import journal
from thinwire.ps.persistence.journal import Journal, JournalPosition
from thinwire.ps.persistence.journal_format import EventCoder
from thinwire.ps.persistence.replay import MakeCore, Replayed, replay
from thinwire.ps.persistence.shard_checkpoint import ShardCheckpoint
from thinwire.ps.programs import Programs
from thinwire.runtime.persistence.checkpoint import Checkpoints
from thinwire.runtime.persistence.checkpoint_log import Fenced
from thinwire.runtime.persistence.places import CHECKPOINTS, checkpoints_at
from thinwire.runtime.run.directory import checkpoints_of
from thinwire.runtime.run.finished import resumed_settings
from thinwire.runtime.run.lock import LockOwner
from thinwire.runtime.run.resuming import OtherRun, first_setting, refusal
from thinwire.runtime.run.settings import SCRIPT_FAILURES, Run, is_finished, limit_of

_JOURNALS_OF = "journals.id"
_NB_PS, _OPTIMIZER = "nb_ps", "server_optimizer"


def _compiled(offer: Offer) -> list[object]:
    """Return the parts of a model's description that determine the computation of training
    steps.
    """
    fresh = [dataclasses.replace(optimizer, iterations=0) for optimizer in offer.optimizers]
    return [fresh, offer.fingerprint()]


class Saver:
    """Writes the checkpoints of a shard in a background thread, one checkpoint after the other.

    The background thread exists only while a checkpoint is being written. A process that has served
    many shards one after the other holds no idle writing threads, and no arrays that idle threads
    would refer to.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        on_saved: Callable[[State], None] = lambda state: None,
        on_fenced: Callable[[Fenced], None] = lambda error: None,
    ) -> None:
        """Create a saver that has no snapshot to write yet.

        Args:
            checkpoints: Storage (folder or remote) that the checkpoints are written to.
            on_saved: Function called with each state after the state is stored as a checkpoint.
            on_fenced: Function called when a successor process has taken over the checkpoints.
        """
        self._checkpoints, self._on_saved = checkpoints, on_saved
        self._on_fenced = on_fenced
        self._changed = threading.Condition()
        self._next: tuple[int, State] | None = None
        self._is_writing = False
        self.failure: Exception | None = None

    def put(self, version: int, state: State) -> None:
        """Write a snapshot as a checkpoint soon, instead of any snapshot that waits; never
        block.
        """
        with self._changed:
            self._next = (version, state)
            if not self._is_writing:
                self._is_writing = True
                threading.Thread(target=self._write_all, name="saver", daemon=True).start()

    def flush(self) -> None:
        """Wait until no snapshot is being written or waits to be written.

        Raises:
            Exception: The newest snapshot could not be written.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._is_writing)
        if self.failure is not None:
            raise self.failure

    def _write_all(self) -> None:
        while (snapshot := self._take()) is not None:
            version, state = snapshot
            try:
                self._checkpoints.save(version, state)
                self._on_saved(state)
                self.failure = None
            except Fenced as error:
                self.failure = error
                self._on_fenced(error)
            except Exception as error:  # noqa: BLE001 - flush() raises it
                self.failure = error
                logging.error("cannot write the checkpoint of model version %d: %s", version, error)

    def _take(self) -> tuple[int, State] | None:
        """Return the snapshot to write next; None if no snapshot waits, which ends the writing
        thread.
        """
        # The saver clears `_is_writing` under the lock under which `put` reads it. A snapshot that
        # arrives later therefore starts a new thread. Without the lock, that snapshot could wait
        # forever.
        with self._changed:
            snapshot, self._next = self._next, None
            if snapshot is None:
                self._is_writing = False
                self._changed.notify_all()
            return snapshot


class SavedShard:
    """The saved files of one parameter server shard: the shard's state and the identity of its run.

    Attributes:
        last: Contents of the newest checkpoint, after `replay` with the state that the journal
            restored.
        folder: Folder of the shard's checkpoints and journals in the run directory.
        programs: Programs of the run's workers.

    Args:
        run: Settings of the training run.
        name: Name of the PS node, for example ``ps-0``, which is also its folder's name in the run
            directory.

    Raises:
        ConfigurationError: All checkpoints of the shard are damaged, or the newest checkpoint has a
            format that this version of Thinwire cannot read.
    """

    def __init__(self, run: Run, name: str) -> None:
        self._run = run
        self._name = name
        self.folder = checkpoints_of(run.run_dir, name)
        self._checkpoints = self._checkpoints_of(name, self.folder, run.keep_checkpoints)
        self.last = self._load()
        self.programs = Programs({} if run.resume else self.last.programs, self.place)
        self._mark = journal.read_mark(self.folder)
        self._replayed: Replayed | None = None
        # For each checkpoint on disk: number of the first journal file that the checkpoint needs;
        # the newest checkpoint is last. Checkpoints from before this process's start may need any
        # journal file in the folder, so their entry is the lowest number.
        files = journal.numbers(self.folder)
        self._needed: list[int | None] = [min(files, default=None)] * run.keep_checkpoints

    def check(self, spec: ModelSpec) -> None:
        """Check that the saved run has this run's settings and model, and take over its
        checkpoints.

        Args:
            spec: Names, shapes and dtypes of the whole model's variables.

        Raises:
            ConfigurationError: The run directory holds a run with other settings or another model.
        """
        self._refuse_other_run(spec)
        if not self._is_elsewhere:
            return  # the lock of the run directory excludes other writers
        while not self._checkpoints.log.claim(self.generation, self._owner):
            # `claim` fails if another process has written a checkpoint since this process loaded
            # one. Load the newest checkpoint, so that this process does not continue from a stale
            # state.
            self.last = self._load()
            self._refuse_other_run(spec)

    def _refuse_other_run(self, spec: ModelSpec) -> None:
        last = self.last
        if last.core is None:
            return
        before = [pb.Tensor(path=p, shape=s, dtype=d) for p, s, d in last.model]
        difference = messages.first_difference(before, messages.tensors_of(spec))
        now = resumed_settings(self._run)
        difference = difference or first_setting(last.settings, {_NB_PS: now[_NB_PS]})
        if difference:
            raise OtherRun(
                f"{self.place} holds a run with another layout of weights ({difference}). Nothing "
                "was deleted; expected the same model and --nb_ps, which --resume cannot change. "
                "Add --overwrite to begin again, or give this run another folder."
            )
        change = None if self._run.resume else first_setting(last.settings, now)
        if change is not None:
            raise OtherRun(refusal(self.place, change, last.version))

    def changes(self, offer: Offer | None) -> bool:
        """Return whether the saved state has other settings or another model than this run.

        Args:
            offer: Description of the model that a worker has sent; None if flags select the model.
        """
        last = self.last
        if last.core is None:
            return False
        before = None if last.offer is None else read_offer(last.offer, 1 << 62)
        is_same = (before is None) == (offer is None)
        if is_same and before is not None and offer is not None:
            is_same = _compiled(before) == _compiled(offer)
        return not is_same or bool(first_setting(last.settings, resumed_settings(self._run)))

    def has_optimizers_of(self, offer: Offer | None) -> bool:
        """Return whether the classes of the saved model's optimizers are those of `offer`'s
        model.
        """
        last = self.last
        if last.offer is None or offer is None:
            now = {_OPTIMIZER: resumed_settings(self._run)[_OPTIMIZER]}
            return first_setting(last.settings, now) is None
        before = read_offer(last.offer, 1 << 62)
        classes = [
            [entry.optimizer.name for entry in document.optimizers] for document in (before, offer)
        ]
        return classes[0] == classes[1]

    @property
    def finished(self) -> str | None:
        """Stop reason of a saved run that is finished; None if the shard must still serve the run.

        If the end of a run is only in the journal and not in a checkpoint, the shard serves the run
        again, because workers may not have been notified of the end.
        """
        last = self.last
        if last.core is None or (self._replayed is not None and self._replayed.num_records):
            return None
        reason = last.stop_reason
        return reason if is_finished(self._run, reason, last.limit) else None

    @property
    def generation(self) -> int:
        """Generation (number of restarts) that begins now, higher than all earlier generations of
        the shard.
        """
        # A skipped checkpoint is damaged, so its generation (restart number) cannot be read, and
        # one is added for each skipped checkpoint. If a generation were used twice, the shard would
        # accept a worker's push for weights that a restart has replaced.
        before = [self.last.generation, self._checkpoints.log.generation_before]
        if self._replayed is not None:
            before.append(self._replayed.generation)
        if self._mark is not None:
            before.append(self._mark.generation)
        return max(before) + 1 + self._checkpoints.num_skipped

    @property
    def generations_undone(self) -> int:
        """Number of restarts of the shard since the checkpoint; updates since then may be lost."""
        return self.generation - self.last.generation if self.last.core is not None else 1

    @property
    def reached_version(self) -> int | None:
        """Version of the weights that the shard reached before its last restart; None if unknown.

        The version that the shard reached is None if the high-water mark was written before an
        earlier restart than the checkpoint, because the checkpoint already counts the updates lost
        in that restart.
        """
        last, mark = self.last, self._mark
        is_known = last.core is not None and mark is not None and mark.generation >= last.generation
        return mark.version if mark is not None and is_known else None

    def replay(self, make: MakeCore, coder: EventCoder) -> Replayed | None:
        """Replay the journal on the state of the newest checkpoint; return None without a journal.

        Args:
            make: Function that makes a shard's state machine from its settings.
            coder: Coder of the shard's events as journal records.
        """
        last = self.last
        if last.core is None or last.journal is None:
            return None
        if last.journals_of != self._journals_of():
            logging.warning(
                "the journal of events after the newest checkpoint is on another machine: the "
                "updates in this journal are lost, and the PS shard continues from the checkpoint"
            )
            return None
        replayed = replay(self.folder, last.core, last.soft or {}, last.journal, make, coder)
        self.last, self._replayed = dataclasses.replace(last, core=replayed.core), replayed
        logging.info("the PS shard's journal restored %d events", replayed.num_records)
        if replayed.damage:
            logging.warning("cut off the damaged end of the PS journal: %s", replayed.damage)
        return replayed

    @property
    def replayed_to(self) -> JournalPosition | None:
        """End of the journal that this process has replayed; None if it has replayed none."""
        return self._replayed.place if self._replayed is not None else None

    def open(self, on_fenced: Callable[[Fenced], None] = lambda error: None) -> None:
        """Create the `Saver` of checkpoints, so that `put` can write checkpoints.

        Args:
            on_fenced: Function called when a successor process has taken over the checkpoints.
        """
        self._saver = Saver(self._checkpoints, self._remove_unneeded, on_fenced)

    def new_journal(
        self, coder: EventCoder, model_bytes: int, after: JournalPosition | None
    ) -> Journal:
        """Return a new journal.

        Args:
            coder: Coder of the shard's events as journal records.
            model_bytes: Size of the shard's weights, in bytes.
            after: End of the journal that the new journal continues; None if it continues none.
        """
        return Journal(self.folder, coder, model_bytes, after)

    def _remove_unneeded(self, state: State) -> None:
        """Remove the journal files that no checkpoint on disk needs.

        A journal file is removed only if no checkpoint needs it, not only the newest checkpoint. If
        the newest checkpoint is damaged, a restart loads an older checkpoint and replays all
        journal files that follow it.
        """
        self._needed = [*self._needed, state.get("journal")][-self._run.keep_checkpoints :]
        needed = [number for number in self._needed if number is not None]
        try:
            journal.remove_before(self.folder, min(needed, default=1 << 62))
        except OSError as error:
            logging.warning("cannot delete an old journal of this PS shard: %s", error)

    def put(self, version: int, state: ShardCheckpoint) -> None:
        """Write the shard's state as a checkpoint soon; never block.

        Args:
            version: Version of the weights in the state (number of updates).
            state: Contents of the checkpoint, to which the method adds the entries that this object
                knows. The caller must not change the state of the state machine afterwards.
        """
        last = self.last
        # If the training script fails before its first update (for example on a missing module),
        # the result in the newest checkpoint is kept.
        has_trained = last.core is None or version > last.version
        failed = state.stop_reason in SCRIPT_FAILURES if has_trained else last.script_failed
        whole = dataclasses.replace(
            state,
            limit=limit_of(self._run, state.stop_reason),
            settings=resumed_settings(self._run),
            programs=self.programs.known(),
            script_failed=failed,
            journals_of=self._journals_of(),
        )
        self._saver.put(version, whole.to_plain())

    def flush(self) -> None:
        """Wait until no checkpoint is being written or waits to be written.

        Raises:
            ConfigurationError: The checkpoint cannot be written to the disk or the other storage.
        """
        try:
            self._saver.flush()
        except OSError as error:
            remedy = "free space on that disk, or let this user write there"
            if self._is_elsewhere:
                remedy = "make that storage reachable and writable"
            raise ConfigurationError(
                f"cannot write a checkpoint into {self.where}: {error.strerror or error}. The "
                f"earlier checkpoints are intact: {remedy}, and start the same command again."
            ) from error

    def ended_models(self) -> Checkpoints:
        """Return the storage of the script's earlier models, which this process may write to."""
        name = f"{self._name}-ended"
        store = self._checkpoints_of(name, self.folder / "ended", self._run.keep_checkpoints)
        if self._is_elsewhere:
            store.log.take_over(self._owner)
        return store

    def _checkpoints_of(self, name: str, folder: pathlib.Path, keep: int) -> Checkpoints:
        return checkpoints_at(self._run.checkpoint_dir, name, folder, keep)

    @property
    def _is_elsewhere(self) -> bool:
        """True if the checkpoints are stored in another folder than the journal
        (--checkpoint_dir).
        """
        return self._run.checkpoint_dir is not None

    @property
    def place(self) -> str:
        """Flag and value that name the folder of the checkpoints, for messages: "--run_dir=..."."""
        return "--{}={}".format(*self._place)

    @property
    def _place(self) -> tuple[str, str]:
        """Return name and value of the flag that names the folder or address of the checkpoints."""
        if self._run.checkpoint_dir is not None:
            return CHECKPOINTS, self._run.checkpoint_dir
        return "run_dir", str(self._run.run_dir)

    @property
    def where(self) -> str:
        """Folder or address of the PS shard's checkpoints, for messages to the user."""
        if self._run.checkpoint_dir is not None:
            return f"{self._run.checkpoint_dir.rstrip('/')}/{self._name}"
        return str(self.folder)

    @property
    def _owner(self) -> str:
        number = int(self._name.rpartition("-")[2])
        addresses = self._run.addresses
        return str(LockOwner.here("PS", number, addresses[number] if addresses else ""))

    def _journals_of(self) -> str | None:
        """Return the random id of the run directory's journals, which remote checkpoints also hold.

        Journal files of different machines have the same names, and a shard must not replay the
        journal of another machine. The id is None if checkpoints and journals are in the same
        folder.
        """
        if not self._is_elsewhere:
            return None
        path = self.folder / _JOURNALS_OF
        with contextlib.suppress(OSError):
            if known := path.read_text().strip():
                return known
        self.folder.mkdir(parents=True, exist_ok=True)
        new_id = secrets.token_hex(8)
        path.write_text(f"{new_id}\n")
        return new_id

    def _load(self) -> ShardCheckpoint:
        """Return the contents of the newest checkpoint that is not damaged."""
        latest = self._checkpoints.load_latest()
        if latest is not None:
            return ShardCheckpoint.from_plain(latest[1], self._place)
        if self._checkpoints.num_skipped:
            raise ConfigurationError(self._all_damaged())
        return ShardCheckpoint()

    def _all_damaged(self) -> str:
        count = self._checkpoints.num_skipped
        return (
            f"{self.where} holds {count} checkpoints, and all of them are damaged (see the "
            "log). Restore a copy of that folder, or set --overwrite to begin this run again."
        )
