"""The PS role: build the shard, serve it, save it, end with the right exit code."""

from __future__ import annotations

import functools
import json
import secrets
import signal
import time
from typing import Any

from absl import logging

from models.shared import SharedModel
from ops import agreement, group_files, metrics, placement, run_dir
from ops.run import (
    EXIT_CONFIGURATION,
    EXIT_DONE,
    EXIT_OF_STOP,
    EXIT_UNREACHABLE,
    Run,
    has_evaluated_summary,
)
from ops.signals import heard_by
from ops.types import ConfigurationError, State
from ps import events, last_reports
from ps import flags as ps_flags
from ps.core_maker import CoreMaker
from ps.datagram_accounts import Received
from ps.flags import PsFlags
from ps.follow import Leader
from ps.handshake import Identity, hello_to_leader, identity
from ps.journal_records import Coder
from ps.journaled import STOP_REASON
from ps.keeping import Keeping
from ps.limits import door_of, most_streams
from ps.meters import ShardMeters
from ps.saved_shard import SavedShard
from ps.scalars import PsScalars
from ps.server import ShardServer
from ps.status import Beside, StatusBoard


def main(run: Run) -> int:
    """Serve one shard until the run has ended; return the exit code.

    Raises:
        ConfigurationError: The port is taken, or the run directory holds another run.
        Unreachable, Refused: A following shard cannot join shard 0.
    """
    own = ps_flags.read(run.addresses)
    if run.overwrite:
        run_dir.clear_node(run.run_dir, _name(own.id_ps))
    return Shard(run, own).serve()


def _name(id_ps: int) -> str:
    return f"ps-{id_ps}"


