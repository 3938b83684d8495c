"""Evaluations of a script's run: the evaluator process makes them, or a worker's script."""

from __future__ import annotations

import threading
import time

from absl import logging

from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.evaluations import numbers_of
from thinwire.runtime.run.settings import END_REASONS, Run
from thinwire.supervisor.recorder import Recorder
from thinwire.supervisor.script_evaluator import ScriptEvaluator
from thinwire.supervisor.shard_stream import ShardStreams

#: Time limit, in seconds, for the evaluation of the run's final model. A parameter server waits
#: about as long for the evaluation.
_FINAL_SECONDS = 60.0


class ScriptEvaluations:
    """Records a script's evaluations, and runs the evaluator process while it is needed.

    Args:
        run: Settings of the training run.
        recorder: Object that writes the records of the run.
        streams: The Supervisor's streams to the shards.
        interrupted: Event that is set when the Supervisor must stop.

    Attributes:
        evaluator: The evaluator process.
    """

    def __init__(
        self, run: Run, recorder: Recorder, streams: ShardStreams, interrupted: threading.Event
    ) -> None:
        self._run, self._recorder = run, recorder
        self._streams, self._interrupted = streams, interrupted
        self.evaluator = ScriptEvaluator(run)
        # Metrics and model versions of the newest evaluation; None if no worker's script made the
        # newest evaluation.
        self._of_script: tuple[dict[str, float], list[int]] | None = None
        self._is_known_alive = False  # True if shard 0 assumes that an evaluator process runs
        self._first_version: int | None = None  # version of the model in the first received status

    def offer(self, why_not: str) -> None:
        """Report the evaluator's state to shard 0; an empty ``why_not`` means that an evaluator can
        run.
        """
        self._is_known_alive = self.evaluator.is_alive
        offer = pb.Evaluator(available=not why_not, message=why_not, starting=self._is_known_alive)
        self._streams.shards[0].session.send_control(pb.ToServer(evaluator=offer))

    def tend(self) -> None:
        """Run the evaluator process while calls of fit have validation data; record its
        evaluations.
        """
        evaluator, shard = self.evaluator, self._streams.shards[0]
        if shard.validates:
            evaluator.start()
        elif self._has_trained():
            evaluator.dismiss()
        self._record_evaluations()
        if shard.halt_cause:
            return
        if why := evaluator.tend():
            logging.error("%s; training continues without evaluations", why)
            self.offer(why)
        elif evaluator.is_alive != self._is_known_alive:
            self.offer(evaluator.why_not)

    def _has_trained(self) -> bool:
        """Return True if the shards have applied an update since this Supervisor connected.

        A worker's script reports that its call of fit has validation data before the first step of
        the fit. If scripts train without a report of validation data, the run needs no evaluator.
        """
        status = self._streams.shards[0].status
        if status is None:
            return False
        if self._first_version is None:
            self._first_version = status.version
        return status.version > self._first_version

    def _record_evaluations(self) -> None:
        """Record the evaluations that shard 0 sent; skip evaluations that are already recorded."""
        shard = self._streams.shards[0]
        while shard.status is not None and not shard.evaluated.empty():
            evaluated = shard.evaluated.get()
            versions = list(evaluated.versions)
            # An evaluation is repeated after a restart of shard 0 or of the Supervisor. The records
            # hold at most one evaluation for each model version, and one final evaluation.
            recorded = [item for item in self._recorder.evaluations if item.versions == versions]
            metrics, is_final = numbers_of(evaluated.metrics), [item.final for item in recorded]
            if not evaluated.fit:
                # Several functions of a worker's script may evaluate one model version, with
                # different metrics.
                is_final = [False for item in recorded if item.metrics.keys() == metrics.keys()]
            if not evaluated.metrics or any(is_final) or (is_final and not evaluated.final):
                continue
            self._recorder.record(shard.status, metrics, versions, evaluated.final)
            self._of_script = (metrics, versions) if evaluated.by_script else None
            if not evaluated.final:
                end_at_target(self._run, self._recorder, self._streams)

    def _record_final_of_script(self) -> None:
        """Record the last evaluation of a worker's script as final if it evaluated the run's final
        model.

        An evaluator process evaluates the run's final model in a separate evaluation. A worker's
        script evaluates the model only during its call of fit.
        """
        status = self._streams.shards[0].status
        if status is None or self._of_script is None:
            return
        metrics, versions = self._of_script
        if versions[:1] == [status.version]:
            self._recorder.record(status, metrics, versions, True)

    def wait_for_the_last(self) -> None:
        """Wait until the evaluator has evaluated the final model; record the evaluation."""
        evaluator, shard = self.evaluator, self._streams.shards[0]
        if shard.halt_cause not in END_REASONS:
            return
        deadline = time.monotonic() + _FINAL_SECONDS
        while time.monotonic() < deadline:
            if why := evaluator.tend():
                logging.error("%s", why)
            if not evaluator.is_running or self._interrupted.is_set() or shard.lost.is_set():
                break
            self._interrupted.wait(0.05)
            self._record_evaluations()
        if evaluator.is_running:
            logging.warning("the evaluator process has not evaluated the final model in time")
        self._record_evaluations()
        self._record_final_of_script()


def end_at_target(run: Run, recorder: Recorder, streams: ShardStreams) -> None:
    """Request the end of the run if the newest evaluation has reached the target metric value."""
    if run.target is not None and recorder.has_reached_target():
        halt = pb.Halt(cause=run.target.stop_reason)
        streams.shards[0].session.send_control(pb.ToServer(halt=halt))
