"""One PS shard while it serves: from the opening of its port to its exit code.

Theory of operation: `ShardProcess.open` takes a `PreparedShard`, opens the port, connects a shard
with id 1 or higher to shard 0, admits clients, and saves the first checkpoint. `run_to_end` then
runs the writer thread's loop, which alone changes the shard's state. What depends on the model of
the current phase is in one object, `ShardServer.served`; `PhaseChange` replaces it.
"""

from __future__ import annotations

import functools
import signal
from typing import Any

from absl import logging

from thinwire.ops.types import ConfigurationError, State
from thinwire.ps.core import events
from thinwire.ps.core.core import PsCore
from thinwire.ps.datagrams.counters import DatagramCounts
from thinwire.ps.persistence.journal import STOP_REASON
from thinwire.ps.persistence.shard_checkpoint import ShardCheckpoint
from thinwire.ps.scripts.ended_models import EndedModels
from thinwire.ps.scripts.offering import OfferStage
from thinwire.ps.service import leader_client
from thinwire.ps.service.admission import AdmissionWatch
from thinwire.ps.service.handshake import guard_of
from thinwire.ps.service.served_model import ServedModel
from thinwire.ps.service.server import ShardServer
from thinwire.ps.service.state import ServerHooks
from thinwire.ps.shard.introduction import Introduction
from thinwire.ps.shard.linger import Linger
from thinwire.ps.shard.next_phase import PhaseChange
from thinwire.ps.shard.preparation import PreparedShard
from thinwire.ps.shard.run_records import RunRecords
from thinwire.ps.telemetry.instruments import ShardInstruments
from thinwire.ps.telemetry.status import StatusReporter, StatusSources
from thinwire.ps.telemetry.tensorboard import PsScalars
from thinwire.runtime.persistence.checkpoint_log import Fenced
from thinwire.runtime.run.directory import scalars_of
from thinwire.runtime.run.settings import (
    EXIT_CONFIGURATION,
    EXIT_DONE,
    EXIT_OF_STOP,
    EXIT_UNREACHABLE,
)
from thinwire.runtime.run.spill import Spill


