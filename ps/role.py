"""The PS role: build the shard, serve it, save it, end with the right exit code."""

from __future__ import annotations

import dataclasses
import functools
import json
import secrets
import signal
import threading
import time
from collections.abc import Sequence
from typing import Any

from absl import logging

from thinwire.ops.kernels import load_kernels
from thinwire.ops.offer import read_offer
from thinwire.ops.sharding import placement
from thinwire.ops.sharding.split import part_of_layout, shard_spec
from thinwire.ops.sync.base import Draw, SyncPolicy
from thinwire.ops.types import ConfigurationError, State, Update
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.grpc import serve
from thinwire.ps import flags as ps_flags
from thinwire.ps.core import events
from thinwire.ps.core.averages import WorkerAverages
from thinwire.ps.core.core import PsCore
from thinwire.ps.core.members import CoreConfig
from thinwire.ps.core.membership import Coordinator, FollowerMembership, Membership
from thinwire.ps.datagrams.counters import DatagramCounts
from thinwire.ps.flags import PsFlags
from thinwire.ps.persistence.journal import STOP_REASON
from thinwire.ps.persistence.journal_format import EventCoder
from thinwire.ps.persistence.policy import JournalPolicy
from thinwire.ps.persistence.shard_store import SavedShard
from thinwire.ps.scripts.ended_models import EndedModel, EndedModels
from thinwire.ps.scripts.initial_model import InitialModel, model_of_flags, model_of_offer
from thinwire.ps.scripts.offering import NobodyAdmitted, OfferStage, ReceivedOffer
from thinwire.ps.scripts.phases import NextPhase
from thinwire.ps.service import leader_client
from thinwire.ps.service.admission import AdmissionWatch
from thinwire.ps.service.handshake import (
    Identity,
    guard_of,
    hello_to_leader,
    identity,
)
from thinwire.ps.service.leader_client import PHASE, WEIGHTS_DIGEST, LeaderClient
from thinwire.ps.service.server import ShardServer
from thinwire.ps.telemetry.instruments import ShardInstruments
from thinwire.ps.telemetry.status import StatusReporter, StatusSources
from thinwire.ps.telemetry.tensorboard import PsScalars
from thinwire.ps.wire.claims import ClaimBounds
from thinwire.runtime.malloc import return_freed_memory
from thinwire.runtime.persistence.checkpoint import Fenced
from thinwire.runtime.persistence.documents import write_json_atomically
from thinwire.runtime.persistence.places import discard_checkpoints
from thinwire.runtime.run import fingerprint
from thinwire.runtime.run.directory import clear_node, launched_with, scalars_of
from thinwire.runtime.run.draws_file import DrawsFile
from thinwire.runtime.run.finished import SETTINGS, deciding_settings, has_evaluated_summary
from thinwire.runtime.run.groups_file import write_groups
from thinwire.runtime.run.lock import LockOwner
from thinwire.runtime.run.quiet import import_quietly
from thinwire.runtime.run.resuming import OtherRun
from thinwire.runtime.run.settings import (
    EXIT_CONFIGURATION,
    EXIT_DONE,
    EXIT_INTERRUPTED,
    EXIT_OF_STOP,
    EXIT_REFUSED,
    EXIT_UNREACHABLE,
    Run,
)
from thinwire.runtime.run.signals import handle_signals
from thinwire.runtime.run.spill import Spill
from thinwire.runtime.telemetry import run_status

#: How long an interrupted PS, when its run has ended, waits for clients that it sends nothing to.
_INTERRUPTED_LINGER_SECONDS = 1.5


