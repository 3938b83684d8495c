"""The Supervisor role: follows a run through shard 0, evaluates the model and writes the records.

The training of a run continues if the Supervisor dies. A restarted Supervisor appends to the
existing records of the run.
"""

from __future__ import annotations

import dataclasses
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from absl import logging

from thinwire.data.loading import load_dataset
from thinwire.models.fitting import check_examples
from thinwire.models.flat_model import SharedModel
from thinwire.models.flat_variables import FlatVariables
from thinwire.ops.types import ModelSpec
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.grpc import Unreachable
from thinwire.proto.grpc.session import RequestRejected, payload_limit
from thinwire.proto.metrics_server import open_port
from thinwire.runtime.run.finished import finished_summary
from thinwire.runtime.run.settings import (
    DRAIN_SECONDS,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_OF_STOP,
    Run,
)
from thinwire.runtime.run.signals import handle_signals
from thinwire.runtime.telemetry import run_status
from thinwire.runtime.telemetry.evaluation import latest_until
from thinwire.runtime.telemetry.instruments import Instrument
from thinwire.supervisor import flags as supervisor_flags
from thinwire.supervisor.dashboard import Dashboard
from thinwire.supervisor.evaluator import ModelFetcher
from thinwire.supervisor.instruments import collect
from thinwire.supervisor.publisher import Publisher
from thinwire.supervisor.recorder import Recorder
from thinwire.supervisor.script_evaluations import ScriptEvaluations, end_at_target
from thinwire.supervisor.shard_stream import ShardStream, ShardStreams

if TYPE_CHECKING:
    from thinwire.supervisor.scorer import ModelScorer

_NO_MODEL_BYTES = 1 << 16  # payload limit, in bytes, of a stream that transfers no model
_RECORD_SECONDS = 5.0  # seconds between two status lines in metrics.jsonl
#: Time limit, in seconds, of the wait for the workers' last reports after the run has ended.
_END_SECONDS = 3.0


@dataclasses.dataclass(frozen=True)
class WatchedModel:
    """Model that the Supervisor pulls from the shards and evaluates."""

    spec: ModelSpec
    num_statistics: int  # number of values in the model's moving statistics


def main(run: Run) -> int:
    """Follow the training run until it has ended; return the exit code.

    Raises:
        ConfigurationError: A flag, the data set or the records in the run directory are invalid.
        Unreachable: A shard did not answer within the reconnect timeout.
        RequestRejected: A shard rejected this Supervisor.
    """
    publisher = None
    if run.report_dir is not None:
        publisher = Publisher(run.run_dir, run.report_dir, begins_anew=run.overwrite)
    if not (run.overwrite or run.resume) and (finished := finished_summary(run)):
        logging.info("this run is finished (%s); results in %s", finished, run.run_dir / "report")
        return EXIT_DONE
    model, scorer = (None, None) if run.model_is_offered else _model_of(run)
    recorder = Recorder(run, scorer, publisher)
    return _Watcher(run, model, recorder).watch()


def _model_of(run: Run) -> tuple[WatchedModel, ModelScorer]:
    """Return the model that the flags name, and its scorer on the whole test set."""
    # The imported module loads TensorFlow, so it is imported only if it is needed.
    from thinwire.supervisor.scorer import ModelScorer

    shared = SharedModel(run.model, run.seed)
    if shared.statistics and not run.method.bn_sync:
        logging.warning(
            "--nobn_sync: BatchNorm's moving statistics stay on the workers. The model is "
            "evaluated and saved with the initial statistics, so its accuracy is not meaningful. "
            "Leave out --nobn_sync to evaluate the model with the trained statistics."
        )
    dataset = load_dataset(run.data, run.model, shared.user_module, run.seed, parts=("test",))
    check_examples(shared.model, dataset.test_images, dataset.test_labels, "test")
    model = WatchedModel(shared.spec, FlatVariables(shared.statistics).size)
    return model, ModelScorer(run, shared, dataset.test_images, dataset.test_labels)


