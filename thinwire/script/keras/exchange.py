"""The exchange of a step: gradients, or weights, go to the servers, and the new weights come back.

TensorFlow calls it within the graph of a step, in a thread of its own, where an exception would be
lost: what goes wrong is kept, and raised where Python is in charge again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from absl import logging

from thinwire.script.data.place import BatchParts, WorkerPlace
from thinwire.script.gradient_sgd import RATE_TOLERANCE
from thinwire.script.keras.checks import check_rate_change
from thinwire.script.keras.held_weights import assigned_by_script, changed_by_script
from thinwire.script.keras.joining import Joining
from thinwire.script.keras.loops import LoopSteps
from thinwire.script.keras.optimizers import ScriptOptimizers
from thinwire.script.keras.run_member import RunMember
from thinwire.script.keras.step import ExchangeStep
from thinwire.script.keras.traffic import EpochTraffic
from thinwire.script.session import Session, StepInfo
from thinwire.worker.core.messages import ScriptFigures
from thinwire.worker.script import RECORD

if TYPE_CHECKING:
    from thinwire.ops.types import Float32, Int64


class StepExchange:
    """Exchanges for the steps of one model.

    Attributes:
        last: What became of the newest step; None before the first.
        traffic: What the steps of the present epoch have sent and received.
        num_calls: Of `exchange` in the present `fit`, those after its end included.

    Args:
        member: The model's place in the run.
        optimizers: Of the script.
        joining: Joins again behind a `fit`.
        loop_steps: Of a loop of the script's own.
    """

    def __init__(
        self,
        member: RunMember,
        optimizers: ScriptOptimizers,
        joining: Joining,
        loop_steps: LoopSteps,
    ) -> None:
        self.last: StepInfo | None = None
        self.traffic = EpochTraffic()
        self.num_calls = 0
        self._member, self._optimizers = member, optimizers
        self._joining, self._loop_steps = joining, loop_steps
        self._failure: Exception | None = None
        self._num_batches = 0  # in the present `fit`
        self._rate_factor = 1.0  # this worker's learning rate over the run's
        self._has_reported_end = False  # of the run, to a loop

    def begin_fit(self) -> None:
        """Forget the `fit` before."""
        self._failure, self.num_calls, self._num_batches = None, 0, 0

    def begin_epoch(self) -> None:
        """Count what is sent and received anew."""
        self.traffic = EpochTraffic()

    def _parts_of_batch(self, repeats: bool) -> int:
        """Return how much of the script's batches a mini-batch is: the next, or again the last."""
        member = self._member
        if not repeats:
            self._num_batches += 1
        parts = self._joining.data.parts if member.in_fit else self._parts_in_loop
        return parts.of_step(self._num_batches - 1)

    @functools.cached_property
    def _parts_in_loop(self) -> BatchParts:
        return BatchParts.alike(WorkerPlace.of(self._member.own_settings.run, 1).in_loop())

    @property
    def has_failed(self) -> bool:
        """Whether something went wrong that is yet to be raised."""
        return self._failure is not None

    def raise_failure(self) -> None:
        """Raise what went wrong in an exchange, where TensorFlow would have swallowed it."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def exchange(
        self,
        step: ExchangeStep,
        repeats: bool,
        in_turn: bool,
        values: Float32,
        rows: int,
        has_stepped: bool,
        loss: Float32,
        held: Float32,
        has_assigned: bool,
        statistics: Float32,
        rate: float,
        scale: float,
        sparse: Sequence[int],
        *touched: Any,
    ) -> tuple[Float32, Float32, np.float32, np.float32, Int64]:
        """Step; called by TensorFlow.

        Args:
            step: Of which optimizer.
            repeats: Whether its examples were counted before.
            in_turn: Whether other optimizers of a loop may step before weights are exchanged.
            values: [num_parameters] float32 gradient, or weights; a view into TensorFlow's own.
            rows: Examples in the mini-batch.
            has_stepped: Whether the optimizer counts it, where it steps on this worker.
            loss: [1] float32 its mean loss; [0] where it is unknown.
            held: [num_parameters] float32 weights of the model where `values` are a gradient; else
                empty.
            has_assigned: Whether the script has set weights itself, where `values` are weights.
            statistics: [m] float32 moving statistics after it.
            rate: The optimizer's learning rate; a callback may have changed it.
            scale: What the loss was multiplied by; 0: nothing, or the optimizer unscales itself.
            sparse: Numbers of the variables whose gradients name their rows.
            touched: Those rows, of one variable each, in any order and repeated.

        Returns:
            weights [num_parameters], statistics [m], learning rate, loss scale and the counts [k]
            of all schedules to go on from.
        """
        member, optimizers = self._member, self._optimizers
        session, is_offered = member.joined, member.is_offered
        self.num_calls += 1
        if (change := self._join_loop()) is not None:
            held = held + change if held.size else held
            values = values + change if session.takes_weights else values
        with member.lock:
            if in_turn and not self._loop_steps.is_due(step):
                return self._unchanged(session, values, statistics, rate, scale)
            # A step behind a failure may be the rest of several in one execution, and one of a fit
            # that is passed over has no part in the run. A script may have set stop_training before
            # a batch, which Keras then still trains.
            if not (member.in_fit and (self.has_failed or member.catch_up.is_behind)):
                parts = self._parts_of_batch(repeats)
                figures = ScriptFigures(
                    learning_rate=self._set_rate(step, float(rate)),
                    loss_scale=float(scale),
                    overflow=bool(scale) and not np.isfinite(values).all(),
                    optimizer=0 if session.takes_weights else step.number,
                    repeats_batch=repeats,
                    batch_parts=parts if has_stepped else 0,
                    touched={
                        int(number): np.unique(each)
                        for number, each in zip(sparse, touched, strict=True)
                    },
                )
                own = np.array(values) if session.keeps_values else values
                rows = int(rows)
                mean_loss = float(loss[0]) if len(loss) else None
                given = own, rows, mean_loss, statistics, float(rate), figures
                self._try_step(step, held, has_assigned, *given)
            if not is_offered:
                step.known_rate = session.part.core.learning_rate * self._rate_factor
            return (
                session.weights.copy(),
                session.means.copy(),
                np.float32(rate if is_offered else step.known_rate),
                np.float32(session.loss_scale or scale),
                optimizers.advance(session),
            )

    def sit_out(self, session: Session, batch_parts: int) -> None:
        """Take part in a round with nothing, which leaves the others' mean as it is.

        Args:
            session: Of the run.
            batch_parts: Parts of the script's batch that the workers with rows do not count.
        """
        optimizers, takes_weights = self._optimizers, session.takes_weights
        with self._member.lock:
            if session.stopped:
                return
            for number in optimizers.sequence[:1] if takes_weights else optimizers.sequence:
                held = session.variables.read()
                nothing = held if takes_weights else np.zeros_like(held)
                step = optimizers.stepping[number]
                number = 0 if takes_weights else number
                figures = ScriptFigures(
                    loss_scale=session.loss_scale, optimizer=number, batch_parts=batch_parts
                )
                means = session.means.copy()
                self._try_step(step, held, True, nothing, 0, None, means, step.known_rate, figures)
                session.assign()

    def end_round(self, session: Session) -> None:
        """Exchange the local steps that no exchange has taken along, and go on from the answer."""
        self._member.finish_rounds(session)
        with self._member.lock:
            if not session.stopped:
                session.assign()
                self._optimizers.start(session)

    def _unchanged(
        self, session: Session, values: Float32, statistics: Float32, rate: float, scale: float
    ) -> tuple[Float32, Float32, np.float32, np.float32, Int64]:
        """Return what a local step goes on from that no exchange follows."""
        own = np.array(values), np.array(statistics)
        counts = self._optimizers.advance(session)
        return (*own, np.float32(rate), np.float32(scale), counts)

    def _set_rate(self, step: ExchangeStep, rate: float) -> float | None:
        """Return a rate that the script has set since the last push; the PS then steps with it."""
        member = self._member
        if not member.is_offered or member.takes_weights:
            return None
        clock, schedule = self._optimizers.clock_of(step), step.own_schedule
        if clock is not None and schedule is not None:
            return clock.read(schedule)
        if rate == np.float32(step.known_rate):
            return None
        step.known_rate = rate
        return rate

    def _try_step(
        self,
        step: ExchangeStep,
        held: Float32,
        has_assigned: bool,
        values: Float32,
        rows: int,
        loss: float | None,
        statistics: Float32,
        rate: float,
        figures: ScriptFigures,
    ) -> None:
        """Step from the weights [num_parameters] that the model holds; keep what goes wrong.

        What the script has changed of them itself travels beside the step.
        """
        member, session = self._member, self._member.joined
        try:
            if not session.stopped:
                change = self._changed(session, held, has_assigned)
                if change is not None:
                    figures = dataclasses.replace(figures, change=change)
                is_new = abs(rate - step.known_rate) > RATE_TOLERANCE * abs(step.known_rate)
                if is_new and not member.is_offered:
                    self._scale_to_rate(session, rate)
                factor = self._rate_factor
                self.last = session.step(values, rows, loss, statistics, factor, figures)
                self.traffic.add(self.last)
            if session.stopped:
                member.raise_if_broken(session.stop_reason)
                self._report_end()
        except Exception as error:
            self.keep(error)
            if not member.in_fit:
                raise
        finally:
            if self._failure is not None or session.stopped:
                member.model.stop_training = True

    def _changed(self, session: Session, held: Float32, has_assigned: bool) -> Float32 | None:
        """Return by how much the script has changed weights itself; see `exchange`."""
        member = self._member
        if not session.takes_weights:
            return changed_by_script(session, held, member.model.name)
        change = member.assignments.take(session.shared.variables) if has_assigned else None
        return assigned_by_script(session, change)

    def _join_loop(self) -> Float32 | None:
        """Join for a step that was traced before the `fit` that this worker has left; else nothing.

        Returns:
            As `Joining.join_loop`.
        """
        try:
            return self._joining.join_loop()
        except Exception as error:
            self.keep(error)
            raise

    def keep(self, error: Exception) -> None:
        """Keep what TensorFlow would hide; `fit` raises it before its next batch."""
        self._failure = self._failure or error
        if not self._member.in_fit:
            RECORD.fail(error)

    def _report_end(self) -> None:
        """Name, once, that steps of a loop change nothing any more."""
        member = self._member
        if member.in_loop and not member.in_fit and not self._has_reported_end:
            self._has_reported_end = True
            logging.warning(
                "the run has ended (%s): further steps of %r change nothing; a loop can leave by "
                "optimizer.thinwire.stopped",
                member.stop_reason or "interrupted",
                member.model.name,
            )

    def _scale_to_rate(self, session: Session, rate: float) -> None:
        """Step with a rate that the script has set, where the server has its own."""
        factor = rate / session.part.core.learning_rate
        if abs(factor - 1) <= RATE_TOLERANCE:
            factor = 1.0
        if factor != self._rate_factor:
            check_rate_change(rate, session.settings.run.method)
        self._rate_factor = factor
