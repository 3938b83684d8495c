"""The files of one shard: what its last generation left there, and what this one leaves.

Snapshots are written by a thread of their own (`Saver`); only the newest waits for it. Journals
that no snapshot on disk needs any more are removed.
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
from thinwire.ps.datagrams.counters import DatagramCounts
from thinwire.ps.persistence import journal
from thinwire.ps.persistence.journal import Journal, JournalPosition
from thinwire.ps.persistence.journal_format import EventCoder
from thinwire.ps.persistence.replay import MakeCore, Replayed, replay
from thinwire.ps.programs import Programs
from thinwire.runtime.persistence.checkpoint import CheckpointStore, Fenced
from thinwire.runtime.persistence.places import CHECKPOINTS, checkpoints_at
from thinwire.runtime.run.directory import checkpoints_of
from thinwire.runtime.run.finished import resumed_settings
from thinwire.runtime.run.lock import LockOwner
from thinwire.runtime.run.resuming import OtherRun, first_setting, programs_of, refusal
from thinwire.runtime.run.settings import SCRIPT_FAILURES, Run, is_finished, limit_of

#: Of what a checkpoint of a shard holds: raised with any change of names or of meaning, together
#: with the journal's magic. 1: by attributes of the core, before the parts had names of their own;
#: 2: blocks span one slot; 3: schedules count examples.
FORMAT = 4
_READABLE = (2, 3, FORMAT)
_JOURNALS_OF = "journals.id"
_NB_PS, _OPTIMIZER = "nb_ps", "server_optimizer"


def _compiled(offer: Offer) -> list[object]:
    """Return what decides how the model of an offer is stepped, the rate included."""
    fresh = [dataclasses.replace(each, iterations=0) for each in offer.optimizers]
    return [fresh, offer.fingerprint()]


class Saver:
    """Writes checkpoints in the background, one at a time.

    A thread exists only while there is something to write: a process that has served many shards
    then has none of their threads, nor the arrays that these would refer to.
    """

    def __init__(
        self,
        checkpoints: CheckpointStore,
        on_saved: Callable[[State], None] = lambda state: None,
        on_fenced: Callable[[Fenced], None] = lambda error: None,
    ) -> None:
        """Make one that has nothing to write.

        Args:
            checkpoints: Where they are kept.
            on_saved: Called with each state that is safely kept.
            on_fenced: Called when a successor writes there.
        """
        self._checkpoints, self._on_saved = checkpoints, on_saved
        self._on_fenced = on_fenced
        self._changed = threading.Condition()
        self._next: tuple[int, State] | None = None
        self._is_writing = False
        self.failure: Exception | None = None

    def put(self, version: int, state: State) -> None:
        """Have a snapshot written soon, instead of one that still waits; never blocks."""
        with self._changed:
            self._next = (version, state)
            if not self._is_writing:
                self._is_writing = True
                threading.Thread(target=self._write_all, name="saver", daemon=True).start()

    def flush(self) -> None:
        """Wait until every snapshot is on disk.

        Raises:
            Exception: Why writing failed.
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
                logging.error("cannot write the checkpoint of version %d: %s", version, error)

    def _take(self) -> tuple[int, State] | None:
        """Return what is to be written next; None, once for each thread, if there is nothing."""
        with self._changed:
            snapshot, self._next = self._next, None
            if snapshot is None:
                self._is_writing = False
                self._changed.notify_all()
            return snapshot


