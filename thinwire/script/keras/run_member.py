"""A script's worker as a member of a run, on behalf of one of the script's models."""

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
        model: The Keras model, or several that a loop trains together.
        settings: Of the script; None: the model trains alone.
        session: Of the present phase; None before the first one.
        barriers: With the other scripts; None before the first phase, and where the server has its
            model from flags.
        catch_up: What this script has passed over.
        lock: Of the session: TensorFlow's thread exchanges, the script's joins and leaves.
        in_fit: Whether a `fit` is under way.
        in_loop: Whether a loop of the script's own has begun.
        assignments: Of the script to shared variables, where it steps them as well.
        has_left: Whether this worker has left the run at the end of its last `fit`.
        has_place: Whether of the script's models it is this one that the run has, the newest.
        succeeds: Whether `session` is another model's, until this one's phase begins.
        fit_counts: Of the script's fits, those of its other models included.
        num_before: How often the script had gone on from one of its models to another, up to this.
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
        """The session, which there must be."""
        if self.session is None:
            raise RuntimeError("the model has not joined a run yet")
        return self.session

    @property
    def present(self) -> Session | None:
        """The session, unless the run has ended, or this model has no part in it now."""
        session = self.session
        is_absent = session is None or session.stopped or self.succeeds or self.has_left
        return None if is_absent else session

    @property
    def is_training(self) -> bool:
        """Whether the run trains this model now, by a `fit` or a loop of its script."""
        is_here = self.present is not None and not self.catch_up.is_behind
        return is_here and (self.in_fit or self.in_loop)

    @property
    def own_settings(self) -> ScriptSettings:
        """The settings, which there must be."""
        if self.settings is None:
            raise RuntimeError("the model trains alone")
        return self.settings

    @property
    def is_offered(self) -> bool:
        """Whether the server has its model, and its optimizer, from the workers."""
        return self.settings is not None and self.settings.run.model_is_offered

    @property
    def place(self) -> tuple[Sequence[str], int] | None:
        """The addresses of the run and this worker's number; None: the model trains alone."""
        settings = self.settings
        return None if settings is None else (settings.run.addresses, settings.worker().id_worker)

    @property
    def takes_part(self) -> bool:
        """Whether this script's fits are those that all scripts are in."""
        return self.barriers is not None and not self.stopped and not self.catch_up.is_behind

    @property
    def meets_others(self) -> bool:
        """Whether other scripts are met at the ends of this script's epochs."""
        settings = self.settings
        return settings is not None and settings.run.nb_workers > 1 and self.takes_part

    @property
    def met_barriers(self) -> FitBarriers:
        """The barriers, which there must be."""
        if self.barriers is None:
            raise RuntimeError("the model has not met the other scripts yet")
        return self.barriers

    @property
    def is_chief(self) -> bool:
        """Whether this worker is the chief of the run."""
        settings = self.settings
        return settings is not None and settings.worker().id_worker == RECORD.chief

    @property
    def takes_weights(self) -> bool:
        """Whether the script's optimizers step here, and weights are exchanged, not gradients."""
        return self.joined.takes_weights

    @property
    def stopped(self) -> bool:
        """Whether the run has ended."""
        return self.session is not None and self.session.stopped

    @property
    def stop_reason(self) -> str:
        """Why it ended; empty while it goes on."""
        return "" if self.session is None else self.session.stop_reason

    @property
    def num_exchanges(self) -> int:
        """Exchanges begun, over all calls of `fit`."""
        known = self._exchanges_before
        return known if self.session is None else max(known, self.session.part.core.step)

    def go_on_as(self, session: Session) -> None:
        """Leave the phase before, if there was one, for another, which is yet to be joined."""
        before, self.succeeds = self.session, False
        if before is not None:
            self._exchanges_before = self.num_exchanges
            before.close("done")
            if before.stopped:
                session.end_as(before)
        with self.lock:
            self.session = session

    def take_over(self, other: RunMember) -> None:
        """Take this worker's place in the run over from another model of the script."""
        interrupts.remove_listener(other._interrupt)
        self.session, self.barriers, self.catch_up = other.session, other.barriers, other.catch_up
        self.catch_up.go_to_next_model(other.joined.shared.variables)
        other.has_place, self.has_place, self.succeeds = False, True, True
        self.num_before = other.num_before + 1

    def join(self) -> None:
        """Join or join again, and take over the server's weights."""
        with self.lock:
            session = self.joined
            if session.part.closing.is_set():  # `fit` was interrupted
                session.close("interrupted")
                session.renew()
            phase = None if self.barriers is None else self.barriers.phase
            if not session.stopped and self.catch_up.open(session, phase):
                interrupts.add_listener(self._interrupt)
            if session.part.run_id:  # else the run was over, and the model keeps its own weights
                session.assign()
                self.assignments.clear()

    def finish_rounds(self, session: Session) -> None:
        """Send the local steps that no exchange has taken along."""
        with self.lock:
            if not session.stopped:
                session.flush()

    def close(self, cause: str = "done") -> None:
        """Leave the run; the model stays usable, and may join again."""
        interrupts.remove_listener(self._interrupt)
        with self.lock:
            if self.session is not None:
                self.session.close(cause)

    def leave_at_end(self, failed: bool, message: str) -> None:
        """Leave the run when the script has ended."""
        del message
        if self.session is not None and not failed:
            self.finish_rounds(self.session)
        self.close("error" if failed else "done")

    def wait_for_others(self, where: str, changes: bool = False) -> Opening | None:
        """Wait until all scripts have come to a barrier of this `fit`.

        Args:
            where: Which; see `FitBarriers.wait`.
            changes: Whether this script's model is another one than the run's.

        Returns:
            None: the run has ended.
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
        """Note the end of the run, if it has come; raise one that another script has spoiled."""
        if ended is not None and self.session is not None:
            self.session.part.core.stopped = True
            self.session.part.core.stop_reason = ended.cause
            self.raise_if_broken(ended.cause, ended.message)

    def raise_if_broken(self, cause: str, message: str = "") -> None:
        """Raise the end of a run that another script has spoiled."""
        if FitBarriers.is_failure(cause):
            text = f"the run has ended ({cause}){f': {message}' if message else ''}"
            raise RunOver(text, cause)

    def _interrupt(self) -> None:
        if self.session is not None:
            self.session.part.interrupt()
