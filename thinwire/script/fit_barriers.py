"""Barriers of all workers' scripts: around `fit`, for evaluations, early ends and saved files."""

from __future__ import annotations

import atexit
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import logging

from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.barriers import Barrier, Point
from thinwire.proto.evaluations import encode_metrics
from thinwire.runtime.run.settings import Run
from thinwire.script import interrupts
from thinwire.worker.client.control import Control, Opening
from thinwire.worker.script import RECORD

#: Longest wait of a script in a training loop, in seconds: for other scripts to begin a loop, or
#: for the chief to save a file. The wait is limited, because another worker's script may have no
#: loop, and the chief may never save.
_IN_LOOP_SECONDS = 5.0


class FitBarriers:
    """Barriers of one script with the scripts of other workers, over all calls of `fit`.

    Shard 0 (the first parameter server) implements the barriers of the workers' scripts. A phase is
    a part of the run in which the model and its optimizers stay the same.

    All methods that wait raise these errors: RunHalted if the run has ended; Unreachable if shard 0
    cannot be reached; RequestRejected if shard 0 rejects the request of this script;
    InterruptedError if a signal interrupted the wait.

    Attributes:
        on_stop: Function that ends the `fit` of the model that the script trains now.
        where: Point of the current `fit` at which the next phase of the run may begin: BEGIN or
            LEFT.

    Args:
        run: Settings of the training run.
        id_worker: Id of this worker, from 1.
        run_id: Identifier of the run, which the shards have sent to this worker.
        on_stop: Function that ends the current `fit` when the script of another worker ends it,
            called in the control stream's thread with the number of epochs after which the `fit`
            ends (0: immediately).
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
        self.where = Point.BEGIN
        self._has_warned = False  # True once a missing evaluation was logged as a warning
        self.on_stop = on_stop
        self._control = Control(run, id_worker, run_id, on_stop=self._stopped, on_chief=self._named)
        # The listener for Ctrl-C stays registered until the script has ended: if a signal ends the
        # script, its barriers must not wait for an unreachable PS.
        interrupts.add_listener(self._control.interrupt)
        RECORD.report = self._report
        RECORD.endings.append(self._finish)
        atexit.register(self._finish_at_exit)

    def count_fit(self) -> None:
        """Count a call of `fit` that begins, and reset the counts of the previous `fit`."""
        self._num_fits, self._num_saved, self.where = self._num_fits + 1, 0, Point.BEGIN
        self._control.resume()

    @property
    def phase(self) -> int:
        """Number of the run's phase that may begin: 2n before the n-th `fit`, 2n + 1 after it."""
        return self._at(self.where).phase

    def _at(self, point: Point, number: int = 0) -> Barrier:
        """Return the barrier at a point of the current `fit`."""
        return Barrier(self._num_fits, point, number)

    def wait(self, point: Point, changes: bool = False) -> Opening:
        """Wait at a barrier until the scripts of all workers have reached the same point of `fit`.

        The wait for a training loop is limited, because some scripts may have no training loop
        after the `fit`.

        Args:
            point: Point of the current `fit`.
            changes: True if this script's model differs from the model that the run trains.

        Returns:
            How the barrier opened: whether a new phase of the run begins, and whether this script
            offers its model to the PS for that phase.
        """
        patience_seconds = _IN_LOOP_SECONDS if point is Point.LOOP else math.inf
        try:
            return self._control.barrier(self._at(point).name, changes, patience_seconds)
        except TimeoutError:
            logging.info("some workers begin no training loop after the fit: starting without them")
            return Opening()

    def begin_run(self, has_supervisor: bool) -> None:
        """Wait until all workers and the first evaluator have called `distribute`.

        A script may clear a folder before it calls `distribute`. After all scripts have called
        `distribute`, no script clears a folder any more, so the files that the run writes are safe.

        Args:
            has_supervisor: True if the run has a Supervisor, which starts an evaluator.
        """
        start = Point.START_WITH_SUPERVISOR if has_supervisor else Point.START
        self._control.barrier(Barrier(0, start).name)

    def begin_fit(self, fit: pb.FitBegun) -> None:
        """Report to shard 0 that the current `fit` begins.

        Args:
            fit: Description of the `fit` for the evaluator; this method sets its field `fit` to the
                number of the `fit`.
        """
        fit.fit = self._num_fits
        self._control.report_fit(pb.ToServer(fit_begun=fit))

    def end_fit(self, history: str) -> None:
        """Report to shard 0 the Keras History that the current `fit` has returned, as JSON."""
        ended = pb.FitEnded(fit=self._num_fits, history=history)
        self._control.report_fit(pb.ToServer(fit_ended=ended))

    def evaluate(self, epoch: int, by_script: bool) -> pb.Evaluated | None:
        """Wait until a process has evaluated the model at the end of an epoch.

        Args:
            epoch: Number of the training epoch, from 0, as Keras passes it to callbacks.
            by_script: True if a worker's script must evaluate, because the Supervisor's evaluator
                lacks values of the script.

        Returns:
            The metrics; None if this script must evaluate and pass the metrics to `answer`.
        """
        evaluated = self._control.evaluate(self._num_fits, epoch, by_script)
        if evaluated is not None and evaluated.nobody and not self._has_warned:
            self._has_warned = True
            logging.warning(
                "epoch %d was not evaluated (%s): History and callbacks get no val_* metrics "
                "until a Supervisor evaluates the model again",
                evaluated.epoch + 1,
                evaluated.nobody,
            )
        return evaluated

    def answer(
        self, epoch: int, versions: Sequence[int], metrics: Mapping[str, Any]
    ) -> pb.Evaluated:
        """Report metrics that shard 0 has requested from this script and then sends to all scripts.

        Args:
            epoch: Number of the training epoch, from 0, as Keras passes it to callbacks.
            versions: For each shard, the version of its weights in the evaluated model.
            metrics: Metrics of the model on the validation data, by name.

        Returns:
            The metrics that shard 0 sends to all scripts.
        """
        evaluated = pb.Evaluated(
            fit=self._num_fits,
            epoch=epoch,
            answers=True,
            by_script=True,
            versions=versions,
            metrics=encode_metrics(metrics),
        )
        return self._control.answer(evaluated)

    def meet(self, meeting: pb.EpochMeeting) -> pb.EpochMeeting:
        """Exchange metric states, or the wish to stop, with the other scripts after an epoch.

        Args:
            meeting: This script's part, to which this method adds the number of the `fit`: before
                the epoch's callbacks, the amounts that the epoch has added to the states of its
                training metrics; after them, whether a callback has set `model.stop_training`.

        Returns:
            Answer of shard 0: the sums over all scripts, or the number of epochs after which the
            `fit` ends.
        """
        meeting.fit, meeting.waits = self._num_fits, self._run.method.ends_epochs_together
        return self._control.meet(meeting)

    def saved(self, has_written: bool, in_loop: bool = False) -> None:
        """Report that this script has written a file, or wait until the chief has written the file.

        The n-th file that a script saves after a `fit` is assumed to be the n-th file of every
        other worker's script. A script does not wait at a barrier for a script that has ended or is
        in a later `fit`.

        Args:
            has_written: True if this script has written the saved file.
            in_loop: True if this script is in a training loop of its own. The script then waits a
                limited time, because the script that writes the file may itself wait for this
                script's next step.
        """
        self._num_saved += 1
        name = self._at(Point.SAVED, self._num_saved).name
        if has_written:
            self._control.pass_by(name)
            return
        try:
            self._control.barrier(name, patience_seconds=_IN_LOOP_SECONDS if in_loop else math.inf)
        except TimeoutError:
            logging.warning(
                "timeout while this worker waited for a file that the chief, worker %d, saves; "
                "only the chief writes files, so the file may not exist",
                RECORD.chief,
            )

    def stop_fit(self, epochs: int) -> None:
        """End the current `fit` of all other scripts after `epochs` epochs; immediately if 0."""
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
        """Report this script's end to shard 0, once; the run ends when all scripts have ended."""
        atexit.unregister(self._finish_at_exit)
        self._control.finish(failed, message)
        interrupts.remove_listener(self._control.interrupt)

    def _finish_at_exit(self) -> None:
        """At process exit, report the end of a script that was started without `thinwire run`."""
        error = getattr(sys, "last_value", None)
        RECORD.end(error is not None, "" if error is None else f"{type(error).__name__}: {error}")