class SavedShard:
    """The checkpoints of one shard of a run: the core's state, and the run's identity.

    Args:
        run: The run's settings.
        name: Of the node, which its folder in the run directory bears.

    Raises:
        ConfigurationError: All checkpoints in the run directory are damaged, or are of another
            version.
    """

    def __init__(self, run: Run, name: str) -> None:
        self._run = run
        self._spec = ModelSpec(())  # see `check`
        self._offer: Offer | None = None
        self._name = name
        self.folder = checkpoints_of(run.run_dir, name)
        self.on_fenced: Callable[[Fenced], None] = lambda error: None
        self._checkpoints = self._checkpoints_of(name, self.folder, run.keep_checkpoints)
        self._found = self._load()
        self._phase, self._since = self.phase, self.since
        known = {} if self._found is None or run.resume else programs_of(self._found)
        self.programs = Programs(known, self.place)
        self._mark = journal.read_mark(self.folder)
        self._replayed: Replayed | None = None
        # First files of the journals that the snapshots on disk need, the newest last. Snapshots of
        # earlier generations may need any of the files found.
        files = journal.numbers(self.folder)
        self._needed: list[int | None] = [min(files, default=None)] * run.keep_checkpoints

    @property
    def offer(self) -> str | None:
        """The document of the model, where a worker offered it; None: nothing was saved."""
        return self._found.get("offer") if self._found else None

    def check(self, spec: ModelSpec, offer: Offer | None = None) -> None:
        """Compare what was found with this run, and save the run's identity from now on.

        Args:
            spec: Of the whole model.
            offer: That a worker made, if one did.

        Raises:
            ConfigurationError: The run directory holds another run.
        """
        self._spec, self._offer = spec, offer
        self._refuse_other_run(spec)
        while not self._checkpoints.claim(self.generation, self._owner):
            self._found = self._load()  # somebody has written since
            self._refuse_other_run(spec)

    def _refuse_other_run(self, spec: ModelSpec) -> None:
        if self._found is None:
            return
        before = [pb.Tensor(path=p, shape=s, dtype=d) for p, s, d in self._found["model"]]
        difference = messages.first_difference(before, messages.tensors_of(spec))
        now = resumed_settings(self._run)
        difference = difference or first_setting(self.settings, {_NB_PS: now[_NB_PS]})
        if difference:
            raise OtherRun(
                f"{self.place} holds a run whose weights lie otherwise ({difference}). Nothing was "
                "deleted; expected the same model and --nb_ps, which --resume cannot change. Add "
                "--overwrite to begin again, or give this run another folder."
            )
        change = None if self._run.resume else first_setting(self.settings, now)
        if change is not None:
            raise OtherRun(refusal(self.place, change, self.version))

    def changes(self, offer: Offer | None) -> bool:
        """Return whether the saved state is of other settings, or of another offer, than this run.

        Args:
            offer: That a worker has made now, if one did.
        """
        if self._found is None:
            return False
        before = None if self.offer is None else read_offer(self.offer, 1 << 62)
        is_same = (before is None) == (offer is None)
        if is_same and before is not None and offer is not None:
            is_same = _compiled(before) == _compiled(offer)
        return not is_same or bool(first_setting(self.settings, resumed_settings(self._run)))

    def has_optimizers_of(self, offer: Offer | None) -> bool:
        """Return whether the saved state is of optimizers of the same classes."""
        if self.offer is None or offer is None:
            now = {_OPTIMIZER: resumed_settings(self._run)[_OPTIMIZER]}
            return first_setting(self.settings, now) is None
        before = read_offer(self.offer, 1 << 62)
        classes = [[each.optimizer.name for each in one.optimizers] for one in (before, offer)]
        return classes[0] == classes[1]

    @property
    def settings(self) -> dict[str, str]:
        """The settings that the run was trained with; of an earlier version: none are known."""
        found = self._found.get("settings", {}) if self._found else {}
        return {str(name): str(value) for name, value in found.items()}

    @property
    def version(self) -> int:
        """Updates that the newest checkpoint has."""
        found = self._found["core"].get("model", {}) if self._found else {}
        return int(found.get("version", 0))

    @property
    def script_failed(self) -> bool:
        """Whether the run's script failed after it had trained."""
        return bool(self._found and self._found.get("script_failed"))

    @property
    def phase(self) -> int:
        """The phase of the script that the model is of."""
        return int(self._found.get("phase", 0)) if self._found else 0

    @property
    def since(self) -> int:
        """The first phase that had the same variables."""
        return int(self._found.get("since", 0)) if self._found else 0

    def begin_phase(self, spec: ModelSpec, offer: Offer | None, phase: int, since: int) -> None:
        """Save another model of the run from now on, with a journal of its own.

        Args:
            spec: Of the whole model.
            offer: That a worker made.
            phase: Of the script.
            since: The first phase that had the same variables.
        """
        self._spec, self._offer, self._phase, self._since = spec, offer, phase, since
        self._replayed = None

    @property
    def core(self) -> State | None:
        """The core's state when it was last saved; None if it never was."""
        return self._found["core"] if self._found else None

    @property
    def run_id(self) -> str:
        """The run's identity; empty if nothing was saved."""
        return str(self._found["run_id"]) if self._found else ""

    @property
    def finished(self) -> str | None:
        """Why the run had ended, if nothing is left to do; else None.

        An end that only the journal knows is left to do: workers may not have learned of it.
        """
        if self._found is None or (self._replayed is not None and self._replayed.num_records):
            return None
        reason = self._found["core"]["lifecycle"]["stop_reason"]
        return reason if is_finished(self._run, reason, self._found["limit"]) else None

    @property
    def reports(self) -> dict[tuple[int, int], str]:
        """The newest document of each (role, id)."""
        found = {}
        for key, text in self._found["reports"].items() if self._found else ():
            role, _, who = key.partition(":")
            found[(int(role), int(who))] = text
        return found

    @property
    def bytes_down(self) -> dict[int, int]:
        """Bytes sent to each worker."""
        saved = self._found["bytes_down"] if self._found else {}
        return {int(worker): count for worker, count in saved.items()}

    @property
    def datagrams(self) -> DatagramCounts:
        """The datagrams received."""
        return DatagramCounts.from_dict(self._found.get("datagrams", {}) if self._found else {})

    @property
    def recovered(self) -> State:
        """What journals had restored when it was saved."""
        nothing = {"replayed": 0, "cuts": []}
        return self._found.get("recovered", nothing) if self._found else nothing

    @property
    def generation(self) -> int:
        """The generation that begins now: above any before, those of damaged snapshots included."""
        before = [self._found["core"]["generation"] if self._found else -1]
        before.append(self._checkpoints.generation_before)
        if self._replayed is not None:
            before.append(self._replayed.generation)
        if self._mark is not None:
            before.append(self._mark.generation)
        return max(before) + 1 + self._checkpoints.num_skipped

    @property
    def generations_undone(self) -> int:
        """How many generations back updates may be lost."""
        return self.generation - self._found["core"]["generation"] if self._found else 1

    @property
    def reached_version(self) -> int | None:
        """The version that the generation before had reached; None if that is not known.

        None too for the mark of an earlier generation: the snapshot has counted its lost updates.
        """
        found = self._found["core"]["generation"] if self._found else 0
        mark = self._mark if self._found else None
        return mark.version if mark is not None and mark.generation >= found else None

    def replay(self, make: MakeCore, coder: EventCoder) -> Replayed | None:
        """Replay the journal on top of the snapshot found; return None if there is no journal.

        Args:
            make: Makes cores.
            coder: Of the shard's events.
        """
        if self._found is None or self._found.get("journal") is None:
            return None
        if self._found.get("journals_of") != self._journals_of():
            logging.warning(
                "the journal behind the newest checkpoint lies on another machine: the updates "
                "that it holds are lost, and this shard goes on from the checkpoint"
            )
            return None
        found = self._found
        replayed = replay(self.folder, found["core"], found["soft"], found["journal"], make, coder)
        found["core"], self._replayed = replayed.core, replayed
        logging.info("the journal restored %d events", replayed.num_records)
        if replayed.damage:
            logging.warning("the journal was cut: %s", replayed.damage)
        return replayed

    def open(self) -> None:
        """Make what writes checkpoints."""
        self._saver = Saver(
            self._checkpoints, self._remove_unneeded, lambda error: self.on_fenced(error)
        )

    def new_journal(self, coder: EventCoder, model_bytes: int) -> Journal:
        """Return a journal that continues the one found."""
        end: JournalPosition | None = self._replayed.place if self._replayed is not None else None
        return Journal(self.folder, coder, model_bytes, end)

    def _remove_unneeded(self, state: State) -> None:
        """Remove the journals that none of the snapshots on disk needs; each may be a fallback."""
        self._needed = [*self._needed, state.get("journal")][-self._run.keep_checkpoints :]
        needed = [number for number in self._needed if number is not None]
        try:
            journal.remove_before(self.folder, min(needed, default=1 << 62))
        except OSError as error:
            logging.warning("cannot remove an old journal: %s", error)

    def put(
        self,
        version: int,
        core: State,
        run_id: str,
        bytes_down: dict[int, int],
        reports: dict[tuple[int, int], str],
        datagrams: DatagramCounts,
        begun: State | None = None,
    ) -> None:
        """Have this state written soon; never blocks.

        Args:
            version: Of the weights.
            core: The core's snapshot, not to be changed afterwards.
            run_id: The run's identity.
            bytes_down: Bytes sent to each worker.
            reports: The newest document of each (role, id).
            datagrams: Those received.
            begun: What `JournaledCore.begin` returned, if a journal continues from this state.
        """
        self._saver.put(
            version,
            {
                "format": FORMAT,
                "core": core,
                "run_id": run_id,
                "limit": limit_of(self._run, core["lifecycle"]["stop_reason"]),
                "settings": resumed_settings(self._run),
                "programs": self.programs.to_plain(),
                "script_failed": self._fails_with(version, core),
                "model": [[t.path, list(t.shape), t.dtype] for t in self._spec.tensors],
                "bytes_down": {str(worker): count for worker, count in bytes_down.items()},
                "reports": {f"{role}:{who}": text for (role, who), text in reports.items()},
                "datagrams": datagrams.to_dict(),
                **({"offer": self._offer.to_json()} if self._offer is not None else {}),
                "phase": self._phase,
                "since": self._since,
                **({"journals_of": self._journals_of()} if self._is_elsewhere else {}),
                **(begun or {}),
            },
        )

    def flush(self) -> None:
        """Wait until every snapshot is on disk.

        Raises:
            ConfigurationError: The disk failed.
        """
        try:
            self._saver.flush()
        except OSError as error:
            remedy = "free space on that disk, or let this user write there"
            if self._is_elsewhere:
                remedy = "make that storage reachable and writable"
            raise ConfigurationError(
                f"cannot write a checkpoint into {self.where}: {error.strerror or error}. The "
                f"checkpoints before it are intact: {remedy}, and start the same command again."
            ) from error

    def ended_models(self) -> CheckpointStore:
        """Return where models of earlier phases are kept, with nobody else writing there."""
        name = f"{self._name}-ended"
        found = self._checkpoints_of(name, self.folder / "ended", self._run.keep_checkpoints)
        found.take_over(self._owner)
        return found

    def _checkpoints_of(self, name: str, folder: pathlib.Path, keep: int) -> CheckpointStore:
        return checkpoints_at(self._run.checkpoint_dir, name, folder, keep)

    @property
    def _is_elsewhere(self) -> bool:
        """Whether checkpoints are not kept beside the journal."""
        return self._run.checkpoint_dir is not None

    @property
    def place(self) -> str:
        """The flag that names where checkpoints are, with its value."""
        return "--{}={}".format(*self._place)

    @property
    def _place(self) -> tuple[str, str]:
        """Return the flag that names where checkpoints are, and its value."""
        if self._run.checkpoint_dir is not None:
            return CHECKPOINTS, self._run.checkpoint_dir
        return "run_dir", str(self._run.run_dir)

    @property
    def where(self) -> str:
        """The folder, or the address, of the checkpoints."""
        if self._run.checkpoint_dir is not None:
            return f"{self._run.checkpoint_dir.rstrip('/')}/{self._name}"
        return str(self.folder)

    @property
    def _owner(self) -> str:
        number = int(self._name.rpartition("-")[2])
        addresses = self._run.addresses
        return str(LockOwner.here("PS", number, addresses[number] if addresses else ""))

    def _journals_of(self) -> str | None:
        """Return what the journals of this folder are known by, in checkpoints kept elsewhere.

        Journals of several machines have the same names; those of another one must not be replayed.
        None where checkpoints and journals are in one place.
        """
        if not self._is_elsewhere:
            return None
        path = self.folder / _JOURNALS_OF
        with contextlib.suppress(OSError):
            if known := path.read_text().strip():
                return known
        self.folder.mkdir(parents=True, exist_ok=True)
        made = secrets.token_hex(8)
        path.write_text(f"{made}\n")
        return made

    def _load(self) -> State | None:
        found = self._checkpoints.load_latest()
        if found is None:
            if self._checkpoints.num_skipped:
                raise ConfigurationError(self._all_damaged())
            return None
        _, state = found
        if (theirs_format := state.get("format", 1)) not in _READABLE:
            flag, place = self._place
            raise ConfigurationError(
                f"--{flag}={place} holds checkpoints of format {theirs_format}, and this version "
                f"of Thinwire reads {_READABLE[0]} to {FORMAT}: go on with the version that "
                f"wrote them, or give this run another --{flag}, or --overwrite the old one."
            )
        return state

    def _fails_with(self, version: int, core: State) -> bool:
        """Return whether a script has failed that had trained here.

        One that could not begin, for a file that is missing or a module, leaves the run as it was.
        """
        if self._found and version <= self.version:
            return self.script_failed
        return core["lifecycle"]["stop_reason"] in SCRIPT_FAILURES

    def _all_damaged(self) -> str:
        count = self._checkpoints.num_skipped
        return (
            f"{self.where} holds {count} checkpoints, and all of them are damaged (see the "
            "log). Restore a copy of that folder, or set --overwrite to start this run afresh."
        )
