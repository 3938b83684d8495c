"""A shard's place on disk: what it left there when it last ran, and what it leaves now.

Writes snapshots in a thread of its own; only the newest one waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from absl import logging

from thinwire.ops.persistence.checkpoint import Checkpoints
from thinwire.ops.run import fingerprint
from thinwire.ops.run.directory import checkpoints_of
from thinwire.ops.run.settings import Run, is_finished, limit_of
from thinwire.ops.types import ConfigurationError, ModelSpec, State
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.ps.datagrams.counters import DatagramCounts
from thinwire.ps.persistence import journal
from thinwire.ps.persistence.journal import Journal, JournalPosition
from thinwire.ps.persistence.journal_format import EventCoder
from thinwire.ps.persistence.replay import MakeCore, Replayed, replay


class Saver:
    """A background writer of checkpoints."""

    def __init__(
        self, checkpoints: Checkpoints, on_saved: Callable[[State], None] = lambda state: None
    ) -> None:
        """Start the thread; it calls `on_saved` with each state that is safely on disk."""
        self._checkpoints, self._on_saved = checkpoints, on_saved
        self._wake = threading.Condition()
        self._next: tuple[int, State] | None = None
        self._busy = False
        self.failure: Exception | None = None
        threading.Thread(target=self._run, name="saver", daemon=True).start()

    def put(self, version: int, state: State) -> None:
        """Have a snapshot written soon; never blocks."""
        with self._wake:
            self._next = (version, state)
            self._wake.notify_all()

    def flush(self) -> None:
        """Wait until everything handed in is on disk.

        Raises:
            Exception: Why writing failed.
        """
        with self._wake:
            self._wake.wait_for(lambda: self._next is None and not self._busy)
        if self.failure is not None:
            raise self.failure

    def _run(self) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._next is not None)
                assert self._next is not None
                (version, state), self._next, self._busy = self._next, None, True
            try:
                self._checkpoints.save(version, state)
                self._on_saved(state)
                self.failure = None
            except Exception as error:  # noqa: BLE001 - flush() hands it on
                self.failure = error
                logging.error("cannot write the checkpoint of version %d: %s", version, error)
            with self._wake:
                self._busy = False
                self._wake.notify_all()


class SavedShard:
    """The checkpoints of one shard of a run: the core's state, and whose it is.

    Args:
        run: The run's settings.
        name: Of the node, as its folder in the run directory is called.
        spec: Of the whole model.

    Raises:
        ConfigurationError: The run directory holds another run, or one whose checkpoints are all
            damaged.
    """

    def __init__(self, run: Run, name: str, spec: ModelSpec) -> None:
        self._run, self._spec = run, spec
        self.folder = checkpoints_of(run.run_dir, name)
        self._checkpoints = Checkpoints(self.folder, keep=run.keep_checkpoints)
        self._found = self._load()
        self._mark = journal.read(self.folder)
        self._replayed: Replayed | None = None
        # First files of the journals that the snapshots on disk need, the newest last. Which ones
        # those need that are found there is not known: all that are.
        files = journal.numbers(self.folder)
        self._needed: list[int | None] = [min(files, default=None)] * run.keep_checkpoints

    @property
    def core(self) -> State | None:
        """The core's state when it was last saved; None where nothing was."""
        return self._found["core"] if self._found else None

    @property
    def run_id(self) -> str:
        """The run's identity; empty where nothing was saved."""
        return str(self._found["run_id"]) if self._found else ""

    @property
    def finished(self) -> str | None:
        """Why the run ended then, if nothing is left to do; else None."""
        if self._found is None:
            return None
        reason = self._found["core"]["stop_reason"]
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
        """What was received in datagrams."""
        return DatagramCounts.from_dict(self._found.get("datagrams", {}) if self._found else {})

    @property
    def recovered(self) -> State:
        """What journals had brought back when it was saved."""
        nothing = {"replayed": 0, "cuts": []}
        return self._found.get("recovered", nothing) if self._found else nothing

    @property
    def generation(self) -> int:
        """Of the life that begins now: higher than any before, snapshots that are damaged too."""
        before = [self._found["core"]["generation"] if self._found else -1]
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
        """The version that the life before had come to; None where that is not known.

        Or where it is of no use: what an earlier life had lost has been counted in what was found.
        """
        found = self._found["core"]["generation"] if self._found else 0
        mark = self._mark if self._found else None
        return mark.version if mark is not None and mark.generation >= found else None

    def replay(self, make: MakeCore, coder: EventCoder) -> Replayed | None:
        """Bring what was found up to what a journal says; None where there is none.

        Args:
            make: Makes cores.
            coder: Of the shard's events.
        """
        if self._found is None or self._found.get("journal") is None:
            return None
        found, ended = self._found, self._found["core"]["stop_reason"]
        come = replay(self.folder, found["core"], found["soft"], found["journal"], make, coder)
        found["core"], self._replayed = come.core, come
        if come.core["stop_reason"] != ended:
            found["limit"] = come.limits.get(come.core["stop_reason"])
        logging.info("the journal brought back %d events", come.num_records)
        if come.damage:
            logging.warning("the journal was cut: %s", come.damage)
        return come

    def open(self) -> None:
        """Get ready to write."""
        self._saver = Saver(self._checkpoints, self._cut)

    def new_journal(self, coder: EventCoder, model_bytes: int) -> Journal:
        """Return a journal that goes on from the one that was found."""
        end: JournalPosition | None = self._replayed.place if self._replayed is not None else None
        return Journal(self.folder, coder, model_bytes, end)

    def _cut(self, state: State) -> None:
        """Remove what none of the snapshots on disk needs; each is one to fall back to."""
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
            datagrams: What was received so.
            begun: What `thinwire.ps.persistence.journal` says of the journal that goes on from
            here, if one does.
        """
        self._saver.put(
            version,
            {
                "core": core,
                "run_id": run_id,
                "limit": limit_of(self._run, core["stop_reason"]),
                "fingerprint": [list(row) for row in self._settings],
                "model": [[t.path, list(t.shape), t.dtype] for t in self._spec.tensors],
                "bytes_down": {str(worker): count for worker, count in bytes_down.items()},
                "reports": {f"{role}:{who}": text for (role, who), text in reports.items()},
                "datagrams": datagrams.to_dict(),
                **(begun or {}),
            },
        )

    def flush(self) -> None:
        """Wait until everything handed in is on disk.

        Raises:
            ConfigurationError: The disk refused.
        """
        try:
            self._saver.flush()
        except OSError as error:
            raise ConfigurationError(
                f"cannot write a checkpoint into {self.folder}: {error.strerror or error}. What "
                "was there before is as it was: make room on that disk, or let this user write "
                "there, and start the same command again."
            ) from error

    def _load(self) -> State | None:
        found = self._checkpoints.load_latest()
        if found is None:
            if self._checkpoints.num_skipped:
                raise ConfigurationError(self._all_damaged())
            return None
        _, state = found
        mine = messages.settings_of(self._settings)
        theirs = [pb.Setting(name=name, value=value) for name, value in state["fingerprint"]]
        if theirs[-1].name != mine[-1].name:  # an earlier version did not save it
            mine = mine[:-1]
        difference = messages.first_difference(mine, theirs) or messages.first_difference(
            messages.tensors_of(self._spec),
            [pb.Tensor(path=p, shape=s, dtype=d) for p, s, d in state["model"]],
        )
        if difference:
            raise ConfigurationError(
                f"--run_dir={self._run.run_dir} holds another run ({difference}); give this one "
                "another --run_dir, or --overwrite the old one."
            )
        return state

    @property
    def _settings(self) -> list[tuple[str, str]]:
        """What must be as it was: the run's fingerprint, and how the model is divided."""
        return [*fingerprint.fingerprint(self._run), ("nb_ps", str(self._run.nb_ps))]

    def _all_damaged(self) -> str:
        count = self._checkpoints.num_skipped
        return (
            f"{self.folder} holds {count} checkpoints, and all of them are damaged (the log says "
            "how). Put back a copy of that folder, or give --overwrite to begin this run anew."
        )
