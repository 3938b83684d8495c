"""Coordination of all scripts of a run: barriers around `fit`, evaluations, ends, file writer."""

from __future__ import annotations

import atexit
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import logging

from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.evaluations import encode_metrics
from thinwire.runtime.run.settings import RETURNED_EARLY, SCRIPT_FAILED, Run
from thinwire.script import interrupts
from thinwire.worker.client.control import Control, Opening, RunHalted
from thinwire.worker.script import RECORD

#: Longest wait of a loop, in seconds: for the other scripts to begin a loop, or for the chief to
#: save a file. The scripts of other workers may have no loop, and may never save.
_IN_LOOP_SECONDS = 5.0


class FitBarriers:
    """Barriers of one script with the other scripts, over all calls of `fit` of all its models.

    Attributes:
        on_stop: The argument `on_stop`, for the model that is trained now.
        where: Point of the current `fit` at which the next phase may begin: "begin" or "left".

    Args:
        run: Settings of the run.
        id_worker: Number of this worker.
        run_id: Identifier of the run, from the training stream.
        on_stop: Called in the control stream's thread when another script ends the current `fit`,
            with the number of epochs after which the `fit` ends; 0: immediately.
    """

    def __init__(
        self,
        run: Run,
        id_worker: int,
        run_id: str,
        on_stop: Callable[[int], None] = lambda epochs: None,
    ) -> None:
        self._num_fits = self._num_saved = 0
        self._run = run
        self.where = "begin"
        self._has_warned = False  # True after the warning that no process evaluates
        self._id_worker, self.on_stop = id_worker, on_stop
        self._control = Control.of(
            run, id_worker, run_id, on_stop=self._stopped, on_chief=self._named
        )
        # The listener stays until the script has ended: a script that a signal ends must not wait
        # for an unreachable PS.
        interrupts.add_listener(self._control.interrupt)
        RECORD.on_evaluation(self._report)
        RECORD.at_end(self._finish)
        atexit.register(self._finish_at_exit)

    @staticmethod
    def is_failure(cause: str) -> bool:
        """Return whether a stop reason means that a script failed or returned early."""
        return cause in (SCRIPT_FAILED, RETURNED_EARLY)

    def count_fit(self) -> None:
        """Count a `fit` that begins, and reset the state of the previous `fit`."""
        self._num_fits, self._num_saved, self.where = self._num_fits + 1, 0, "begin"
        self._control.resume()

    @property
    def phase(self) -> int:
        """Number of the phase that may begin at `where`: 2n before `fit` n, 2n + 1 after it."""
        return 2 * self._num_fits + (self.where == "left")

    def wait(self, where: str, changes: bool = False) -> Opening | RunHalted:
        """Wait at a barrier until every script has reached the same point of the current `fit`.

        Args:
            where: Name of the barrier: "begin", "end", "left" (after the callbacks), or one of the
                barriers "begin-..." and "left-..." that follow "begin" and "left".
            changes: True if this script's model differs from the run's model.

        Returns:
            How the barrier opened: whether a phase begins, and whether this script offers its
            model. A RunHalted if the run has ended.

        Raises:
            Unreachable, RequestRejected: Shard 0 cannot be reached, or rejects this script.
            InterruptedError: This process was interrupted.
        """
        try:
            return self._control.barrier(f"fit-{self._num_fits}-{where}", changes)
        except RunHalted as halted:
            return halted

    def begin_run(self, has_supervisor: bool) -> RunHalted | None:
        """Wait until all workers and the first evaluator have called `distribute`.

        A script may clear a folder before it calls `distribute`. After this barrier no process
        clears files that the run has written.

        Args:
            has_supervisor: True if the run has a Supervisor, which starts an evaluator.

        Returns:
            The end of the run if the run has ended; else None.

        Raises:
            Unreachable, RequestRejected, InterruptedError: The barrier failed, as in `wait`.
        """
        try:
            self._control.barrier("start-with-supervisor" if has_supervisor else "start")
        except RunHalted as halted:
            return halted
        return None

    def begin_fit(self, fit: pb.FitBegun) -> None:
        """Report that the current `fit` begins; sets `fit.fit` to the number of the `fit`."""
        fit.fit = self._num_fits
        self._control.begin_fit(fit)

    def end_fit(self, history: str) -> None:
        """Report the History that the current `fit` has returned, as JSON."""
        self._control.end_fit(pb.FitEnded(fit=self._num_fits, history=history))

    def evaluate(self, epoch: int, by_script: bool) -> pb.Evaluated | RunHalted | None:
        """Wait until the model has been evaluated at the end of an epoch.

        Args:
            epoch: Number of the epoch, as Keras counts epochs.
            by_script: True if a script must evaluate, because the evaluator cannot.

        Returns:
            The evaluation; a RunHalted if the run has ended; None if this script must evaluate and
            pass the metrics to `answer`.

        Raises:
            Unreachable, RequestRejected, InterruptedError: The wait failed, as in `wait`.
        """
        try:
            evaluated = self._control.evaluate(self._num_fits, epoch, by_script)
        except RunHalted as halted:
            return halted
        if evaluated is not None and evaluated.nobody and not self._has_warned:
            self._has_warned = True
            logging.warning(
                "epoch %d was not evaluated (%s): History and callbacks get no val_* metrics until "
                "a Supervisor evaluates again",
                evaluated.epoch + 1,
                evaluated.nobody,
            )
        return evaluated

    def answer(
        self, epoch: int, versions: Sequence[int], metrics: Mapping[str, Any]
    ) -> pb.Evaluated | RunHalted:
        """Report an evaluation that shard 0 has requested from this script.

        Args:
            epoch: Number of the epoch, as Keras counts epochs.
            versions: Version of each shard in the evaluated model.
            metrics: Metrics of the validation data, by name.

        Returns:
            The evaluation that all scripts get; a RunHalted if the run has ended.

        Raises:
            Unreachable, RequestRejected, InterruptedError: The exchange failed, as in `wait`.
        """
        evaluated = pb.Evaluated(
            fit=self._num_fits,
            epoch=epoch,
            answers=True,
            by_script=True,
            versions=versions,
            metrics=encode_metrics(metrics),
        )
        try:
            return self._control.answer(evaluated)
        except RunHalted as halted:
            return halted

    def end_steps(
        self, epoch: int, states: Sequence[pb.MetricState]
    ) -> pb.EpochMeeting | RunHalted:
        """Exchange the states of training metrics after the last step of an epoch.

        Args:
            epoch: Number of the epoch, as Keras counts epochs.
            states: Metric states of this script.

        Returns:
            An answer with the sums over all scripts; a RunHalted if the run has ended.

        Raises:
            Unreachable, RequestRejected, InterruptedError: The exchange failed, as in `wait`.
        """
        return self._meet(pb.EpochMeeting(epoch=epoch, states=states))

    def end_epoch(self, epoch: int, stops: bool) -> pb.EpochMeeting | RunHalted:
        """Agree with the other scripts, after the callbacks of an epoch, on an early end.

        Args:
            epoch: Number of the epoch, as Keras counts epochs.
            stops: True if a callback of this script has set stop_training.

        Returns:
            An answer with the number of epochs after which the `fit` ends; a RunHalted if the run
            has ended.

        Raises:
            Unreachable, RequestRejected, InterruptedError: The exchange failed, as in `wait`.
        """
        return self._meet(pb.EpochMeeting(epoch=epoch, after_callbacks=True, stops=stops))

    def _meet(self, meeting: pb.EpochMeeting) -> pb.EpochMeeting | RunHalted:
        meeting.fit, meeting.waits = self._num_fits, self._run.method.ends_epochs_together
        try:
            return self._control.meet(meeting)
        except RunHalted as halted:
            return halted

    def saved(self, has_written: bool, in_loop: bool = False) -> RunHalted | None:
        """Report that this script has written a file; or wait until the chief has written it.

        The n-th file that each script saves after a `fit` is assumed to be the same file. No script
        waits for a script that has ended or is in a later `fit`.

        Args:
            has_written: True if this script has written the file.
            in_loop: True if this script is in a loop. The wait is then limited, because the writer
                may itself wait for this script's next step.

        Returns:
            The end of the run if the run has ended; else None.

        Raises:
            Unreachable, RequestRejected, InterruptedError: The barrier failed, as in `wait`.
        """
        self._num_saved += 1
        name = f"fit-{self._num_fits}-saved-{self._num_saved}"
        if has_written:
            self._control.pass_by(name)
            return None
        try:
            self._control.barrier(name, patience_seconds=_IN_LOOP_SECONDS if in_loop else math.inf)
        except TimeoutError:
            logging.warning(
                "timeout: the chief, worker %d, has not saved the file that this worker saves; "
                "only the chief writes files, so the file may not exist",
                RECORD.chief,
            )
        except RunHalted as halted:
            return halted
        return None

    def begin_loop(self) -> RunHalted | None:
        """Wait a limited time until all scripts begin a loop after the current `fit`.

        The wait is limited because some scripts may have no loop after the `fit`.

        Returns:
            The end of the run if the run has ended; else None.

        Raises:
            Unreachable, RequestRejected, InterruptedError: The barrier failed, as in `wait`.
        """
        try:
            self._control.barrier(f"fit-{self._num_fits}-loop", patience_seconds=_IN_LOOP_SECONDS)
        except TimeoutError:
            logging.info("not all scripts begin a loop after the fit: starting without them")
        except RunHalted as halted:
            return halted
        return None

    def stop_fit(self, epochs: int) -> None:
        """End the current `fit` of all other scripts after `epochs` epochs; 0: immediately."""
        self._control.stop_fit(self._num_fits, epochs)

    def _stopped(self, fit: int, epochs: int) -> None:
        if fit == self._num_fits:
            self.on_stop(epochs)

    def _named(self, chief: int) -> None:
        RECORD.chief = chief

    def _report(self, metrics: Mapping[str, Any]) -> None:
        self._control.report(
            pb.Evaluated(fit=max(1, self._num_fits), metrics=encode_metrics(metrics))
        )

    def _finish(self, failed: bool, message: str) -> None:
        """Report the script's end, once; the run ends when all have ended."""
        atexit.unregister(self._finish_at_exit)
        self._control.finish(failed, message)
        interrupts.remove_listener(self._control.interrupt)

    def _finish_at_exit(self) -> None:
        """Report the end of a script that was started without `thinwire run`."""
        error = getattr(sys, "last_value", None)
        RECORD.end(error is not None, "" if error is None else f"{type(error).__name__}: {error}")
