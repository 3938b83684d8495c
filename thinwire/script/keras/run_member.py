"""Membership of a script's worker in a run, for one of the script's models."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from thinwire.script import interrupts
from thinwire.script.data.fit_counts import FitCounts
from thinwire.script.keras.assignments import Assignments
from thinwire.script.keras.catching_up import CatchUp
from thinwire.script.keras.fit_barriers import FitBarriers
from thinwire.script.session import RunOver, Session
from thinwire.script.settings import ScriptSettings
from thinwire.worker.client.control import Opening, RunHalted
from thinwire.worker.script import RECORD


class RunMember:
    """A model's place in the run: the state that all mechanisms of one model share.

    Attributes:
        model: The Keras model, or the several models that a loop trains together.
        settings: Settings of the script; None if the model trains alone.
        session: Session of the present phase; None before the first phase.
        barriers: Barriers with the other scripts; None before the first phase, and if the server
            has its model from flags.
        catch_up: The fits that a restarted script skips because the run has finished them.
        lock: Lock of the session: a TensorFlow thread exchanges while the script's thread joins or
            leaves.
        in_fit: True while a `fit` runs.
        in_loop: True after a training loop of the script has begun.
        assignments: The script's assignments to shared variables; used if optimizers step here too.
        has_left: True if this worker has left the run at the end of its last `fit`.
        has_place: True if this is the model that the run trains now, the script's newest. A script
            has one at a time.
        succeeds: True while `session` still belongs to the script's previous model, until this
            model's phase begins.
        fit_counts: Counters of the fits of all models of the script.
        num_before: Number of models that had this worker's place before this model.
    """

    def __init__(self, model: Any, settings: ScriptSettings | None) -> None:
        self.model, self.settings = model, settings
        self.session: Session | None = None
        self.barriers: FitBarriers | None = None
        self.catch_up = CatchUp()
        self.lock = threading.Lock()
        self.assignments = Assignments()
        self.in_fit = self.in_loop = self.has_left = False
        self.has_place = self.succeeds = False
        self.num_before = 0
        self.fit_counts = FitCounts()
        self._exchanges_before = 0

    @property
    def joined(self) -> Session:
        """The session; a session must exist."""
        if self.session is None:
            raise RuntimeError("the model has not joined a run yet")
        return self.session

    @property
    def present(self) -> Session | None:
        """The session; None if the run has ended or this model takes no part in the run now."""
        session = self.session
        is_absent = session is None or session.stopped or self.succeeds or self.has_left
        return None if is_absent else session

    @property
    def is_training(self) -> bool:
        """True if the run trains this model now, by a `fit` or a loop of the script."""
        is_present = self.present is not None and not self.catch_up.is_behind
        return is_present and (self.in_fit or self.in_loop)

    @property
    def own_settings(self) -> ScriptSettings:
        """The settings; the model must be distributed."""
        if self.settings is None:
            raise RuntimeError("the model trains alone")
        return self.settings

    @property
    def is_offered(self) -> bool:
        """True if the server gets its model and its optimizer from the workers."""
        return self.settings is not None and self.settings.run.model_is_offered

    @property
    def place(self) -> tuple[Sequence[str], int] | None:
        """The addresses of the run and this worker's number; None if the model trains alone."""
        settings = self.settings
        return None if settings is None else (settings.run.addresses, settings.worker().id_worker)

    @property
    def takes_part(self) -> bool:
        """True if this script is in the same `fit` as the other scripts, and the run continues."""
        return self.barriers is not None and not self.stopped and not self.catch_up.is_behind

    @property
    def meets_others(self) -> bool:
        """True if this script meets other scripts at the end of each epoch."""
        settings = self.settings
        return settings is not None and settings.run.nb_workers > 1 and self.takes_part

    @property
    def met_barriers(self) -> FitBarriers:
        """The barriers; the model must have met the other scripts."""
        if self.barriers is None:
            raise RuntimeError("the model has not met the other scripts yet")
        return self.barriers

    @property
    def is_chief(self) -> bool:
        """True if this worker is the chief of the run."""
        settings = self.settings
        return settings is not None and settings.worker().id_worker == RECORD.chief

    @property
    def takes_weights(self) -> bool:
        """True if the script's optimizers step on this worker and weights are exchanged."""
        return self.joined.takes_weights

    @property
    def stopped(self) -> bool:
        """True if the run has ended."""
        return self.session is not None and self.session.stopped

    @property
    def stop_reason(self) -> str:
        """The reason for the end of the run; empty while the run continues."""
        return "" if self.session is None else self.session.stop_reason

    @property
    def num_exchanges(self) -> int:
        """Number of exchanges begun, over all calls of `fit`."""
        count_before = self._exchanges_before
        return (
            count_before if self.session is None else max(count_before, self.session.part.core.step)
        )

    def go_on_as(self, session: Session) -> None:
        """Replace the session by the session of the next phase, which is not joined yet."""
        before, self.succeeds = self.session, False
        if before is not None:
            self._exchanges_before = self.num_exchanges
            before.close("done")
            if before.stopped:
                session.end_as(before)
        with self.lock:
            self.session = session

    def take_over(self, other: RunMember) -> None:
        """Take over this worker's place in the run from another model of the script."""
        interrupts.remove_listener(other._interrupt)
        self.session, self.barriers, self.catch_up = other.session, other.barriers, other.catch_up
        self.catch_up.go_to_next_model(other.joined.shared.variables)
        other.has_place, self.has_place, self.succeeds = False, True, True
        self.num_before = other.num_before + 1

    def join(self) -> None:
        """Join the run, or join again, and take over the server's weights."""
        with self.lock:
            session = self.joined
            if session.part.closing.is_set():  # `fit` was interrupted
                session.close("interrupted")
                session.renew()
            phase = None if self.barriers is None else self.barriers.phase
            if not session.stopped and self.catch_up.open(session, phase):
                interrupts.add_listener(self._interrupt)
            if session.part.run_id:  # without it the run has ended: the model keeps its weights
                session.assign()
                self.assignments.clear()

    def finish_rounds(self, session: Session) -> None:
        """Send the local steps that no exchange has sent yet."""
        with self.lock:
            if not session.stopped:
                session.flush()

    def close(self, cause: str = "done") -> None:
        """Leave the run; the model stays usable and may join again."""
        interrupts.remove_listener(self._interrupt)
        with self.lock:
            if self.session is not None:
                self.session.close(cause)

    def leave_at_end(self, failed: bool, message: str) -> None:
        """Leave the run at the end of the script."""
        if self.session is not None and not failed:
            self.finish_rounds(self.session)
        self.close("error" if failed else "done")

    def wait_for_others(self, where: str, changes: bool = False) -> Opening | None:
        """Wait at a barrier of this `fit` until all scripts have arrived.

        Args:
            where: Name of the barrier; `FitBarriers.wait` lists the names.
            changes: True if this script's model differs from the run's.

        Returns:
            The barrier's opening; None if the run has ended.
        """
        if self.stopped:
            return None
        if self.barriers is None or self.session is None:
            return Opening()
        opening = self.barriers.wait(where, changes)
        if isinstance(opening, Opening):
            return opening
        self.take_end(opening)
        return None

    def take_end(self, ended: RunHalted | None) -> None:
        """Record the end of the run; raise RunOver if another script's failure ended the run."""
        if ended is not None and self.session is not None:
            self.session.part.core.stopped = True
            self.session.part.core.stop_reason = ended.cause
            self.raise_if_broken(ended.cause, ended.message)

    def raise_if_broken(self, cause: str, message: str = "") -> None:
        """Raise RunOver if the failure of another script ended the run."""
        if FitBarriers.is_failure(cause):
            text = f"the run has ended ({cause}){f': {message}' if message else ''}"
            raise RunOver(text, cause)

    def _interrupt(self) -> None:
        if self.session is not None:
            self.session.part.interrupt()