class ShardInitials:
    """Everything that a shard's cores begin with, be it now or in a replay: weights and limits.

    Attributes:
        kernels: The array operations of the cores.
        bounds: Of the numbers that workers of the run may claim.

    Args:
        run: The run's settings.
        id_ps: Of the shard.
        model: Before the first update.
    """

    def __init__(self, run: Run, id_ps: int, model: InitialModel) -> None:
        self.run, self.leads, self.model = run, id_ps == 0, model
        self._layout = model.layouts[id_ps]
        self._budget = run.budget(model.num_examples or 0)
        self.loss_scale = model.offer.loss_scale if model.offer else None
        scales_loss = self.loss_scale is not None
        self.bounds = ClaimBounds.of(
            model.method, model.num_examples, scales_loss, run.guards.measures, run.nb_workers
        )
        # Weights and pushes are numpy's: on a GPU, the whole model would be copied for each push.
        self.kernels = load_kernels(run.kernels)

    def averages(self) -> WorkerAverages:
        """Return the means beside the weights: on shard 0 alone, if there are any."""
        if not self.leads:
            return WorkerAverages()
        num_averaged = self.model.method.num_averaged(self.model.spec.num_parameters)
        return WorkerAverages(self.model.statistics.copy(), num_averaged)

    def config(self, saved: SavedShard, start_timeout_seconds: float) -> CoreConfig:
        """Return the settings of the core that goes on from the saved state.

        A run that goes on waits only as long as workers take to come back. In a later phase their
        scripts wait for each other, of which one joins before the others do.
        """
        run, patience = self.run, start_timeout_seconds
        if saved.phase:
            patience = 0.0
        elif saved.core:
            patience = min(patience, 10.0 + 2 * run.lease_seconds)
        return CoreConfig(
            budget=self._budget,
            schedule=run.schedule,
            nb_workers=run.nb_workers,
            generation=saved.generation,
            generations_undone=saved.generations_undone,
            max_seconds=run.max_seconds if self.leads else None,
            start_timeout_seconds=patience,
            snapshot_interval_seconds=run.checkpoint_interval_seconds,
            spec=shard_spec(self.model.spec, self._layout),
            guards=run.guards,
            loss_scale=self.loss_scale,
            first_batches=self.model.offer.schedule_starts() if self.model.offer else (),
        )


def build_core(
    initials: ShardInitials, config: CoreConfig, lease_seconds: float, is_last: bool = False
) -> PsCore:
    """Return a core at version 0, with weights of its own.

    Args:
        initials: Of its shard.
        config: Of the core.
        lease_seconds: Of its workers.
        is_last: Whether it may have the initial weights themselves, as no other core needs them.
    """
    model = initials.model
    method = model.method
    rule: SyncPolicy = method.sync
    membership: Membership
    if initials.leads:
        membership = Coordinator(config.nb_workers, lease_seconds)
    else:  # permission to proceed is shard 0's alone to give
        membership = FollowerMembership(config.nb_workers, lease_seconds)
        rule = rule.without_bound()
    theta = model.weights if is_last else model.weights.copy()
    averages = initials.averages()
    return PsCore(config, method, theta, initials.kernels, membership, rule, averages)


def main(run: Run) -> int:
    """Serve one shard until the run has ended; return the exit code.

    Raises:
        ConfigurationError: The port is taken, or the run directory holds another run.
        Unreachable, Refused: A following shard cannot join shard 0.
    """
    own = ps_flags.read(run.addresses)
    code = _serve(run, own)
    if code == EXIT_DONE and own.stay:
        _stay(run, own)
    return code


def _stay(run: Run, own: PsFlags) -> None:
    """Keep the port of a finished shard, where nothing is served, until a signal."""
    ended = threading.Event()
    with handle_signals(lambda number, frame: ended.set()):
        listening = serve(own.bind, own.port, lambda stream: stream.close(), guard=guard_of(run))
        logging.info("the run is finished; this process stays until a signal ends it (--stay)")
        ended.wait()
        listening.stop(0.5)


