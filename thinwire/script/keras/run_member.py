"""Membership of a worker in a training run, for one model of the worker's script."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

from thinwire.proto.barriers import Point
from thinwire.script import interrupts
from thinwire.script.data.fit_counts import FitCounts
from thinwire.script.keras.assignments import Assignments
from thinwire.script.keras.catching_up import CatchUp
from thinwire.script.keras.fit_barriers import FitBarriers
from thinwire.script.member import Event, ScriptMember, Standing, Use
from thinwire.script.session import Session
from thinwire.script.settings import ScriptSettings
from thinwire.script.steps import RunOver
from thinwire.worker.client.control import Opening, RunHalted
from thinwire.worker.script import RECORD


class RunMember:
    """Membership of one model in a run, which all modules that train the model share.

    A phase is a part of the run in which the model and its optimizers stay the same.

    Attributes:
        model: The Keras model, or the several models that a training loop trains together.
        settings: Settings of the script; None if the model trains outside of a run.
        state: State machine of the model's part in the run.
        session: Session with the servers in the present phase of the run; None before the first
            phase. While the state is SUCCEEDING, it is the session of the script's former model.
        barriers: Barriers with the other workers' scripts; None before the first phase of the run,
            and if flags define the server's model.
        catch_up: The calls of `fit` that a restarted script skips because the run has completed
            them.
        lock: Lock of the session with the servers: a TensorFlow thread uses the session while the
            script's thread may join or leave the run.
        assignments: Record of the script's own assignments to shared variables, only used if
            optimizers step on this worker.
        fit_counts: Counters of the calls of `fit` of all models of the script.
        num_before: Number of models that the script has trained in the run before the present
            model.
    """

    def __init__(self, model: Any, settings: ScriptSettings | None) -> None:
        self.model, self.settings = model, settings
        self.state = ScriptMember(self.is_offered)
        self.session: Session | None = None
        self.barriers: FitBarriers | None = None
        self.catch_up = CatchUp()
        self.lock = threading.Lock()
        self.assignments = Assignments()
        self.num_before = 0
        self.fit_counts = FitCounts()
        self._exchanges_before = 0

    @property
    def in_fit(self) -> bool:
        """True while a call of the model's `fit` runs."""
        return self.state.use.is_fit

    @property
    def in_loop(self) -> bool:
        """True after a training loop of the script's own has begun."""
        return self.state.use.is_loop

    @property
    def has_left(self) -> bool:
        """True if this worker has left the run at the end of its last `fit`."""
        return self.state.standing in (Standing.LEFT, Standing.LEFT_BEHIND)

    @property
    def has_place(self) -> bool:
        """True if the run trains this model now, and not a later model of the script."""
        return self.session is not None and self.state.standing is not Standing.REPLACED

    @property
    def is_behind(self) -> bool:
        """True if the run is in a later phase than this script."""
        return self.state.is_behind

    @property
    def joined(self) -> Session:
        """The session with the servers; raises an error if the model has not joined the run yet."""
        if self.session is None:
            raise RuntimeError("the model has not registered with a run of Thinwire yet")
        return self.session

    @property
    def present(self) -> Session | None:
        """The session with the servers; None if the run does not train this model at present."""
        is_joined = self.state.standing in (Standing.JOINED, Standing.PASSING_OVER)
        return self.session if is_joined and not self.stopped else None

    @property
    def is_training(self) -> bool:
        """True if the run trains this model now, in a `fit` or in a training loop of the script."""
        is_joined = self.state.standing is Standing.JOINED and self.state.use is not Use.IDLE
        return is_joined and not self.stopped

    @property
    def own_settings(self) -> ScriptSettings:
        """The settings of the script; raises an error if the model trains outside of a run."""
        if self.settings is None:
            raise RuntimeError("the model trains in this process alone, without a run of Thinwire")
        return self.settings

    @property
    def is_offered(self) -> bool:
        """True if the server gets its model and its optimizer from the workers' scripts."""
        return self.settings is not None and self.settings.run.model_is_offered

    @property
    def place(self) -> tuple[Sequence[str], int] | None:
        """The servers' addresses and this worker's number; None for a model outside of a run."""
        settings = self.settings
        return None if settings is None else (settings.run.addresses, settings.worker().id_worker)

    @property
    def takes_part(self) -> bool:
        """True if the run continues and this script is not in an earlier `fit` than the run."""
        return self.barriers is not None and not self.stopped and not self.is_behind

    @property
    def meets_others(self) -> bool:
        """True if this script waits for the other workers' scripts at the end of each epoch."""
        settings = self.settings
        return settings is not None and settings.run.nb_workers > 1 and self.takes_part

    @property
    def met_barriers(self) -> FitBarriers:
        """The barriers with other workers' scripts; raises an error before the first barrier."""
        if self.barriers is None:
            raise RuntimeError("fit has not reached the barrier with the other scripts yet")
        return self.barriers

    @property
    def is_chief(self) -> bool:
        """True if this worker is the chief, the only worker that writes the script's files."""
        settings = self.settings
        return settings is not None and settings.worker().id_worker == RECORD.chief

    @property
    def takes_weights(self) -> bool:
        """True if optimizers step on this worker, which pushes weights instead of gradients."""
        return self.joined.takes_weights

    @property
    def stopped(self) -> bool:
        """True if the training run has ended."""
        return self.session is not None and self.session.stopped

    @property
    def stop_reason(self) -> str:
        """The reason for the end of the run; an empty text while the run continues."""
        return "" if self.session is None else self.session.stop_reason

    @property
    def num_exchanges(self) -> int:
        """Number of exchanges with the servers that have begun, over all calls of `fit`."""
        count_before = self._exchanges_before
        return (
            count_before if self.session is None else max(count_before, self.session.part.core.step)
        )

    def go_on_as(self, session: Session) -> None:
        """Replace the session by a session of the run's next phase, which has not joined it yet."""
        before = self.session
        if before is not None:
            self._exchanges_before = self.num_exchanges
            before.close("done")
            if before.stopped:
                session.end_as(before)
        with self.lock:
            self.session = session

    def take_over(self, other: RunMember) -> None:
        """Let the run train this model instead of the script's previous model.

        Args:
            other: Membership of the model that the run trained before.
        """
        interrupts.remove_listener(other._interrupt)
        self.session, self.barriers, self.catch_up = other.session, other.barriers, other.catch_up
        self.catch_up.go_to_next_model(other.joined.shared.variables)
        other.state.receive(Event.IS_REPLACED)
        self.state.receive(Event.SUCCEEDS)
        self.num_before = other.num_before + 1

    def join(self) -> None:
        """Join the run, or join it again, and load the server's weights into the model."""
        with self.lock:
            session = self.joined
            if session.part.closing.is_set():  # a signal such as Ctrl-C interrupted `fit`
                session.close("interrupted")
                session.renew()
            phase = None if self.barriers is None else self.barriers.phase
            if not session.stopped and self.catch_up.open(session, phase):
                interrupts.add_listener(self._interrupt)
            # the run id is empty if the run has ended, and the model then keeps its weights
            if session.part.run_id:
                session.assign()
                self.assignments.clear()

    def finish_rounds(self, session: Session) -> None:
        """Push the results of local steps that no exchange has sent to the servers yet."""
        with self.lock:
            if not session.stopped:
                session.part.flush()

    def close(self, cause: str = "done") -> None:
        """Leave the run; the model stays usable and may join the run again."""
        interrupts.remove_listener(self._interrupt)
        with self.lock:
            if self.session is not None:
                self.session.close(cause)

    def leave_at_end(self, failed: bool, message: str) -> None:
        """Leave the run at the script's end; first push local steps if the script succeeded."""
        if self.session is not None and not failed:
            self.finish_rounds(self.session)
        self.close("error" if failed else "done")

    def wait_for_others(self, point: Point, changes: bool = False) -> Opening | None:
        """Wait at a barrier of the current `fit` until all workers' scripts have reached it.

        Args:
            point: Point of the current `fit`.
            changes: True if this script's model differs from the model that the run trains.

        Returns:
            Description of how the barrier opened: whether a new phase of the run begins, and
            whether this script offers its model for that phase. None if the run has ended.
        """
        if self.stopped:
            return None
        if self.barriers is None or self.session is None:
            return Opening()
        opening = self.barriers.wait(point, changes)
        if isinstance(opening, Opening):
            return opening
        self.take_end(opening)
        return None

    def take_end(self, ended: RunHalted | None) -> None:
        """Record the end of the run; raise RunOver if another worker's script failed.

        Args:
            ended: Description of the run's end, as a barrier returned it; None if the run
                continues.
        """
        if ended is not None and self.session is not None:
            self.session.part.core.stopped = True
            self.session.part.core.stop_reason = ended.cause
            self.raise_if_broken(ended.cause, ended.message)

    def raise_if_broken(self, cause: str, message: str = "") -> None:
        """Raise RunOver if the failure of another worker's script ended the run."""
        if FitBarriers.is_failure(cause):
            text = f"the run has ended ({cause}){f': {message}' if message else ''}"
            raise RunOver(text, cause)

    def _interrupt(self) -> None:
        if self.session is not None:
            self.session.part.interrupt()
