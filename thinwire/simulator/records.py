"""Writes evaluations, status lines, summary and report of a simulated training run."""

from __future__ import annotations

import dataclasses
import math
import time
from typing import TYPE_CHECKING

import numpy as np
from absl import logging

from thinwire.ops.sharding.split import shard_positions
from thinwire.ops.types import Update
from thinwire.proto import thinwire_pb2 as pb
from thinwire.ps.telemetry.status import StatusReporter
from thinwire.runtime.run.settings import Run
from thinwire.runtime.telemetry import run_status
from thinwire.simulator.simulation import Simulation
from thinwire.supervisor.dashboard import Dashboard
from thinwire.supervisor.flags import SupervisorFlags
from thinwire.supervisor.recorder import Recorder

if TYPE_CHECKING:
    from thinwire.ops.types import Float32

_RECORD_SECONDS = 5.0  # virtual seconds between lines of metrics.jsonl, per 50 workers
#: Number of workers for which _RECORD_SECONDS are added to the time between status lines.
_WORKERS_A_LINE = 50
_PLAIN_LINE_SECONDS = 10.0  # wall-clock seconds between status lines if output is no terminal
_LIVE_SECONDS = 0.5  # wall-clock seconds between updates of the status on a terminal
_SHARE_OF_WORK = 50  # displaying the status takes at most 1/50 of wall-clock time


class SimulationRecords:
    """Writes a Supervisor's records of a simulated run; evaluations take no virtual time.

    Args:
        run: Settings of the simulated run.
        own: Settings of the run's evaluations, with intervals in virtual seconds.
        recorder: `Recorder` that writes the files of the run directory.
        simulation: Simulated run that is recorded.
    """

    def __init__(
        self, run: Run, own: SupervisorFlags, recorder: Recorder, simulation: Simulation
    ) -> None:
        self._run, self._own, self._recorder, self._simulation = run, own, recorder, simulation
        self._boards = [
            StatusReporter(run, shard.status_sources(simulation.spec.num_parameters))
            for shard in simulation.shards
        ]
        self.dashboard = Dashboard()
        self._evaluated = -1  # PS shard 0's version at the last evaluation; -1: none yet
        self._evaluate_at = 0.0
        self._record_at = 0.0
        self._show_at = time.monotonic()

    def keep(self, now: float) -> None:
        """Evaluate, record and display the simulated run at intervals; end it at its target.

        Args:
            now: Current virtual time, in seconds.
        """
        version = self._simulation.shards[0].core.version
        if version != self._evaluated and (now >= self._evaluate_at or self._due(version)):
            self._evaluate_at = now + self._own.eval_interval_seconds
            reached, target = self._evaluate(final=False), self._run.target
            if reached and target and self._simulation.shards[0].core.stop_reason is None:
                self._simulation.stop(target.stop_reason)
        if now >= self._record_at:
            crowd = math.ceil(len(self._simulation.workers) / _WORKERS_A_LINE)
            self._record_at = now + _RECORD_SECONDS * crowd
            self._recorder.status(self._status(None))
            self._record_rounds()
        if time.monotonic() >= self._show_at:
            self._show()

    def _show(self) -> None:
        """Display the simulated run's progress, seldom for many workers, because it takes long."""
        begun = time.monotonic()
        self.dashboard.update(self._status(None), self._recorder.latest)
        pause = _LIVE_SECONDS if self.dashboard.live else _PLAIN_LINE_SECONDS
        now = time.monotonic()
        self._show_at = now + max(pause, _SHARE_OF_WORK * (now - begun))

    def finish(self, reason: str) -> None:
        """Evaluate the run's final model, and write the run's summary and report."""
        self._evaluate(final=reason != "interrupted")
        self._record_rounds()
        self._recorder.finish(self._status(reason))
        logging.info("report: %s", self._run.run_dir / "report" / "index.html")

    def _record_rounds(self) -> None:
        for worker in self._simulation.workers:
            for batch in worker.rounds():
                self._recorder.rounds(worker.number, batch)

    def _due(self, version: int) -> bool:
        interval = self._own.eval_interval_updates
        return interval > 0 and version - max(0, self._evaluated) >= interval

    def _evaluate(self, final: bool) -> bool:
        """Evaluate the current model; return whether the run's target is reached."""
        weights, statistics, versions = self._view()
        self._evaluated = versions[0]
        self._recorder.evaluate(self._status(None), weights, versions, final, statistics)
        return self._recorder.has_reached_target()

    def _view(self) -> tuple[Float32, Float32 | None, list[int]]:
        """Return the weights, averaged statistics or None, and each PS shard's model version."""
        statistics = None
        weights = np.empty(self._simulation.spec.num_parameters, np.float32)
        versions = []
        for shard in self._simulation.shards:
            reply, edges = shard.observe(), shard.layout.offsets
            if not isinstance(reply.update, Update):
                raise TypeError("an evaluation pull is answered with the whole model")
            for slot, where in enumerate(shard_positions(self._simulation.spec, shard.layout)):
                weights[where] = reply.update.values[edges[slot] : edges[slot + 1]]
            versions.append(reply.version)
            statistics = reply.aux if reply.aux is not None else statistics
        return weights, statistics, versions

    def _status(self, reason: str | None) -> run_status.RunStatus:
        first, *followers = self._simulation.shards
        for worker in self._simulation.workers:
            first.reports[(pb.ROLE_WORKER, worker.number)] = worker.report()
        for shard, board in zip(followers, self._boards[1:], strict=True):
            first.reports[(pb.ROLE_SHARD, shard.number)] = board.shard_document()
        status = self._boards[0].status()
        policies = status.policies | {"simulator": dict(self._simulation.own.settings)}
        return dataclasses.replace(
            status, policies=policies, stop_reason=reason or status.stop_reason
        )