def _serve(run: Run, own: PsFlags) -> int:
    """Serve one shard until the run has ended; return the exit code; raises as `main` does."""
    if run.overwrite:
        _discard(run, own)
    saved, why = SavedShard(run, own.node), ""
    if saved.script_failed and not (run.resume or own.resume_only):
        _discard(run, own)
        saved, why = SavedShard(run, own.node), ", because the script of the run before failed"
    if saved.core is None:
        logging.info("run %s: begins%s", run.run_dir, why)
    if own.resume_only and saved.core is None:
        raise ConfigurationError(
            f"{own.node} was lost, and {saved.where} holds no checkpoint of it here: either it "
            "had written none yet (--checkpoint_interval_seconds), or that folder is on the disk "
            "of the machine that is gone. Expected --checkpoint_dir, or --run_dir on a disk that "
            "all machines have; the same command begins the run again."
        )
    if not run.model_is_offered:
        model = model_of_flags(run, own.id_ps)
        return_freed_memory()  # of the network that was built for it
        return ShardProcess(run, own, model, saved).serve()
    if saved.offer is None:
        if saved.core is not None:
            raise ConfigurationError(
                f"--run_dir={run.run_dir} holds a run whose model came from flags, and this is "
                "--model_from=worker; give it another --run_dir, or --overwrite the old one."
            )
        return _serve_offered(run, own, saved)
    if run.resume and not saved.phase:  # the first offer is of the first phase
        return _serve_offered(run, own, saved)
    if own.preload_keras:
        import_quietly("keras")
    model = saved_model(run, own, saved)
    logging.info("this shard has the model that a worker offered before")
    return ShardProcess(run, own, model, saved).serve()


def saved_model(run: Run, own: PsFlags, saved: SavedShard) -> InitialModel:
    """Return the model that a worker offered, of which a checkpoint has the weights.

    An earlier version may have accepted an offer that this one refuses.

    Raises:
        ConfigurationError: The offer is refused; nothing is deleted.
    """
    try:
        offer = read_offer(saved.offer or "", own.max_model_bytes)
        return model_of_offer(run, own.id_ps, offer, None)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"--run_dir={run.run_dir} holds a model that a worker offered, and this PS cannot "
            f"serve it: {error} Its checkpoints in {saved.where} are kept. Correct what is named, "
            "in the script or in this command; to train a corrected script, give the run another "
            "--run_dir, or --overwrite this one."
        ) from error


def _discard(run: Run, own: PsFlags) -> None:
    """Remove what this shard has kept of a run before."""
    clear_node(run.run_dir, own.node)
    if run.checkpoint_dir is not None:
        discard_checkpoints(run.checkpoint_dir, own.node, str(LockOwner.here("PS", own.id_ps)))


def _serve_offered(run: Run, own: PsFlags, saved: SavedShard) -> int:
    """Wait for a worker that offers the model, then serve it; return the exit code."""
    stage = OfferStage(run, own)
    # Workers of a run that is continued may have been in it.
    stage.identity = dataclasses.replace(stage.identity, run_id=saved.run_id)
    stage.listen()
    if own.preload_keras:
        threading.Thread(target=import_quietly, args=("keras",), name="keras", daemon=True).start()
    try:
        with handle_signals(lambda number, frame: stage.interrupt()):
            shard = start_offered(run, own, saved, stage)
    except NobodyAdmitted as error:
        logging.error("%s", error)
        return EXIT_REFUSED
    if shard is None:
        return EXIT_INTERRUPTED
    with handle_signals(shard.on_signal):
        if stage.interrupted:
            shard.interrupt()
        return shard.run_to_end()


def start_offered(
    run: Run, own: PsFlags, saved: SavedShard, stage: OfferStage
) -> ShardProcess | None:
    """Wait for a worker that offers the model, and start its shard; None: interrupted before.

    Args:
        run: The run's settings.
        own: This shard's.
        saved: Its files, which hold no model.
        stage: That listens.

    Raises:
        NobodyAdmitted: Clients came and were all refused.
        ConfigurationError, Unreachable, RequestRejected: As `ShardProcess.start` does.
    """
    shard: ShardProcess | None = None
    has_started = False
    try:
        while shard is None and (received := stage.next_offer()) is not None:
            shard = _shard_of_offer(run, own, saved, stage, received)
        if shard is not None:
            has_started = shard.start(stage)
    finally:
        stage.close(has_started)
    return shard


def _shard_of_offer(
    run: Run, own: PsFlags, saved: SavedShard, stage: OfferStage, received: ReceivedOffer
) -> ShardProcess | None:
    """Build what a worker has offered, or refuse that."""
    try:
        model = model_of_offer(run, own.id_ps, received.offer, received.payload)
        shard = ShardProcess(run, own, model, saved)
    except OtherRun as error:
        stage.refuse(received, f"{error}", pb.REASON_OTHER_PROGRAM)
        return None
    except Exception as error:  # noqa: BLE001 - Keras raises anything for arguments that are odd
        stage.refuse(received, f"{error}" or type(error).__name__)
        return None
    saved.programs.record(received.worker, received.program)
    return shard