class _Watcher:
    """The Supervisor's work on one run: it shows progress, evaluates the model and records results.

    Args:
        run: Settings of the training run.
        model: Model to evaluate; None to follow shard 0 only and evaluate nothing.
        recorder: Object that writes the records of the run.
    """

    def __init__(self, run: Run, model: WatchedModel | None, recorder: Recorder) -> None:
        self.run, self.recorder = run, recorder
        self.own = supervisor_flags.read()
        self._fetcher: ModelFetcher | None = None
        limits, self._tensors = [_NO_MODEL_BYTES], messages.tensors_of(ModelSpec(()))
        if model is not None:
            layouts = run.method.placement.place(model.spec, run.nb_ps)
            in_step = len(run.method.sync.groups) == 1
            self._fetcher = ModelFetcher(model.spec, layouts, model.num_statistics, in_step)
            limits = [payload_limit(layout, model.num_statistics) for layout in layouts]
            self._tensors = messages.tensors_of(model.spec)
        self.interrupted = threading.Event()
        self.streams = ShardStreams(run, self._hello, limits, self.interrupted)
        # A launcher that reads this process's output shows the printed lines as the run's progress.
        is_followed = model is None and not sys.stdout.isatty()
        self.dashboard = Dashboard(_write_line) if is_followed else Dashboard()
        self.run_id = ""
        self.scripts: ScriptEvaluations | None = None
        if run.model_is_offered:
            self.scripts = ScriptEvaluations(run, recorder, self.streams, self.interrupted)
        # Status of the run that the dashboard shows.
        self._shown: run_status.RunStatus | None = None
        self._due = {"show": 0.0, "record": 0.0}

    @property
    def shards(self) -> list[ShardStream]:
        """Streams to the shards, shard 0 first; empty before the first connection."""
        return self.streams.shards

    def watch(self) -> int:
        """Connect to the shards, evaluate the model until the run ends, write the records; return
        the exit code.
        """
        port = open_port(self.run, "supervisor-0", self._instruments)
        with handle_signals(self._interrupt):
            try:
                if self.scripts is not None:
                    self.scripts.evaluator.start()
                self._connect()
                with self.dashboard:
                    self._observe()
                    self._await_last_reports()
                if self.scripts is not None:
                    self.scripts.wait_for_the_last()
                return self._finish()
            except Unreachable:
                if not self.interrupted.is_set():
                    raise
                return EXIT_INTERRUPTED
            finally:
                if self.scripts is not None:
                    self.scripts.evaluator.end()
                self.streams.leave()
                if port is not None:
                    port.close()

    def _instruments(self) -> list[Instrument]:
        status = self.shards[0].status if self.shards else None
        return collect(status, self.recorder.evaluations)

    def _connect(self) -> None:
        """Connect this Supervisor to every shard.

        Raises:
            Unreachable: A shard did not answer within the reconnect timeout.
            RequestRejected: A shard rejects this Supervisor.
        """
        self.streams.connect(self._note_welcome)
        if self.scripts is not None:
            self.scripts.offer(self.scripts.evaluator.why_not)

    def _note_welcome(self, welcome: pb.Welcome) -> None:
        self.run_id = welcome.run_id  # the run's id is sent in the Hello of the next connection

    def _hello(self, shard: int) -> pb.Hello:
        return pb.Hello(
            protocol_version=messages.PROTOCOL_VERSION,
            role=pb.ROLE_SUPERVISOR,
            run_id=self.run_id,
            model=self._tensors,
            shard=shard,
            num_shards=self.run.nb_ps,
        )

    # -- watching ---------------------------------------------------------------------------

    def _observe(self) -> None:
        """Evaluate periodically until the run ends or a lost shard does not reconnect in time."""
        next_at, last_version = time.monotonic(), -1
        while not self._ended():
            if self.streams.is_lost and not self._reconnect():
                return
            self._record_rounds()
            if self.scripts is not None:
                self.scripts.tend()
            status = self.shards[0].status
            if status is not None:
                self._show(status)
                interval = self.own.eval_interval_updates
                due = time.monotonic() >= next_at or (
                    0 < interval <= status.version - max(0, last_version)
                )
                if self._fetcher is not None and due and status.version != last_version:
                    last_version = self._evaluate(status)
                    next_at = time.monotonic() + self.own.eval_interval_seconds
            self.interrupted.wait(0.1)

    def _show(self, status: run_status.RunStatus) -> None:
        """Show the run's newest status on the dashboard and record it, each at an interval of its
        own.
        """
        now = time.monotonic()
        if status is self._shown:
            return
        self._shown = status
        if now >= self._due["show"]:
            evaluation = latest_until(status.version, self.recorder.evaluations)
            self.dashboard.update(status, evaluation)
            pause = 0.0 if self.dashboard.live else self.own.status_interval_seconds
            self._due["show"] = now + pause
        if now >= self._due["record"]:
            self.recorder.status(status)
            self._due["record"] = now + _RECORD_SECONDS

    def _record_rounds(self) -> None:
        while not self.streams.rounds.empty():
            self.recorder.rounds(*self.streams.rounds.get())

    def _ended(self) -> bool:
        self._check_place()
        return self.interrupted.is_set() or bool(self.shards[0].halt_cause)

    def _check_place(self) -> None:
        """Close the records and raise an error if a shard has rejected this Supervisor.

        Raises:
            RequestRejected: A shard rejected this Supervisor, for example because another
                Supervisor follows the run.
        """
        try:
            self.streams.check()
        except RequestRejected:
            self.recorder.close()
            raise

    def _reconnect(self) -> bool:
        self._check_place()
        logging.warning("lost the PS; reconnecting for %g s", self.run.reconnect_timeout_seconds)
        try:
            self._connect()
        except (Unreachable, RequestRejected) as error:
            logging.error("%s", error)
            return False
        return True

    def _evaluate(self, status: run_status.RunStatus, final: bool = False) -> int:
        """Evaluate the model pulled from the shards; return its version, or the status's version if
        the pull failed.
        """
        view = None if self._fetcher is None else self._fetcher.fetch(self.shards)
        if view is None:
            logging.warning(
                "no weights from the PS; model version %d is not evaluated", status.version
            )
            return status.version
        self.recorder.evaluate(status, view.weights, view.versions, final, view.statistics)
        if not final:
            end_at_target(self.run, self.recorder, self.streams)
        return view.versions[0]

    # -- the end ----------------------------------------------------------------------------

    def _finish(self) -> int:
        """Evaluate the final model, write the run's summary and report, return the exit code."""
        cause = self.shards[0].halt_cause
        if not cause and not self.interrupted.is_set():
            logging.error("the PS does not answer, although the run has not ended")
            self._record_rounds()
            self.recorder.close()
            raise Unreachable(f"{self.run.addresses[0]}: the PS does not answer")
        self._record_rounds()
        status = self.shards[0].status
        if status is not None:
            is_reachable = bool(cause) or not self.shards[0].lost.is_set()
            if self._fetcher is not None and is_reachable:
                self._evaluate(status, final=bool(cause))
            status = dataclasses.replace(status, stop_reason=cause or "interrupted")
            self.recorder.finish(status)
            logging.info("report: %s", self.run.run_dir / "report" / "index.html")
        if self.interrupted.is_set():
            return EXIT_INTERRUPTED
        return EXIT_OF_STOP.get(cause, EXIT_DONE)

    def _await_last_reports(self) -> None:
        """Wait until shard 0 has ended the run and sent the workers' last status; show this last
        status.

        If only the Supervisor was interrupted, the run does not end and the wait for the last
        status times out.
        """
        patience = _END_SECONDS + (DRAIN_SECONDS if self.interrupted.is_set() else 0.0)
        deadline = time.monotonic() + patience
        shard = self.shards[0]
        while time.monotonic() < deadline and not shard.lost.is_set():
            status = shard.status
            done = status is not None and status.stop_reason is not None
            everyone = done and status and all(w.state == "done" for w in status.workers)
            if shard.halt_cause and everyone:
                break
            time.sleep(0.1)
        if status := self.shards[0].status:
            self.dashboard.update(status, self.recorder.latest)

    def _interrupt(self, number: int, frame: Any) -> None:
        logging.info("%s: stopping", signal.Signals(number).name)
        self.interrupted.set()


def _write_line(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
