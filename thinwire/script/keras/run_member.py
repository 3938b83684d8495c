"""Membership of a worker in a training run, for one model of the worker's script."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from absl import logging

from thinwire.runtime.run.settings import RETURNED_EARLY, SCRIPT_FAILED
from thinwire.script import interrupts
from thinwire.script.backends.present import backend
from thinwire.script.data.data import Shared
from thinwire.script.data.fit_counts import FitCounts
from thinwire.script.fit_barriers import FitBarriers
from thinwire.script.kept_state import KeptState
from thinwire.script.keras.catching_up import CatchUp
from thinwire.script.keras.clock import RunClock
from thinwire.script.keras.held_weights import Assignments
from thinwire.script.keras.kept_optimizer import KerasState
from thinwire.script.keras.step import ExchangeStep
from thinwire.script.member import Event, ScriptMember, Standing, Use
from thinwire.script.session import Session
from thinwire.script.settings import ScriptSettings
from thinwire.script.steps import RunOver
from thinwire.worker.client.control import RunHalted
from thinwire.worker.held_files import lift_hold
from thinwire.worker.script import RECORD

if TYPE_CHECKING:
    from thinwire.ops.types import Int64

_Answer = TypeVar("_Answer")


@dataclasses.dataclass(eq=False)
class RunMember:
    """Membership of one model in a run, which all modules that train the model share.

    A phase is a part of the run in which the model and its optimizers stay the same.

    Attributes:
        model: The Keras model, or the several models that a training loop trains together.
        settings: Settings of the script; None if the model trains outside of a run.
        num_train: Number of rows of the whole training set, from `distribute`; None if the script
            has not given it.
        stepping: Objects that replace the steps of the optimizers that train in the run, in the
            order of the offer (the model's description for the PS).
        sequence: Positions in `stepping`, in the order of the optimizers' calls in one train_step.
        state: State machine of the model's part in the run.
        session: Session with the servers in the present phase of the run; None before the first
            phase. While the state is SUCCEEDING, it is the session of the script's former model.
        barriers: Barriers with the other workers' scripts; None before the first phase of the run,
            and if flags define the server's model.
        catch_up: The calls of `fit` that a restarted script skips because the run has completed
            them.
        lock: Lock of the session with the servers: a TensorFlow thread uses the session while the
            script's thread may join or leave the run.
        kept: Checkpoints of the optimizers that step on this worker; None if none are written.
        assignments: Record of the script's own assignments to shared variables, only used if
            optimizers step on this worker.
        data: This worker's training data for the current `fit`; empty for the script's own training
            loop.
        epoch: Number of the current training epoch. The first epoch of a `fit` has the number
            `initial_epoch`.
        ends_after: Number of epochs after which the current `fit` ends early; 0 if it ends
            immediately; None if it does not end early.
        fit_counts: Counters of the calls of `fit` of all models of the script.
        num_before: Number of models that the script has trained in the run before the present
            model.
    """

    model: Any
    settings: ScriptSettings | None
    num_train: int | None = None
    stepping: list[ExchangeStep] = dataclasses.field(default_factory=list)
    sequence: list[int] = dataclasses.field(default_factory=list)
    state: ScriptMember = dataclasses.field(init=False)
    session: Session | None = None
    barriers: FitBarriers | None = None
    catch_up: CatchUp = dataclasses.field(default_factory=CatchUp)
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    kept: KeptState | None = None
    assignments: Assignments = dataclasses.field(default_factory=Assignments)
    data: Shared = dataclasses.field(default_factory=lambda: Shared({}))
    epoch: int = 0
    ends_after: int | None = None
    fit_counts: FitCounts = dataclasses.field(default_factory=FitCounts)
    num_before: int = 0
    _exchanges_before: int = 0

    def __post_init__(self) -> None:
        self.state = ScriptMember(self.is_offered)
        if self.settings is not None:
            self.kept = KeptState.of(self.settings)

    @property
    def in_fit(self) -> bool:
        """True while a call of the model's `fit` runs."""
        return self.state.use.is_fit

    @property
    def in_loop(self) -> bool:
        """True after a training loop of the script's own has begun."""
        return self.state.use.is_loop

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
    def writes_files(self) -> bool:
        """True if this worker writes the script's files; only one worker of a run writes them."""
        return self.is_chief or not self.is_offered

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
        count = 0 if self.session is None else self.session.part.core.step
        return max(self._exchanges_before, count)

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

    def join(self) -> Event:
        """Join or rejoin the run; load the server's weights, loss scale and batch counts.

        Returns:
            The result for the state machine: JOINED, JOINED_BEHIND or HALTED.
        """
        is_behind = False
        with self.lock:
            session = self.joined
            if session.part.closing.is_set():  # a signal such as Ctrl-C interrupted `fit`
                session.close("interrupted")
                session.renew()
            phase = None if self.barriers is None else self.barriers.phase
            if not session.stopped:
                is_behind = not self.catch_up.open(session, phase)
            if not (is_behind or session.stopped):
                interrupts.add_listener(self.interrupt)
            # the run id is empty if the run has ended, and the model then keeps its weights
            if session.part.run_id:
                session.assign()
                self.assignments.clear()
        stepping = [step.inner for step in self.stepping]
        if is_behind and not session.stopped:
            if self.state.standing is Standing.OPENING:
                logging.warning("skipping this call of fit, which the run has already completed")
            self.ends_after, self.model.stop_training = 0, True
            self.catch_up.forget_states(stepping)
        else:
            self.catch_up.remember_states(stepping)
        self.start_clocks()
        if session.stopped:
            return Event.HALTED
        if is_behind:
            return Event.JOINED_BEHIND
        if self.barriers is not None:
            lift_hold()
        return Event.JOINED

    def stop_fit(self, after: int) -> None:
        """End this `fit` after `after` epochs, because another worker's script stopped its `fit`.

        The method `stop_fit` may be called from any thread.
        """
        self.ends_after = after
        if self.in_fit and self.epoch >= after:
            self.model.stop_training = True

    def keep_state(self, at_end: bool = False) -> None:
        """Write a checkpoint of the optimizers that step on this worker, if one is due.

        Args:
            at_end: True at the end of a `fit`. A checkpoint is then due if the optimizers have
                taken a step since the last checkpoint.
        """
        if self.kept is not None and self.session is not None:
            if not self.kept.is_due(self.session, at_end):
                return
            backend().synchronise(self.model)
            with self.lock:
                self.kept.save(
                    self.session, [KerasState(step.optimizer) for step in self.stepping], at_end
                )

    @property
    def clocks(self) -> list[RunClock | None]:
        """For each optimizer, the run's batch count for its rate schedule; None: no schedule."""
        return [step.clock for step in self.stepping]

    def advance_clocks(self) -> Int64:
        """Return the batch counts at which learning-rate schedules are evaluated after an exchange.

        Returns:
            [k] int64 counts of the k optimizers in `stepping`; 0 for an optimizer without a clock.
        """
        for number, clock in enumerate(self.clocks):
            count = self.joined.part.schedule_count(number)
            if clock is not None and count is not None:
                clock.count = count
        return np.array([0 if clock is None else clock.count for clock in self.clocks], np.int64)

    def start_clocks(self) -> None:
        """Set the rate schedules' batch counts and the loss scale to the run's after a join."""
        self.advance_clocks()
        for step in self.stepping:
            if step.clock is not None:
                step.clock.go_on(step.clock.count)
            step.assign_scale(self.joined.part.core.loss_scale)

    def finish_rounds(self, session: Session) -> None:
        """Push the results of local steps that no exchange has sent to the servers yet."""
        with self.lock:
            if not session.stopped:
                session.part.flush()

    def close(self, cause: str = "done") -> None:
        """Leave the run; the model stays usable and may join the run again."""
        interrupts.remove_listener(self.interrupt)
        with self.lock:
            if self.session is not None:
                self.session.close(cause)

    def leave_at_end(self, failed: bool, message: str) -> None:
        """Leave the run at the script's end; first push local steps if the script succeeded."""
        if self.session is not None and not failed:
            self.finish_rounds(self.session)
        self.close("error" if failed else "done")

    def until_end(self, wait: Callable[[], _Answer]) -> _Answer | None:
        """Return what a wait at the barriers returns; None if the run has ended, which is recorded.

        Raises:
            RunOver: The failure of another worker's script ended the run.
        """
        try:
            return wait()
        except RunHalted as ended:
            self.take_end(ended)
            return None

    def take_end(self, ended: RunHalted) -> None:
        """Record the end of the run; raise RunOver if another worker's script failed."""
        core = self.joined.part.core
        core.stopped, core.stop_reason = True, ended.cause
        self.raise_if_broken(ended.cause, ended.message)

    def raise_if_broken(self, cause: str, message: str = "") -> None:
        """Raise RunOver if the failure of another worker's script ended the run."""
        if cause in (SCRIPT_FAILED, RETURNED_EARLY):
            raise RunOver(str(RunHalted(cause, message)), cause)

    def interrupt(self) -> None:
        """End a wait of the present session, because a signal interrupts this process."""
        if self.session is not None:
            self.session.part.interrupt()
