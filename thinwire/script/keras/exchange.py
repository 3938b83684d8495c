"""Pushes the gradients or weights of a step to the servers, and pulls the new weights.

TensorFlow and JAX call the exchange from the compiled code of a step, where an exception would be
lost. So an error of the exchange with the servers is stored and raised
again in the script's thread.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
from absl import logging

from thinwire.ops.optimizers.described import own_schedule
from thinwire.ops.push_head import PushHead
from thinwire.script.data.place import BatchParts, WorkerPlace
from thinwire.script.gradient_sgd import RATE_TOLERANCE
from thinwire.script.keras.checks import check_rate_change
from thinwire.script.keras.loops import LoopSteps
from thinwire.script.keras.phases import Phases
from thinwire.script.keras.run_member import RunMember
from thinwire.script.keras.step import ExchangeStep, StepAnswer, StepValues
from thinwire.script.own_changes import assigned_by_script, changed_by_script
from thinwire.script.session import Session
from thinwire.script.steps import EpochTraffic, StepInfo
from thinwire.worker.core.messages import ScriptFigures
from thinwire.worker.core.worker_round import MiniBatch
from thinwire.worker.script import RECORD

if TYPE_CHECKING:
    from thinwire.ops.types import Float32


class StepExchange:
    """Pushes gradients or weights of one model, and pulls new weights, in each training step.

    Attributes:
        last: Result of the newest exchange with the servers; None before the first step.
        traffic: Bytes that this worker sent and received, and its staleness, in the current
            training epoch.
        num_calls: Number of calls of `exchange` since the newest `fit` began, including calls after
            the end of this `fit`.

    Args:
        member: Membership of the model in a run, which holds the script's settings, the session
            with the servers, and the barriers with other workers' scripts.
        phases: Object that joins the run again for a training loop that follows a `fit`.
        loop_steps: Steps of the optimizers in a training loop that the script writes itself.
    """

    def __init__(self, member: RunMember, phases: Phases, loop_steps: LoopSteps) -> None:
        self.last: StepInfo | None = None
        self.traffic = EpochTraffic()
        self.num_calls = 0
        self._member, self._phases, self._loop_steps = member, phases, loop_steps
        self._failure: Exception | None = None
        self._num_batches = 0  # number of mini-batches in the current call of `fit`
        self._rate_factor = 1.0  # this worker's learning rate divided by the server's
        self._has_reported_end = False  # True once a training loop has logged the end of the run

    def begin_fit(self) -> None:
        """Delete a previous `fit`'s stored error; set the exchange and batch counts to zero."""
        self._failure, self.num_calls, self._num_batches = None, 0, 0

    def begin_epoch(self) -> None:
        """Set the counts of bytes and staleness to zero for a new epoch."""
        self.traffic = EpochTraffic()

    def _parts_of_batch(self, repeats: bool) -> int:
        """Return the parts (of the script's batch) that a mini-batch counts as; see `BatchParts`.

        Args:
            repeats: True if the step uses the mini-batch of the step before; False if it uses the
                next mini-batch.
        """
        member = self._member
        if not repeats:
            self._num_batches += 1
        parts = member.data.parts if member.in_fit else self._parts_in_loop
        return parts.of_step(self._num_batches - 1)

    @functools.cached_property
    def _parts_in_loop(self) -> BatchParts:
        return BatchParts.alike(WorkerPlace.of(self._member.own_settings.run, 1).in_loop())

    @property
    def has_failed(self) -> bool:
        """True if an exchange with the servers failed and its error has not been raised yet."""
        return self._failure is not None

    def raise_failure(self) -> None:
        """Raise the stored error of an exchange with the servers, which TensorFlow would hide."""
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def exchange(
        self, step: ExchangeStep, repeats: bool, in_turn: bool, values: StepValues
    ) -> StepAnswer:
        """Push a step's gradient (or weights) and pull new weights; TensorFlow calls this method.

        Args:
            step: Object that replaces the optimizer's method `apply`.
            repeats: True if an earlier training step has already counted the examples of the
                mini-batch.
            in_turn: True if other optimizers of a training loop may step before the weights are
                exchanged.
            values: Values of the training step, as numpy arrays.

        Returns:
            The values with which the next step starts.
        """
        member = self._member
        session, is_offered = member.joined, member.is_offered
        self.num_calls += 1
        if step.is_stale:
            step.is_stale, values = False, _without_update(session, values)
        try:
            change = self._phases.join_loop()
        except Exception as error:
            self.keep(error)
            raise
        if change is not None:
            held = values.held + change if values.held.size else values.held
            pushed = values.pushed + change if session.takes_weights else values.pushed
            values = values._replace(held=held, pushed=pushed)
        with member.lock:
            if in_turn and not self._loop_steps.is_due(step):  # a local step exchanges nothing
                return StepAnswer(
                    np.array(values.pushed),
                    np.array(values.statistics),
                    np.float32(values.rate),
                    np.float32(values.scale),
                    member.advance_clocks(),
                )
            # With steps_per_execution > 1, the graph executes more steps after a failed step, which
            # must not be pushed. Steps of a skipped `fit` (which the run completed before a
            # restart) are not pushed either. But a step after `stop_training` is pushed, because
            # Keras also finishes the batch in progress.
            if not (member.in_fit and (self.has_failed or member.is_behind)):
                parts = self._parts_of_batch(repeats)
                head = PushHead(
                    learning_rate=self._set_rate(step, float(values.rate)),
                    loss_scale=float(values.scale),
                    overflow=bool(values.scale) and not np.isfinite(values.pushed).all(),
                    optimizer=0 if session.takes_weights else step.number,
                    repeats_batch=repeats,
                    batch_parts=parts if values.has_stepped else 0,
                )
                # The array `pushed` is a view of TensorFlow's memory, which TensorFlow may reuse
                # when the call returns. So a session that uses the values later needs a copy.
                if session.part.core.own is None:
                    values = values._replace(pushed=np.array(values.pushed))
                self._try_step(step, values, head)
            if not is_offered:
                step.known_rate = session.part.core.learning_rate * self._rate_factor
            return StepAnswer(
                session.weights.copy(),
                session.means.copy(),
                np.float32(values.rate if is_offered else step.known_rate),
                np.float32(session.part.core.loss_scale or values.scale),
                member.advance_clocks(),
            )

    def sit_out(self, session: Session, batch_parts: int) -> None:
        """Push an empty update in a round in which this worker has no training rows.

        An empty update has 0 rows, so it does not change the mean of the other workers' updates.

        Args:
            session: This worker's session with the servers.
            batch_parts: Number of parts of the script's batch that the workers with rows in this
                round do not count, so that learning-rate schedules advance as without Thinwire.
        """
        sequence, takes_weights = self._member.sequence, session.takes_weights
        with self._member.lock:
            if session.stopped:
                return
            for number in sequence[:1] if takes_weights else sequence:
                held, scale = session.variables.read(), session.part.core.loss_scale
                step = self._member.stepping[number]
                nothing = StepValues(
                    pushed=held if takes_weights else np.zeros_like(held),
                    rows=0,
                    statistics=session.means.copy(),
                    rate=step.known_rate,
                    scale=scale,
                    held=held,
                    loss=(),
                    has_stepped=True,
                    has_assigned=True,
                    touched={},
                )
                head = PushHead(
                    loss_scale=scale,
                    optimizer=0 if takes_weights else number,
                    batch_parts=batch_parts,
                )
                self._try_step(step, nothing, head)
                session.assign()

    def end_round(self, session: Session) -> None:
        """End a round of local steps: push the weights' changes to the PS, pull new weights."""
        self._member.finish_rounds(session)
        with self._member.lock:
            if not session.stopped:
                session.assign()
                self._member.start_clocks()

    def _set_rate(self, step: ExchangeStep, rate: float) -> float | None:
        """Return the learning rate that the PS must use from now on; None if it is unchanged.

        A new learning rate comes from the script, or from a schedule of a class that no PS can
        build.
        """
        member = self._member
        if not member.is_offered or member.joined.takes_weights:
            return None
        clock, schedule = step.clock, own_schedule(step.inner)
        if clock is not None and schedule is not None:
            return clock.read(schedule)
        if rate == np.float32(step.known_rate):
            return None
        step.known_rate = rate
        return rate

    def _try_step(self, step: ExchangeStep, values: StepValues, head: PushHead) -> None:
        """Push a step to the servers and pull new weights; store an error for `raise_failure`.

        If the script has set weights itself, this change of the weights is sent with the step.

        Args:
            step: Object that replaces the optimizer's method `apply`.
            values: Values of the training step, as numpy arrays.
            head: Numbers of the training step, for example its loss scale, that are sent with the
                values.
        """
        member, session = self._member, self._member.joined
        rate = float(values.rate)
        try:
            if not session.stopped:
                touched = {number: np.unique(rows) for number, rows in values.touched.items()}
                figures = ScriptFigures(head, touched, self._changed(session, values))
                is_new = abs(rate - step.known_rate) > RATE_TOLERANCE * abs(step.known_rate)
                if is_new and not member.is_offered:
                    self._scale_to_rate(session, rate)
                loss = float(values.loss[0]) if len(values.loss) else None
                rows, statistics = int(values.rows), values.statistics
                batch = MiniBatch(values.pushed, rows, loss, statistics, figures=figures)
                self.last = session.part.step(batch, self._rate_factor)
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

    def _changed(self, session: Session, values: StepValues) -> Float32 | None:
        """Return by how much the script itself changed the weights, [num_parameters] float32.

        Returns:
            The change since the newest step; None if the script has not changed weights.
        """
        member = self._member
        if not session.takes_weights:
            return changed_by_script(session, values.held, member.model.name)
        assignments = member.assignments
        change = assignments.take(session.shared.variables) if values.has_assigned else None
        return assigned_by_script(session, change)

    def keep(self, error: Exception) -> None:
        """Store the first error of an exchange; `fit` raises the error before its next batch."""
        self._failure = self._failure or error
        if not self._member.in_fit:
            RECORD.failure = error

    def _report_end(self) -> None:
        """Log once that the run has ended, so that later steps of a loop have no effect."""
        member = self._member
        if member.in_loop and not member.in_fit and not self._has_reported_end:
            self._has_reported_end = True
            logging.warning(
                "the run has ended (%s): further steps of optimizer %r change nothing; a training "
                "loop can check optimizer.thinwire.stopped",
                member.stop_reason or "interrupted",
                member.model.name,
            )

    def _scale_to_rate(self, session: Session, rate: float) -> None:
        """Scale this worker's gradients to give them the effect of the script's learning rate."""
        factor = rate / session.part.core.learning_rate
        if abs(factor - 1) <= RATE_TOLERANCE:
            factor = 1.0
        if factor != self._rate_factor:
            check_rate_change(rate, session.settings.run.method)
        self._rate_factor = factor


def _without_update(session: Session, values: StepValues) -> StepValues:
    """Return the values of a step whose gradient is of weights that joining has replaced."""
    weights = session.weights.copy()
    pushed = weights if session.takes_weights else np.zeros_like(weights)
    held = weights if values.held.size else values.held
    return values._replace(pushed=pushed, held=held, rows=np.int64(0))