class ShardProcess:
    """One parameter server shard of a run that serves clients; `open` returns a whole one.

    A parameter server shard runs in a process of its own, or within a worker's script.

    Attributes:
        server: Network server of the shard, with the model that it serves.
        port: Number of the TCP port of the server.
        interrupted: True if a signal has ended this shard.
        fenced: Error that another process has taken over this shard; None if no process has.

    Args:
        prepared: The shard with its restored state.
        stage: Object that has received the model from a worker and whose open network port the
            shard takes over; None to open a new port.
    """

    def __init__(self, prepared: PreparedShard, stage: OfferStage | None) -> None:
        run, own, saved = prepared.run, prepared.own, prepared.saved
        self._run, self._own, self._saved = run, own, saved
        self._leads = own.id_ps == 0
        self.interrupted = False
        self.fenced: Fenced | None = None
        self._records = RunRecords(run)
        saved.open(self._on_fenced)
        listening = None if stage is None else stage.listening
        guard = guard_of(run) if stage is None or listening is None else stage.guard
        kept = saved.ended_models() if run.model_is_offered else None
        self.server = ShardServer(
            prepared.served,
            run.lease_seconds,
            self._hooks(),
            guard=guard,
            programs=saved.programs,
            ended_models=EndedModels(kept, saved.last.since),
            reports=dict(saved.last.reports),
            watch=AdmissionWatch(own.start_timeout_seconds, lambda: guard.refused),
            spill=Spill(run.run_dir),
        )
        if listening is None:
            self.port = self.server.listen(own.bind, own.port, run.transport.dgt_dscp)
            logging.info("PS shard %d listens on %s:%d", own.id_ps, own.bind, self.port)
        else:
            self.port = self.server.take_over(listening)
        self._board = StatusReporter(run, self._status_sources())
        self.server.connections.restore_bytes_down(saved.last.bytes_down)
        instruments = ShardInstruments(self.server, self._board, self.server.received)
        self._metrics = instruments.open_port(run, own.node)
        if (datagrams := self.server.datagrams) is not None:
            datagrams.receiver.restore(saved.last.datagrams)
            datagrams.open(run.transport, own.bind)
        introduction = Introduction(run, own, self.server, self._board, prepared.run_id)
        self._introduction = introduction
        self._linger = Linger(own, self.server, introduction.leader, run.model_is_offered)
        if run.model_is_offered:
            parts = run, own, saved, self.server, introduction, self._save_now
            self.server.phases = PhaseChange(*parts)

    @classmethod
    def open(cls, prepared: PreparedShard, stage: OfferStage | None = None) -> ShardProcess | None:
        """Open the port, connect to shard 0, admit clients, and save the shard's first state.

        Args:
            prepared: The shard with its restored state.
            stage: Object that has received the model from a worker and whose open network port the
                shard takes over; None to open a new port.

        Returns:
            The serving shard; None if the run is already finished, so that no client must be
            served.

        Raises:
            ConfigurationError: The port is in use, or the first state cannot be saved.
            Unreachable, RequestRejected: A shard with id 1 or higher cannot connect to shard 0, or
                shard 0 rejects it.
        """
        run, core = prepared.run, prepared.served.core
        if (finished := prepared.finished()) is not None:
            logging.info(
                "run %s: this run is finished (%s, at model version %d)",
                *(run.run_dir, finished, core.version),
            )
            return None
        if prepared.saved.last.core:
            logging.info("run %s: the PS resumes from update %d", run.run_dir, core.version)
        shard = cls(prepared, stage)
        server = shard.server
        prepared.keeping.begin(server.journaled, server.served.decoder, run.lease_seconds)
        shard._introduction.join_leader()
        shard._introduction.admit()
        # The new generation (restart count) must be on disk before the writer thread applies a
        # push. Otherwise a restart after a crash could use the same generation again for other
        # weights.
        shard._save_now()
        return shard

    @property
    def served(self) -> ServedModel:
        """The model that the shard serves in the current phase."""
        return self.server.served

    @property
    def run_id(self) -> str:
        """Random identifier of the run."""
        return self._introduction.run_id

    @property
    def core(self) -> PsCore:
        """State machine of the shard in the current phase."""
        return self.server.core

    def run_to_end(self) -> int:
        """Run the writer thread's loop until the run has ended; return the exit code."""
        server, folder = self.server, scalars_of(self._run.run_dir, self._own.node)
        privacy = self._board.privacy if self._leads else dict
        scalars = PsScalars(
            folder, lambda: server.core, server.connections.bytes_down, server.received, privacy
        )
        scalars.start()
        try:
            server.run_until(self._over)
            return self._finish()
        finally:
            scalars.close()

    def on_signal(self, number: int, frame: Any) -> None:
        """End the run early because this process has received a signal."""
        logging.info("%s: stopping", signal.Signals(number).name)
        self.interrupt()

    def interrupt(self) -> None:
        """End the run early if this shard is shard 0, else end only this shard; callable from any
        thread.
        """
        if (listening := self.server.server) is not None:
            self.server.queue.put(functools.partial(listening.set_serving, False))
        self.interrupted = True  # from now on, workers that have not joined the run get no reply
        self.server.queue.put(events.Stop("interrupted"))

    # -- collaborators of the server --------------------------------------------------------

    def _hooks(self) -> ServerHooks:
        draws = self._leads and self._run.method.sync.draws_workers
        return ServerHooks(
            save=self._save,
            status=lambda: self._board.document(),
            on_groups=self._records.propose_groups,
            on_draws=self._records.record_draws if draws else lambda draws: None,
            on_unreachable=self._report_unreachable,
            on_journal_failed=self._request_end,
        )

    def _status_sources(self) -> StatusSources:
        server = self.server
        return StatusSources(
            core=lambda: server.core,
            num_parameters=lambda: server.served.spec.num_parameters,
            run_id=lambda: server.identity.run_id if server.identity else "",
            bytes_down=server.connections.bytes_down,
            reports=lambda: server.reports,
            received=server.received,
            refused_peers=lambda: server.guard.refused,
            journal=server.journaled.summary,
            awaits=lambda: leader_client.figures_are_awaited(server),
            runs_script=server.scripts.is_running,
        )

    def _report_unreachable(self, action: events.WorkersUnreachable) -> None:
        if (leader := self._introduction.leader) is not None:
            leader.report_unreachable(action)

    def _request_end(self) -> None:
        if (leader := self._introduction.leader) is not None:
            leader.request_end(STOP_REASON)

    def _on_fenced(self, error: Fenced) -> None:
        """End this process, because another process has taken over its shard; callable from any
        thread.
        """
        self.fenced = error
        self.server.queue.put(lambda: None)  # a function that does nothing wakes the writer thread

    # -- saving and the end -----------------------------------------------------------------

    def _save(self, version: int, state: State) -> None:
        server = self.server
        state, begun = server.journaled.consistent(state), server.journaled.begin()
        logging.debug("queueing a checkpoint of version %d", version)
        contents = ShardCheckpoint(
            core=state,
            run_id=self.run_id,
            bytes_down=server.connections.bytes_down(),
            reports=server.reports.copy(),
            datagrams=server.received() or DatagramCounts(),
            **begun,
        )
        self._saved.put(version, server.served.described(contents))

    def _save_now(self) -> None:
        """Save the shard's state, and wait until it is on disk.

        Raises:
            ConfigurationError: The state cannot be saved.
        """
        self._save(self.server.core.version, self.server.core.snapshot())
        self._saved.flush()

    def _over(self) -> bool:
        """Return True if this shard may stop serving."""
        return self.fenced is not None or self._linger.is_over(self.interrupted)

    def _finish(self) -> int:
        server, leader = self.server, self._introduction.leader
        reason = server.core.stop_reason or "interrupted"
        if leader is not None:
            leader.close()
        unsaved = self.fenced is not None
        if unsaved:
            logging.error("%s", self.fenced)
            server.journaled.close()
        else:
            unsaved = not self._leaves_all_behind()
        if server.server is not None:
            server.server.stop(0.5)
        if server.datagrams is not None:
            server.datagrams.close()
        if self._metrics is not None:
            self._metrics.close()
        if leader is not None and leader.lost_for_good:
            return EXIT_UNREACHABLE
        return EXIT_CONFIGURATION if unsaved else EXIT_OF_STOP.get(reason, EXIT_DONE)

    def _leaves_all_behind(self) -> bool:
        """Save the final state, and the summary if no Supervisor writes it. If the final state
        cannot be saved, `_leaves_all_behind` logs the reason and returns False.
        """
        try:
            self.server.journaled.close()
            try:
                self._save_now()
            finally:
                self._sum_up()
        except (ConfigurationError, OSError) as error:
            logging.error("the final state of the run cannot be saved: %s", error)
            return False
        return True

    def _sum_up(self) -> None:
        core = self.server.core
        # The Supervisor's report may not have arrived yet, so look for its summary file, too.
        was_evaluated = self.server.connections.was_evaluated
        if self._leads and not (
            was_evaluated or self._records.has_summary(core.version, core.stop_reason)
        ):
            self._records.write_summary(self._board.status())
