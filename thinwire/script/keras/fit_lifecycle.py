"""Handles one call of `fit`: the worker joins the run, counts epochs and batches, and leaves."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import sys
from collections.abc import Iterator
from typing import Any

import keras
from absl import logging

from thinwire.ops.types import ConfigurationError
from thinwire.proto import thinwire_pb2 as pb
from thinwire.script.data.data import Shared, share
from thinwire.script.data.fit_counts import FitNumber
from thinwire.script.data.place import WorkerPlace
from thinwire.script.data.randomness import own_randomness
from thinwire.script.keras.checks import check_states
from thinwire.script.keras.data_errors import explain_batch
from thinwire.script.keras.evaluations import FitEvaluations
from thinwire.script.keras.exchange import StepExchange
from thinwire.script.keras.phases import Phases
from thinwire.script.keras.row_sums import RowSums
from thinwire.script.keras.run_member import RunMember
from thinwire.script.keras.succession import begin_to_train, count_fit
from thinwire.script.keras.train_metrics import TrainMetrics
from thinwire.script.member import Event
from thinwire.worker.script import RECORD


class _EpochPart(enum.Enum):
    """Parts of a training epoch of `fit`, in the order in which Keras runs the parts."""

    BEFORE_STEPS = enum.auto()
    IN_STEPS = enum.auto()
    # state of an epoch in which Keras has read the training metrics of all its steps
    AFTER_STEPS = enum.auto()


class FitLifecycle(keras.callbacks.Callback):
    """State of a model's current `fit`, in one object for all calls of the model's `fit`.

    The object is the first callback of each `fit`: it joins and leaves the run before the script's
    callbacks run. It does not override `on_train_batch_end`. Without an `on_train_batch_end` of
    Thinwire, Keras may still call the method of the script's callbacks in another thread.

    Attributes:
        shares_itself: True if the script has divided its data with `model.thinwire.shard`, so that
            `fit` must not divide the data.
        metrics: Object that merges the training metrics over the workers.
        number: Number of the model's calls of `fit` that have begun.

    Args:
        member: Membership of the model in a run.
        phases: Object that begins a new phase of the run when the script's model has changed.
        exchange: Object that pushes to the servers and pulls from them in each step.
        evaluations: Object that evaluates the validation data within a `fit`.
        row_sums: Object that scales losses that are sums over rows.
    """

    def __init__(
        self,
        member: RunMember,
        phases: Phases,
        exchange: StepExchange,
        evaluations: FitEvaluations,
        row_sums: RowSums,
    ) -> None:
        super().__init__()
        self.shares_itself, self.metrics = False, TrainMetrics(member)
        self.number = 0
        # error that the script was handling when it called `fit`; usually None
        self._handled: BaseException | None = None
        self._member, self._phases, self._exchange = member, phases, exchange
        self._evaluations, self._row_sums = evaluations, row_sums
        self._part = _EpochPart.AFTER_STEPS
        # number of rounds of this epoch in which this worker has no training rows
        self._to_sit_out = 0
        # Number of epochs in the current round of local steps, including the current epoch.
        self._epochs_of_round = 0
        self._num_batches = 0  # number of batches that have begun in this `fit`

    @contextlib.contextmanager
    def running(self, arguments: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Prepare one call of a model's `fit`; leave the run if the `fit` fails.

        Args:
            arguments: Arguments of the call of Keras' `fit`, by name.

        Yields:
            The arguments for Keras' fit, with this worker's part of the training data.

        Raises:
            ConfigurationError: The data cannot be divided among the workers, or the run does not
                support the optimizer.
        """
        member = self._member
        self.number, self._handled = self.number + 1, sys.exception()
        place = self._place(count_fit(member, arguments.get("x")))
        if place is not None:
            check_states(member.model, place)
        data = member.data = Shared(arguments) if place is None else share(arguments, place)
        self._exchange.begin_fit()
        self._row_sums.begin_fit(data.rounds)
        member.epoch, member.ends_after = 0, None
        self._evaluations.begin_fit(data.arguments)
        self._num_batches = self._epochs_of_round = 0
        self._phases.begin_fit()
        try:
            begin_to_train(member)
            if member.barriers is not None:
                member.barriers.count_fit()
            with contextlib.nullcontext() if place is None else own_randomness(place):
                yield dict(data.arguments)
            if member.stopped:
                reason = member.stop_reason or "interrupted"
                logging.info("fit ends because the run ended (%s)", reason)
            self._phases.receive(Event.CALLBACKS_END)
        except BaseException as error:
            if not self._exchange.num_calls:
                explain_batch(error, place, data.batch_size)
            RECORD.left_fit_by = error
            self._phases.fail()
            raise
        finally:
            self._phases.receive(Event.FIT_RETURNS)
            self._row_sums.end_fit()

    def on_train_begin(self, logs: Any = None) -> None:
        """Join the run before the first step of `fit`, or let the first step join it."""
        member = self._member
        if member.settings is not None and member.settings.run.nb_workers > 1:
            self.metrics.begin_fit()
        self._phases.begin()
        if member.stopped:
            member.model.stop_training = True
            logging.warning(
                "the run ended (%s) before this call of fit: model %r is not trained",
                member.stop_reason or "interrupted",
                member.model.name,
            )

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Count the batch; raise the error of the previous batch, if any, which ends `fit`."""
        self._exchange.raise_failure()
        if self._part is _EpochPart.BEFORE_STEPS:
            self._begin_steps()
        self._num_batches += 1
        member = self._member
        if member.session is not None:
            if not member.is_behind:
                member.keep_state()
            member.session.part.begin_compute()

    def on_test_begin(self, logs: Any = None) -> None:
        """Load the weights' averages, which SwapEMAWeights uses, if this process evaluates."""
        self._evaluations.begin_test()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin an epoch, and find out in how many of its steps this worker has no training rows.

        Args:
            epoch: Number of the training epoch, from 0.
            logs: Not used.
        """
        member, data = self._member, self._member.data
        self._to_sit_out, self._part = data.short_by, _EpochPart.BEFORE_STEPS
        if data.unfilled is not None:
            # Clear the count of a pass over the data that Keras began only to build the model.
            data.unfilled.take()
        self._epochs_of_round += 1
        self._exchange.begin_epoch()
        self._row_sums.begin_epoch()
        member.epoch = epoch
        if member.ends_after is not None and epoch >= member.ends_after:
            member.model.stop_training = True

    def _begin_steps(self) -> None:
        self._part = _EpochPart.IN_STEPS
        self.metrics.begin_epoch()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Raise an error of the last batch; push empty updates if other workers have more rows."""
        self.end_steps()
        self._evaluations.end_epoch()

    def on_train_end(self, logs: Any = None) -> None:
        """Leave the run at the end of `fit`, and load the run's weights into the model."""
        self.leave()

    def end_steps(self) -> None:
        """Push empty updates in the last rounds of an epoch, in which only other workers have rows.

        A second call of `end_steps` in the same epoch does nothing. With --local_epochs, a round of
        local steps may end only after the steps of the epoch. If this `fit` stops within the epoch,
        the worker leaves the run, so that no worker waits for its remaining updates.
        """
        member, data = self._member, self._member.data
        session = member.session
        self._exchange.raise_failure()
        number, self._to_sit_out = self._to_sit_out, 0
        unfilled = 0 if data.unfilled is None else data.unfilled.take()
        if session is None:
            return
        if member.model.stop_training:
            # The scripts of the other workers finish their current batch and do not wait for
            # updates of this worker.
            if member.ends_after is None and not member.stopped:
                member.ends_after = 0
                if member.barriers is not None:
                    member.barriers.stop_fit(0)
            self._phases.receive(Event.STEPS_STOP)
            return
        for _ in range(number):
            self._exchange.sit_out(session, 0)
        # If this worker has no rows in a round, the other workers do not know that, so each of them
        # counts only its own part of the script's batch. The empty update of this worker therefore
        # counts this worker's part.
        for _ in range(unfilled):
            self._exchange.sit_out(session, data.parts.each)
        self._exchange.raise_failure()
        if 0 < session.settings.run.method.pacer.local_epochs <= self._epochs_of_round:
            self._epochs_of_round = 0
            self._exchange.end_round(session)

    def keep_metrics(self) -> None:
        """Record the metrics' states after the script itself evaluates between an epoch's steps.

        The later steps of the epoch add to the recorded states, so the merge over the workers
        starts from these states.
        """
        if self._part is _EpochPart.IN_STEPS and not self._evaluations.is_evaluating:
            self.metrics.begin_epoch()

    def merge_metrics(self, logs: Any) -> bool:
        """End the steps of an epoch, and merge its training metrics over all workers.

        A second call of `merge_metrics` in the same epoch does nothing.

        Args:
            logs: Return value of the last step of the epoch.

        Returns:
            True if the training metrics have been merged over all workers.
        """
        if self._part is _EpochPart.AFTER_STEPS or self._evaluations.is_evaluating:
            return False
        if self._part is _EpochPart.BEFORE_STEPS:  # this worker has no training rows in this epoch
            self._begin_steps()
        self._part, member = _EpochPart.AFTER_STEPS, self._member
        self.end_steps()
        if not member.meets_others:
            return False
        meeting = pb.EpochMeeting(epoch=member.epoch, states=self.metrics.describe())
        answer = member.until_end(lambda: member.met_barriers.meet(meeting))
        if answer is None:
            return False
        self.metrics.note_returned(logs)
        self.metrics.take(answer.states)
        return True

    def end_epoch(self) -> None:
        """End an epoch after its callbacks; end this `fit` if the workers' scripts agree.

        A callback may set stop_training in this script while the script of another worker is
        already in a later epoch. A script that stops early trains until it has completed as many
        epochs as the scripts of the other workers.
        """
        member, model = self._member, self._member.model
        if not member.meets_others:
            return
        meeting = pb.EpochMeeting(
            epoch=member.epoch, after_callbacks=True, stops=bool(model.stop_training)
        )
        answer = member.until_end(lambda: member.met_barriers.meet(meeting))
        if answer is None:
            model.stop_training = True
            return
        if answer.epochs and member.ends_after is None:
            member.ends_after = answer.epochs
        if member.ends_after is not None:
            model.stop_training = member.epoch + 1 >= member.ends_after

    def ends_fit(self) -> bool:
        """Leave the run at the call by which Keras ends a `fit`; see `leave`.

        On JAX, Keras makes this call after an error, too, whose ending `running` handles.
        """
        return sys.exception() is self._handled and self.leave()

    def leave(self) -> bool:
        """Leave the run after the last step of `fit`, and load the run's weights into the model.

        A second call of `leave` for the same `fit` does not leave the run again.

        Returns:
            True if the script's optimizer has the moving averages of this run.

        Raises:
            ConfigurationError: The `fit` had steps, but none of them exchanged anything with the
                PS.
        """
        member = self._member
        self._exchange.raise_failure()
        has_exchanged = self._exchange.num_calls or member.is_behind or member.stopped
        if self._num_batches and not has_exchanged:
            raise ConfigurationError(
                f"{self._num_batches} steps of {member.model.name!r} exchanged no updates with "
                "the PS: its train_step does not step with any optimizer, so this worker trained "
                "alone. Call self.optimizer.apply_gradients(...), or apply_gradients of another "
                "optimizer, in each step."
            )
        self._phases.leave()
        session = member.session
        return session is not None and (session.takes_weights or self._phases.has_slots)

    def _place(self, fit: FitNumber) -> WorkerPlace | None:
        """Return the rules by which workers divide the data of `fit`; None outside of a run."""
        settings = self._member.settings
        if settings is None or not self._member.is_offered:
            return None
        place = WorkerPlace.of(settings.run, settings.worker().id_worker)
        shard = "off" if self.shares_itself else place.shard
        return dataclasses.replace(place, fit=fit, shard=shard)