class ShardProcess:
    """One PS process, or the server of a script.

    Args:
        run: The run's settings.
        own: This shard's.
        model: Before the first update.
        saved: The shard's files, if they are read already.
    """

    def __init__(
        self, run: Run, own: PsFlags, model: InitialModel, saved: SavedShard | None = None
    ) -> None:
        self.run, self.own = run, own
        self.leads = own.id_ps == 0
        self._draws = DrawsFile(run.run_dir)
        self.interrupted = False
        self.fenced: Fenced | None = None  # why this process ends alone: a successor is there
        self._flowed = (0, 0.0)  # bytes sent, and when the last were, in seconds after the end
        self._hold(model)
        self.saved = saved or SavedShard(run, own.node)
        self.saved.check(self.spec, self.offer)
        self.phase = self.saved.phase
        self.run_id = self.saved.run_id
        if not self.run_id and self.leads:
            self.run_id = secrets.token_hex(8)
        initials = ShardInitials(run, own.id_ps, model)
        self.keeping = self._keeping(initials)
        self._is_changed = self.saved.changes(self.offer)
        # A journal is replayed by the settings and the optimizer that it was written with.
        make = None if self._is_changed else functools.partial(build_core, initials)
        self.keeping.replay(make)
        self.bounds = initials.bounds
        config = initials.config(self.saved, own.start_timeout_seconds)
        self.core = build_core(initials, config, run.lease_seconds, is_last=True)
        if self.saved.core and self._is_changed:
            self._continue_otherwise(self.saved.core)
        elif self.saved.core:
            self.core.load_state_dict(self.saved.core)

    def _continue_otherwise(self, state: State) -> None:
        """Continue weights and counts of a saved core with other settings (--resume)."""
        begin_again = self.core.continue_from(state, self.saved.has_optimizers_of(self.offer))
        if begin_again:
            logging.warning("--resume: these begin again: %s", ", ".join(begin_again))

    def _hold(self, model: InitialModel) -> None:
        """Take the names and places of a model."""
        self.spec, self.offer, layouts = model.spec, model.offer, model.layouts
        self.layout = layouts[self.own.id_ps]
        for number, layout in enumerate(layouts if self.leads and self.run.nb_ps > 1 else ()):
            logging.info("PS %d holds %s", number, placement.describe_shard(self.spec, layout))
        groups = model.offer.groups() if model.offer else []
        self._groups = [part_of_layout(self.layout, numbers)[1] for numbers in groups]

    def _keeping(self, initials: ShardInitials) -> JournalPolicy:
        model, layout = initials.model, initials.model.layouts[self.own.id_ps]
        averaged = initials.averages().size
        coder = EventCoder(layout, model.method, initials.kernels, averaged)
        return JournalPolicy(self.run, self.own.journal, self.saved, coder, model.spec)

    def serve(self) -> int:
        """Listen and write until the end or a signal; return the exit code."""
        if not self.start():
            return EXIT_DONE
        with handle_signals(self.on_signal):
            return self.run_to_end()

    def start(self, stage: OfferStage | None = None) -> bool:
        """Listen, join shard 0 if this is another; return False if the run is finished.

        Args:
            stage: Whose port to take over; None: take one.
        """
        core = self.core
        finished = None if self.run.resume else self.saved.finished
        if finished:
            logging.info(
                "run %s: this run is finished (%s at version %d)",
                *(self.run.run_dir, finished, core.version),
            )
            return False
        if self.saved.core:
            logging.info("run %s: resumes from update %d", self.run.run_dir, core.version)
        self.saved.on_fenced = self._on_fenced
        self.saved.open()
        self._listen(stage)
        self.keeping.begin(self.server.journaled, self.server.decoder, self.run.lease_seconds)
        self.leader = None if self.leads else self._join_leader()
        self._open()
        self._save(core.version, core.snapshot())  # the new generation must survive a crash
        self.saved.flush()
        return True

    def run_to_end(self) -> int:
        """Be the writer thread until the run has ended; return the exit code."""
        folder = scalars_of(self.run.run_dir, self.own.node)
        bytes_down = self.server.connections.bytes_down
        privacy = self.board.privacy if self.leads else dict
        scalars = PsScalars(folder, self.core, bytes_down, self._received, privacy)
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
        self.interrupted = True  # workers that have not joined by now get no reply any more
        self.server.queue.put(events.Stop("interrupted"))

    def _on_fenced(self, error: Fenced) -> None:
        """End this process, but not the run, which a successor serves (any thread)."""
        self.fenced = error
        self.server.queue.put(lambda: None)  # wakes the writer thread

    # -- start ------------------------------------------------------------------------------

    def _listen(self, stage: OfferStage | None) -> None:
        """Take the port; nobody is let in before `_open`."""
        core, own = self.core, self.own
        self.server = ShardServer(
            core,
            self.layout,
            self._share,
            self._save,
            self.run.lease_seconds,
            self.bounds,
            self._groups,
        )
        self.server.wait_in(Spill(self.run.run_dir))
        if stage is None or stage.listening is None:
            self.server.guard = guard_of(self.run)
            self.port = self.server.listen(own.bind, own.port, self.run.transport.dgt_dscp)
            logging.info("PS %d listens on %s:%d", own.id_ps, own.bind, self.port)
        else:
            self.port = self.server.take_over(stage.listening, stage.guard)
        server = self.server
        server.programs = self.saved.programs
        if self.run.model_is_offered:
            is_agreed = server.scripts.has_begun if self.leads else lambda phase: True
            server.ended_models = EndedModels(self.saved.ended_models())
            server.ended_models.restore(self.saved.since)
            self.phases = server.phases = NextPhase(self._stage_of, is_agreed)
        server.watch = AdmissionWatch(own.start_timeout_seconds, lambda: server.guard.refused)
        sources = StatusSources(
            lambda: server.guard.refused,
            server.journaled.summary,
            lambda: leader_client.figures_are_awaited(server),
            server.scripts.is_running,
        )
        self.board = StatusReporter(self.run, self.spec, core, server, self._received, sources)
        self.server.reports = self.saved.reports
        self.server.connections.restore_bytes_down(self.saved.bytes_down)
        instruments = ShardInstruments(self.server, self.board, self._received)
        self.metrics = instruments.open_port(self.run, own.node)
        if (datagrams := self.server.datagrams) is not None:
            datagrams.receiver.restore(self.saved.datagrams)
            datagrams.open(self.run.transport, own.bind)

    def _join_leader(self) -> LeaderClient:
        leader = LeaderClient(
            self.run.addresses[0],
            self._hello_to_leader(),
            self.layout,
            self.server.queue.put,
            lambda: self.board.shard_document(leader_client.figures_are_final(self.server)),
            self.run.credentials,
            lambda: bool(self.server.connections.workers),
        )
        welcome = leader.connect(self.run.reconnect_timeout_seconds)
        self.run_id = welcome.run_id
        self.server.on_unreachable = leader.report_unreachable
        self.server.journaled.on_failure = lambda: leader.request_end(STOP_REASON)
        leader.follow(self.run.reconnect_timeout_seconds)
        return leader

    def _hello_to_leader(self) -> pb.Hello:
        return hello_to_leader(self._identity(), self.run.addresses[self.own.id_ps])

    def _identity(self) -> Identity:
        return identity(
            self.run_id,
            self.own.id_ps,
            self.run.nb_ps,
            self.core.config.generation,
            fingerprint.fingerprint(self.run, self.offer),
            self.spec,
            fingerprint.shard_settings(self.run, self.offer),
            self.phase,
        )

    def _open(self) -> None:
        self.server.observers.on_status = self.board.document
        self.server.on_groups = self._propose
        if self.leads:
            self.server.on_draws = self._record_draws
        about = self.board.about()
        if self.offer is not None:
            about |= {WEIGHTS_DIGEST: self.offer.weights_digest, PHASE: self.phase}
        self.server.open_for(self._identity(), json.dumps(about))

    def _record_draws(self, draws: Sequence[Draw]) -> None:
        try:
            self._draws.record(draws)
        except OSError as error:  # no reason to end the run either
            logging.warning("%s cannot be written: %s", self._draws.path, error)

    def _propose(self, found: events.GroupsChanged) -> None:
        """Leave groups and shares behind for another run: data are dealt out at the start."""
        if len(found.speeds) < self.run.nb_workers:
            return
        try:
            flags = write_groups(self.run.run_dir, found.groups, found.speeds)
        except OSError as error:  # a full disk is no reason to end the run
            logging.error("cannot write the proposed groups: %s", error)
            return
        logging.info("for another run with shares of data by speed: %s", flags)

    # -- phases of a script -----------------------------------------------------------------

    @property
    def _share(self) -> float:
        return self.layout.size / self.spec.num_parameters

    def _stage_of(self, phase: int) -> OfferStage:
        """Return where the model of the script's next phase is taken (reader threads)."""
        stages: list[OfferStage] = []

        def take(received: ReceivedOffer) -> None:
            self._build_phase(stages[0], received)

        args = (self.run, self.own, phase, self.run_id, self.server.guard, take)
        stages.append(OfferStage.of_phase(*args))
        return stages[0]

    def _build_phase(self, stage: OfferStage, received: ReceivedOffer) -> None:
        """Build what a worker has offered, and have it begin, or refuse it (a reader thread)."""
        try:
            model = model_of_offer(self.run, self.own.id_ps, received.offer, received.payload)
            initials = ShardInitials(self.run, self.own.id_ps, model)
            config = dataclasses.replace(
                initials.config(self.saved, self.own.start_timeout_seconds),
                generation=self.core.config.generation + 1,
                generations_undone=0,
            )
            core = build_core(initials, config, self.run.lease_seconds)
            keeping = self._keeping(initials)
        except Exception as error:  # noqa: BLE001 - Keras raises anything for arguments that are odd
            stage.refuse(received, f"{error}" or type(error).__name__)
            return
        self.server.queue.put(functools.partial(self._begin_phase, stage, initials, core, keeping))

    def _begin_phase(
        self, stage: OfferStage, initials: ShardInitials, core: PsCore, keeping: JournalPolicy
    ) -> None:
        """Go on with another model; workers join again (writer thread)."""
        server, journaled = self.server, self.server.journaled
        if self.core.stop_reason is not None or stage.phase <= self.phase:
            self.phases.close(stage)
            return
        journaled.close()
        model, layout = initials.model, initials.model.layouts[self.own.id_ps]
        before = 0 if self.offer is None else self.offer.succession
        after = 0 if model.offer is None else model.offer.succession
        if (model.spec, layout, after) != (self.spec, self.layout, before):
            self._keep_ended(stage.phase)
        self._hold(initials.model)
        self.phase, self.bounds = stage.phase, initials.bounds
        self.core.begin_phase(core)
        since = server.ended_models.since
        self.saved.begin_phase(self.spec, self.offer, self.phase, since)
        came = self._received()
        server.begin_phase(self.layout, self._share, self.bounds, self._groups)
        if server.datagrams is not None:
            server.datagrams.receiver.restore(came or DatagramCounts())
            server.datagrams.open(self.run.transport, self.own.bind)
        keeping.begin_phase(self.keeping, journaled, server.decoder, self.run.lease_seconds)
        self.keeping = keeping
        self.board.begin_phase(self.spec)
        self._save(self.core.version, self.core.snapshot())
        self.saved.flush()
        self._open()
        if self.leader is not None:
            self.leader.begin_phase(self._hello_to_leader())
        self.phases.close(stage)
        logging.info("phase %d begins at version %d", self.phase, self.core.version)

    def _keep_ended(self, phase: int) -> None:
        """Keep what the present model has ended with: another one's phase begins."""
        ended, whole = self.server.ended_models, self.core.whole()
        whole = dataclasses.replace(whole, update=Update(None, self.core.model.theta.copy()))
        generation = self.core.config.generation
        try:
            ended.add(EndedModel(ended.since, phase - 1, self.layout, generation, whole), phase)
        except OSError as error:  # missed only by a worker that is started again
            logging.error("what phase %d ended with cannot be saved: %s", phase - 1, error)

    # -- running ----------------------------------------------------------------------------

    def _save(self, version: int, state: State) -> None:
        sent = self.server.connections.bytes_down()
        reports, came = self.server.reports.copy(), self._received() or DatagramCounts()
        journaled = self.server.journaled
        state, begun = journaled.consistent(state), journaled.begin()
        logging.debug("handing version %d over to be saved", version)
        self.saved.put(version, state, self.run_id, sent, reports, came, begun)

    def _received(self) -> DatagramCounts | None:
        """Return what has come in datagrams; None where the method sends none."""
        beside = self.server.datagrams
        return beside.counts() if beside is not None else None

    def on_signal(self, number: int, frame: Any) -> None:
        """End the run before its time, by a signal."""
        del frame
        logging.info("%s: stopping", signal.Signals(number).name)
        self.interrupt()

    def _over(self) -> bool:
        """Return whether everybody knows of the end, or had time enough to."""
        connections = self.server.connections
        if self.fenced is not None:
            return True
        if self.core.stop_reason is None:
            return False
        if self.leader is not None and leader_client.figures_are_final(self.server):
            self.leader.report_end()
        if self.interrupted and not self.leads:  # workers go on: what it no longer takes is lost
            return True
        since = time.monotonic() - (self.core.ended_at or 0.0)
        if since >= self.own.linger_seconds or (self.interrupted and self._nothing_flows(since)):
            return True
        waits_for_supervisor = self.leads and not self._had_supervisor() and not self.interrupted
        everyone_left = all(each.left or each.stream.lost for each in connections.everyone())
        patience = self.own.linger_seconds / 3 if waits_for_supervisor else 0.2
        return everyone_left and since >= patience

    def _nothing_flows(self, since: float) -> bool:
        """Return whether nobody has been sent anything for a while, so long after the end.

        A client that is stopped, or whose host has gone, does not leave.
        """
        num_bytes = sum(each.stream.bytes_sent for each in self.server.connections.everyone())
        if num_bytes != self._flowed[0]:
            self._flowed = num_bytes, since
        return since - self._flowed[1] >= _INTERRUPTED_LINGER_SECONDS

    def _had_supervisor(self) -> bool:
        """Return whether the run's Supervisor has come; of an offered model it only looks on."""
        connections = self.server.connections
        looked_on = self.run.model_is_offered and connections.had_onlooker
        return connections.had_supervisor or looked_on

    def _finish(self, leader: LeaderClient | None) -> int:
        reason = self.core.stop_reason or "interrupted"
        if leader is not None:
            leader.close()
        unsaved = self.fenced is not None
        if unsaved:
            logging.error("%s", self.fenced)
            self.server.journaled.close()
        else:
            unsaved = not self._leaves_all_behind()
        if self.server.server is not None:
            self.server.server.stop(0.5)
        if self.server.datagrams is not None:
            self.server.datagrams.close()
        if self.metrics is not None:
            self.metrics.close()
        if leader is not None and leader.lost_for_good:
            return EXIT_UNREACHABLE
        return EXIT_CONFIGURATION if unsaved else EXIT_OF_STOP.get(reason, EXIT_DONE)

    def _leaves_all_behind(self) -> bool:
        """Return whether what the run ended with is saved; logs why not."""
        try:
            self._leave_behind()
        except (ConfigurationError, OSError) as error:
            logging.error("what the run ended with cannot be saved: %s", error)
            return False
        return True

    def _leave_behind(self) -> None:
        """Write the last snapshot, and a summary if nobody else does."""
        self.server.journaled.close()
        self._save(self.core.version, self.core.snapshot())
        try:
            self.saved.flush()
        finally:
            self._sum_up()

    def _sum_up(self) -> None:
        if self.leads and not self._summary_is_written():
            summary = run_status.summarise(self.board.status(), [])
            summary[SETTINGS] = deciding_settings(self.run)
            if self.run.model_is_offered:
                summary |= launched_with(self.run.run_dir)
            write_json_atomically(self.run.run_dir / "summary.json", summary)

    def _summary_is_written(self) -> bool:
        """Whether a Supervisor has written the summary; its report may take longer than we do."""
        if self.server.connections.was_evaluated:
            return True
        return has_evaluated_summary(self.run, self.core.version, self.core.stop_reason)
