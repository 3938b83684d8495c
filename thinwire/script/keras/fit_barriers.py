"""What all scripts agree on: barriers around each `fit`, evaluations, early ends, who writes."""

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

#: In a loop, how long a script waits for the others to begin it, or for the chief to save, too.
_IN_LOOP_SECONDS = 5.0


class FitBarriers:
    """Counts the calls of `fit` of all models, and ends this worker's part when its script ends.

    Attributes:
        on_stop: See below; of the model that is trained now.
        where: At which end of the present `fit` the newest phase may begin: begin or left.

    Args:
        run: The run's settings.
        id_worker: This worker.
        run_id: As the training stream has it.
        on_stop: Called, in a thread of its own, when another script ends the present `fit`: with
            the number of epochs after which that ends; 0: immediately.
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
        self._has_warned = False  # that nobody evaluates
        self._id_worker, self.on_stop = id_worker, on_stop
        self._control = Control.of(
            run, id_worker, run_id, on_stop=self._stopped, on_chief=self._named
        )
        # For good: a script that a signal ends must not wait for a PS that is gone as well.
        interrupts.add_listener(self._control.interrupt)
        RECORD.on_evaluation(self._report)
        RECORD.at_end(self._finish)
        atexit.register(self._finish_at_exit)

    @staticmethod
    def is_failure(cause: str) -> bool:
        """Return whether a run that ended so was spoiled by a script."""
        return cause in (SCRIPT_FAILED, RETURNED_EARLY)

    def count_fit(self) -> None:
        """Begin another `fit`, the first included."""
        self._num_fits, self._num_saved, self.where = self._num_fits + 1, 0, "begin"
        self._control.resume()

    @property
    def phase(self) -> int:
        """The number of the phase that may begin at the beginning or end of this `fit`."""
        return 2 * self._num_fits + (self.where == "left")

    def wait(self, where: str, changes: bool = False) -> Opening | RunHalted:
        """Wait until every script begins or ends the present `fit`.

        Args:
            where: begin, end, or left, when its callbacks have ended; or a part of begin or left.
            changes: Whether this script's model is another one than the run's.

        Returns:
            Whether a phase begins, or the end of the run, if it has ended meanwhile.

        Raises:
            Unreachable, RequestRejected: Shard 0 is gone for good, or rejects this script.
            InterruptedError: This process was interrupted.
        """
        try:
            return self._control.barrier(f"fit-{self._num_fits}-{where}", changes)
        except RunHalted as halted:
            return halted

    def begin_run(self, has_supervisor: bool) -> RunHalted | None:
        """Wait until all processes that run the script at the start have come to `distribute`.

        A script that clears a folder at its top has done so then, on the evaluator too.

        Args:
            has_supervisor: Whether the run is known to have one, which starts an evaluator.

        Returns:
            The end of the run, if it has ended meanwhile. Raises as `wait`.
        """
        try:
            self._control.barrier("start-with-supervisor" if has_supervisor else "start")
        except RunHalted as halted:
            return halted
        return None

    def begin_fit(self, fit: pb.FitBegun) -> None:
        """Report that the present `fit` begins; its number is filled in."""
        fit.fit = self._num_fits
        self._control.begin_fit(fit)

    def end_fit(self, history: str) -> None:
        """Report what the present `fit` has returned, as JSON."""
        self._control.end_fit(pb.FitEnded(fit=self._num_fits, history=history))

    def evaluate(self, epoch: int, by_script: bool) -> pb.Evaluated | RunHalted | None:
        """Wait until the model has been evaluated at the end of an epoch.

        Args:
            epoch: As Keras counts them.
            by_script: Whether a script must evaluate, and no evaluator can.

        Returns:
            The evaluation; or the end of the run, if that has come before; or None: this script is
            to evaluate, and to give the metrics to `answer`. Raises as `wait`.
        """
        try:
            evaluated = self._control.evaluate(self._num_fits, epoch, by_script)
        except RunHalted as halted:
            return halted
        if evaluated is not None and evaluated.nobody and not self._has_warned:
            self._has_warned = True
            logging.warning(
                "epoch %d was not evaluated (%s): History and callbacks have no val_* of it, nor "
                "of later ones, until a Supervisor evaluates again",
                evaluated.epoch + 1,
                evaluated.nobody,
            )
        return evaluated

    def answer(
        self, epoch: int, versions: Sequence[int], metrics: Mapping[str, Any]
    ) -> pb.Evaluated | RunHalted:
        """Report an evaluation that this script was appointed for.

        Args:
            epoch: As Keras counts them.
            versions: Of each shard, that the model has.
            metrics: Of the validation data, by name.

        Returns:
            What all scripts get, or the end of the run. Raises as `wait`.
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
        """Exchange the states of training metrics behind the last step of an epoch.

        Args:
            epoch: As Keras counts them.
            states: Of this script.

        Returns:
            An answer with the sums over all scripts, or the end of the run. Raises as `wait`.
        """
        return self._meet(pb.EpochMeeting(epoch=epoch, states=states))

    def end_epoch(self, epoch: int, stops: bool) -> pb.EpochMeeting | RunHalted:
        """Agree, behind the callbacks of an epoch, on whether this `fit` ends early.

        Args:
            epoch: As Keras counts them.
            stops: Whether the callbacks of this script have set stop_training.

        Returns:
            An answer with the number of epochs after which it ends, or the end of the run. Raises
            as `wait`.
        """
        return self._meet(pb.EpochMeeting(epoch=epoch, after_callbacks=True, stops=stops))

    def _meet(self, meeting: pb.EpochMeeting) -> pb.EpochMeeting | RunHalted:
        meeting.fit, meeting.waits = self._num_fits, self._run.method.ends_epochs_together
        try:
            return self._control.meet(meeting)
        except RunHalted as halted:
            return halted

    def saved(self, has_written: bool, in_loop: bool = False) -> RunHalted | None:
        """Let others go on that wait for a file; or wait until it has been written.

        The n-th file that is saved after a `fit` is taken for the same in all scripts. Nobody waits
        for a script that has ended or is in a later `fit`.

        Args:
            has_written: Whether this script has written it.
            in_loop: Whether the writer may wait for this script's next step meanwhile: then nobody
                waits for long.

        Returns:
            The end of the run, if it has ended meanwhile. Raises as `wait`.
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
                "worker %d has not saved a model where this one does; it alone writes files",
                RECORD.chief,
            )
        except RunHalted as halted:
            return halted
        return None

    def begin_loop(self) -> RunHalted | None:
        """Wait until all scripts train by loops behind the present `fit`; not long: some may not.

        Returns:
            The end of the run, if it has ended meanwhile. Raises as `wait`.
        """
        try:
            self._control.barrier(f"fit-{self._num_fits}-loop", patience_seconds=_IN_LOOP_SECONDS)
        except TimeoutError:
            logging.info("a loop begins behind a fit in this script alone")
        except RunHalted as halted:
            return halted
        return None

    def stop_fit(self, epochs: int) -> None:
        """Let every other script end the present `fit` after so many epochs; 0: immediately."""
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
        """Do so for a script that no launcher of ours has started."""
        error = getattr(sys, "last_value", None)
        RECORD.end(error is not None, "" if error is None else f"{type(error).__name__}: {error}")