class Shard:
    """One PS process, or the server of a script.

    Args:
        run: The run's settings.
        own: This shard's.
        shared: The model; built as the run says if not given.
        examples: Size of the training set; counted, where --epochs needs it, if not given.
    """

    def __init__(
        self,
        run: Run,
        own: PsFlags,
        shared: SharedModel | None = None,
        examples: int | None = None,
    ) -> None:
        self.run, self.own = run, own
        self.leads = own.id_ps == 0
        self.interrupted = False
        shared = shared or SharedModel(run.model, run.seed)
        self.spec = shared.spec
        layouts = run.method.placement.place(self.spec, run.nb_ps)
        self.layout = layouts[own.id_ps]
        for number, layout in enumerate(layouts if self.leads and run.nb_ps > 1 else ()):
            logging.info("PS %d holds %s", number, placement.describe_shard(self.spec, layout))
        self.saved = SavedShard(run, _name(own.id_ps), self.spec)
        self.run_id = self.saved.run_id
        if not self.run_id and self.leads:
            self.run_id = secrets.token_hex(8)
        maker = CoreMaker(run, self.leads, shared, self.layout, examples)
        coder = Coder(self.layout, run.method, maker.kernels, maker.aux().size)
        self.keeping = Keeping(run, own.journal, self.saved, coder, self.spec)
        self.keeping.replay(maker.make)
        self.bounds = maker.bounds
        config = maker.config(self.saved, own.start_timeout_seconds)
        self.core = maker.make(config, run.lease_seconds)
        if self.saved.core:
            self.core.restore(self.saved.core)

    def serve(self) -> int:
        """Listen and write until the end or a signal; return the exit code."""
        if not self.start():
            return EXIT_DONE
        with heard_by(self._hear):
            return self.run_to_end()

    def start(self) -> bool:
        """Listen, join shard 0 if this is another; return False if the run is finished."""
        core = self.core
        if finished := self.saved.finished:
            logging.info("this run is finished (%s at version %d)", finished, core.version)
            return False
        self.saved.open()
        self._listen()
        self.keeping.begin(self.server)
        self.leader = None if self.leads else self._join_leader()
        self._open()
        self._save(core.version, core.snapshot())  # the new generation must survive a crash
        self.saved.flush()
        return True

    def run_to_end(self) -> int:
        """Be the writer thread until the run has ended; return the exit code."""
        folder = run_dir.scalars_of(self.run.run_dir, _name(self.own.id_ps))
        bytes_down = self.server.connections.bytes_down
        scalars = PsScalars(folder, self.core, bytes_down, self._received)
        scalars.start()
        try:
            self.server.run_until(self._over)
            return self._finish(self.leader)
        finally:
            scalars.close()

    def interrupt(self) -> None:
        """End the run before its time (any thread); of another shard than 0, this shard alone."""
        if (listening := self.server.server) is not None:
            self.server.queue.put(functools.partial(listening.set_serving, False))
        self.interrupted = True  # who has not come by now was told to stop as well
        self.server.queue.put(events.Stop("interrupted"))

    # -- start ------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Take the port; nobody is let in before `_open`."""
        core, own = self.core, self.own
        share = self.layout.size / self.spec.num_parameters
        self.server = ShardServer(
            core,
            self.layout,
            share,
            self._save,
            self.run.lease_seconds,
            most_streams(self.run),
            self.bounds,
        )
        self.server.door = door_of(self.run)
        server = self.server
        beside = Beside(
            lambda: server.door.refused,
            server.journaled.summary,
            lambda: last_reports.are_awaited(server),
        )
        self.board = StatusBoard(self.run, self.spec, core, server, self._received, beside)
        self.server.reports = self.saved.reports
        self.server.connections.restore_bytes_down(self.saved.bytes_down)
        self.port = self.server.listen(own.bind, own.port, self.run.transport.dgt_dscp)
        logging.info("PS %d listens on %s:%d", own.id_ps, own.bind, self.port)
        meters = ShardMeters(self.server, self.board, self._received)
        self.metrics = meters.open_port(self.run, _name(own.id_ps))
        if (datagrams := self.server.datagrams) is not None:
            datagrams.receptions.restore(self.saved.datagrams)
            datagrams.open(self.run.transport, own.bind)

    def _join_leader(self) -> Leader:
        leader = Leader(
            self.run.addresses[0],
            hello_to_leader(self._identity()),
            self.layout,
            self.server.queue.put,
            lambda: self.board.shard_document(last_reports.are_due(self.server)),
            self.run.credentials,
            lambda: bool(self.server.connections.workers),
        )
        welcome = leader.connect(self.run.reconnect_timeout_seconds)
        self.run_id = welcome.run_id
        self.server.on_missed = leader.miss
        self.server.journaled.on_failure = lambda: leader.ask_for_end(STOP_REASON)
        leader.follow(self.run.reconnect_timeout_seconds)
        return leader

    def _identity(self) -> Identity:
        return identity(
            self.run_id,
            self.own.id_ps,
            self.run.nb_ps,
            self.core.config.generation,
            agreement.fingerprint(self.run),
            self.spec,
            agreement.shard_settings(self.run),
        )

    def _open(self) -> None:
        self.server.observers.on_status = self.board.document
        self.server.on_groups = self._propose
        self.server.open_for(self._identity(), json.dumps(self.board.about()))

    def _propose(self, found: events.Regrouped) -> None:
        """Leave groups and shares behind for another run: data are dealt out at the start."""
        if len(found.speeds) < self.run.nb_workers:
            return
        try:
            flags = group_files.write(self.run.run_dir, found.groups, found.speeds)
        except OSError as error:  # a full disk is no reason to end the run
            logging.error("cannot write the proposed groups: %s", error)
            return
        logging.info("for another run with shares of data by speed: %s", flags)

    # -- running ----------------------------------------------------------------------------

    def _save(self, version: int, state: State) -> None:
        sent = self.server.connections.bytes_down()
        reports, came = self.server.reports.copy(), self._received() or Received()
        journaled = self.server.journaled
        state, begun = journaled.consistent(state), journaled.begin()
        logging.debug("handing version %d over to be saved", version)
        self.saved.put(version, state, self.run_id, sent, reports, came, begun)

    def _received(self) -> Received | None:
        """Return what has come in datagrams; None where the method sends none."""
        beside = self.server.datagrams
        return beside.received() if beside is not None else None

    def _hear(self, number: int, frame: Any) -> None:
        del frame
        logging.info("%s: stopping", signal.Signals(number).name)
        self.interrupt()

    def _over(self) -> bool:
        """Whether everybody has heard of the end, or had time enough to."""
        accounts, connections = self.core.accounts, self.server.connections
        if self.core.stop_reason is None:
            return False
        if self.leader is not None and last_reports.are_due(self.server):
            self.leader.report_end()
        if self.interrupted and not self.leads:  # workers go on: what it no longer takes is lost
            return True
        since = time.monotonic() - (accounts.ended_at or 0.0)
        if since >= self.own.linger_seconds:
            return True
        waits_for_supervisor = (
            self.leads and not connections.had_supervisor and not self.interrupted
        )
        everyone_left = all(each.left or each.stream.lost for each in connections.everyone())
        patience = self.own.linger_seconds / 3 if waits_for_supervisor else 0.2
        return everyone_left and since >= patience

    def _finish(self, leader: Leader | None) -> int:
        reason = self.core.stop_reason or "interrupted"
        if leader is not None:
            leader.close()
        unsaved = False
        try:
            self._leave_behind()
        except (ConfigurationError, OSError) as error:
            unsaved = True
            logging.error("what the run ended with cannot be saved: %s", error)
        if self.server.server is not None:
            self.server.server.stop(0.5)
        if self.server.datagrams is not None:
            self.server.datagrams.close()
        if self.metrics is not None:
            self.metrics.close()
        if leader is not None and leader.lost_for_good:
            return EXIT_UNREACHABLE
        return EXIT_CONFIGURATION if unsaved else EXIT_OF_STOP.get(reason, EXIT_DONE)

    def _leave_behind(self) -> None:
        """Write the last snapshot, and a summary if nobody else does."""
        self.server.journaled.close()
        self._save(self.core.version, self.core.snapshot())
        try:
            self.saved.flush()
        finally:
            self._sum_up()

    def _sum_up(self) -> None:
        if self.leads and not self._is_told_of():
            summary = metrics.summarise(self.board.status(), [])
            metrics.write_json_atomically(self.run.run_dir / "summary.json", summary)

    def _is_told_of(self) -> bool:
        """Whether a Supervisor has written the summary; its report may take longer than we do."""
        if self.server.connections.was_evaluated:
            return True
        return has_evaluated_summary(self.run, self.core.version, self.core.stop_reason)
