"""The parameter server role: build, serve and save a shard of the model; return an exit code."""

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
from thinwire.ops.sync.base import Draw
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
from thinwire.ps.scripts.offering import NobodyAdmitted, OfferStage
from thinwire.ps.scripts.phases import NextPhase
from thinwire.ps.service import leader_client
from thinwire.ps.service.admission import AdmissionWatch
from thinwire.ps.service.dialogues.offer import ReceivedOffer
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

#: Seconds without sent bytes after which an interrupted PS stops waiting for its clients.
_INTERRUPTED_LINGER_SECONDS = 1.5


class ShardInitials:
    """The initial weights and limits of a shard's state machines, for a new run and for a journal
    replay.

    Attributes:
        leads: True on shard 0, which decides about members and the end of the run.
        loss_scale: Settings of the loss scale in the worker's script; None if the script has no
            LossScaleOptimizer.
        kernels: Implementation of the array operations that the shard's state machines use.
        bounds: Limits of the numbers that workers may report in messages, for example batch sizes.

    Args:
        run: Settings of the training run.
        id_ps: Id of the parameter server shard, from 0.
        model: The shard's model before the first update: variables, weights and layout.
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
        # Pushes arrive and are applied as numpy arrays: a GPU would need a copy of the whole model
        # per push.
        self.kernels = load_kernels(run.kernels)

    def averages(self) -> WorkerAverages:
        """Return the values that shard 0 averages over the workers; empty on all other shards."""
        if not self.leads:
            return WorkerAverages()
        num_averaged = self.model.method.num_averaged(self.model.spec.num_parameters)
        return WorkerAverages(self.model.statistics.copy(), num_averaged)

    def config(self, saved: SavedShard, start_timeout_seconds: float) -> CoreConfig:
        """Return the settings of a shard's state machine that continues from the saved state.

        Args:
            saved: Saved files (checkpoints and journals) of the shard.
            start_timeout_seconds: Time for which a new run waits for all its workers, in seconds.
        """
        # A resumed run waits for its workers only as long as they need to reconnect. A later phase
        # (model) of a script does not wait for all workers: the first worker must join before the
        # scripts of the other workers continue.
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
    """Return a shard's state machine at version 0, with a copy of the initial weights.

    Args:
        initials: Initial weights and limits of the shard's state machine.
        config: Settings of the shard's state machine, except the training method.
        lease_seconds: Time in seconds without a message of a worker, after which the worker is
            expelled.
        is_last: True if no other state machine needs the initial weights, so that this state
            machine takes the array of weights without a copy.
    """
    model = initials.model
    method = model.method
    membership: Membership
    if initials.leads:
        membership = Coordinator(config.nb_workers, lease_seconds)
    else:
        membership = FollowerMembership(config.nb_workers, lease_seconds)
    theta = model.weights if is_last else model.weights.copy()
    averages = initials.averages()
    return PsCore(config, method, theta, initials.kernels, membership, averages)


def main(run: Run) -> int:
    """Serve one shard of the parameter server until the run has ended; return the exit code.

    Raises:
        ConfigurationError: The port is in use, or the run directory holds another run.
        Unreachable, Refused: A shard with id 1 or higher cannot connect to shard 0, or shard 0
            refuses it.
    """
    settings = ps_flags.read(run.addresses)
    code = _serve(run, settings)
    if code == EXIT_DONE and settings.stay:
        _stay(run, settings)
    return code


def _stay(run: Run, own: PsFlags) -> None:
    """Keep a finished shard's network port open until a signal arrives; close all clients'
    streams.
    """
    ended = threading.Event()
    with handle_signals(lambda number, frame: ended.set()):
        listening = serve(own.bind, own.port, lambda stream: stream.close(), guard=guard_of(run))
        logging.info("the run is finished; --stay keeps this PS running until it receives a signal")
        ended.wait()
        listening.stop(0.5)


def _serve(run: Run, own: PsFlags) -> int:
    """Serve one shard like `main`, but ignore the flag --stay; return the exit code."""
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
            f"the node {own.node} was lost, but {saved.where} on this machine has no checkpoint of "
            "the node: either none was written yet (--checkpoint_interval_seconds), or it is on "
            "the disk of the lost machine. Expected --checkpoint_dir, or --run_dir on a disk that "
            "all machines share; the same command begins the run again."
        )
    if not run.model_is_offered:
        model = model_of_flags(run, own.id_ps)
        return_freed_memory()  # free the memory of the Keras network from which the model was built
        return ShardProcess(run, own, model, saved).serve()
    if saved.offer is None:
        if saved.core is not None:
            raise ConfigurationError(
                f"--run_dir={run.run_dir} contains a run whose model came from flags, but this run "
                "has --model_from=worker; give it another --run_dir, or --overwrite the old run."
            )
        return _serve_offered(run, own, saved)
    # With --resume, workers offer the model of phase 0 (the script's first model) again.
    if run.resume and not saved.phase:
        return _serve_offered(run, own, saved)
    if own.preload_keras:
        import_quietly("keras")
    model = saved_model(run, own, saved)
    logging.info("this PS shard loads the model that a worker sent before the shard's restart")
    return ShardProcess(run, own, model, saved).serve()


def saved_model(run: Run, own: PsFlags, saved: SavedShard) -> InitialModel:
    """Build the model from a saved description; leave out the weights, which the checkpoint holds.

    Raises:
        ConfigurationError: This version of Thinwire refuses the saved description of a script's
            model, although an earlier version accepted the description. In this case no file of the
            run is deleted.
    """
    try:
        offer = read_offer(saved.offer or "", own.max_model_bytes)
        return model_of_offer(run, own.id_ps, offer, None)
    except ConfigurationError as error:
        raise ConfigurationError(
            f"--run_dir={run.run_dir} contains a model from a worker, but this PS cannot serve "
            f"the model: {error} The model's checkpoints in {saved.where} are kept. Correct the "
            "problem in the script or in this command; to train a corrected script, give the run "
            "another --run_dir, or --overwrite this one."
        ) from error


def _discard(run: Run, own: PsFlags) -> None:
    """Delete the files and checkpoints that this shard has stored in an earlier run."""
    clear_node(run.run_dir, own.node)
    if run.checkpoint_dir is not None:
        discard_checkpoints(run.checkpoint_dir, own.node, str(LockOwner.here("PS", own.id_ps)))


def _serve_offered(run: Run, own: PsFlags, saved: SavedShard) -> int:
    """Wait for a worker's offered model, then serve that model; return the exit code."""
    stage = OfferStage(run, own)
    # Workers that took part before a --resume send the id of the saved run.
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
    """Wait for a worker that offers its script's model, and start a shard with that model.

    Args:
        run: Settings of the training run.
        own: Settings of this PS shard from its command-line flags.
        saved: Saved files of the shard, which contain no model to continue.
        stage: Open network port at which workers offer (send) their model to the shard.

    Returns:
        The started shard, or None if this process was interrupted first.

    Raises:
        NobodyAdmitted: The shard has refused all clients that connected.
        ConfigurationError, Unreachable, RequestRejected: `ShardProcess.start` could not start the
            shard.
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
    """Build the shard for a worker's offered model; on failure refuse the offer and return None."""
    try:
        model = model_of_offer(run, own.id_ps, received.offer, received.payload)
        shard = ShardProcess(run, own, model, saved)
    except OtherRun as error:
        stage.refuse(received, f"{error}", pb.REASON_OTHER_PROGRAM)
        return None
    except Exception as error:  # noqa: BLE001 - Keras raises any type for odd arguments
        stage.refuse(received, f"{error}" or type(error).__name__)
        return None
    saved.programs.record(received.worker, received.program)
    return shard


class ShardProcess:
    """One parameter server shard of a run, from loading its saved state to the end of the run.

    A parameter server shard runs in a process of its own, or within a worker's script.

    Args:
        run: Settings of the training run.
        own: Settings of this PS shard from its command-line flags.
        model: The shard's model before the first update: variables, weights and layout.
        saved: Saved files of the shard; None to read the files from the run directory.
    """

    def __init__(
        self, run: Run, own: PsFlags, model: InitialModel, saved: SavedShard | None = None
    ) -> None:
        self.run, self.own = run, own
        self.leads = own.id_ps == 0
        self._draws = DrawsFile(run.run_dir)
        self.interrupted = False
        # Event that is set when another process has taken over this shard.
        self.fenced: Fenced | None = None
        # Number of bytes sent to all clients, and the time of the number's last change in seconds
        # after the run's end.
        self._flowed = (0, 0.0)
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
        # A journal holds pushes, not weights. A replay with other settings or another optimizer
        # would produce weights that the run never had. With changed settings the shard therefore
        # continues from its checkpoint and ignores the journal.
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
        """Continue a saved shard's weights and counters with changed settings (--resume)."""
        begin_again = self.core.continue_from(state, self.saved.has_optimizers_of(self.offer))
        if begin_again:
            logging.warning("--resume: PS state that begins again: %s", ", ".join(begin_again))

    def _hold(self, model: InitialModel) -> None:
        """Store a model's variables, description and shard layout, and each optimizer's variable
        slices.
        """
        self.spec, self.offer, layouts = model.spec, model.offer, model.layouts
        self.layout = layouts[self.own.id_ps]
        for number, layout in enumerate(layouts if self.leads and self.run.nb_ps > 1 else ()):
            logging.info("PS shard %d has %s", number, placement.describe_shard(self.spec, layout))
        groups = model.offer.groups() if model.offer else []
        self._groups = [part_of_layout(self.layout, numbers)[1] for numbers in groups]

    def _keeping(self, initials: ShardInitials) -> JournalPolicy:
        model, layout = initials.model, initials.model.layouts[self.own.id_ps]
        averaged = initials.averages().size
        coder = EventCoder(layout, model.method, initials.kernels, averaged)
        return JournalPolicy(self.run, self.own.journal, self.saved, coder, model.spec)

    def serve(self) -> int:
        """Serve the shard until the run ends or a signal arrives; return the exit code."""
        if not self.start():
            return EXIT_DONE
        with handle_signals(self.on_signal):
            return self.run_to_end()

    def start(self, stage: OfferStage | None = None) -> bool:
        """Open the port. At its start, a shard with id 1 or higher connects to shard 0.

        Args:
            stage: Object that has received the model from a worker and whose open network port the
                shard takes over; None to open a new port.

        Returns:
            False if the run is already finished, so that no client must be served.
        """
        core = self.core
        finished = None if self.run.resume else self.saved.finished
        if finished:
            logging.info(
                "run %s: this run is finished (%s, at model version %d)",
                *(self.run.run_dir, finished, core.version),
            )
            return False
        if self.saved.core:
            logging.info("run %s: the PS resumes from update %d", self.run.run_dir, core.version)
        self.saved.on_fenced = self._on_fenced
        self.saved.open()
        self._listen(stage)
        self.keeping.begin(self.server.journaled, self.server.decoder, self.run.lease_seconds)
        self.leader = None if self.leads else self._join_leader()
        self._open()
        # The new generation (restart count) must be on disk before the writer thread applies a
        # push. Otherwise a restart after a crash could use the same generation again for other
        # weights.
        self._save(core.version, core.snapshot())
        self.saved.flush()
        return True

    def run_to_end(self) -> int:
        """Run the writer thread's loop until the run has ended; return the exit code."""
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
        """End the run early if this shard is shard 0, else end only this shard; callable from any
        thread.
        """
        if (listening := self.server.server) is not None:
            self.server.queue.put(functools.partial(listening.set_serving, False))
        self.interrupted = True  # from now on, workers that have not joined the run get no reply
        self.server.queue.put(events.Stop("interrupted"))

    def _on_fenced(self, error: Fenced) -> None:
        """End this process, because another process has taken over its shard; callable from any
        thread.
        """
        self.fenced = error
        self.server.queue.put(lambda: None)  # a function that does nothing wakes the writer thread

    # -- start of the shard -----------------------------------------------------------------

    def _listen(self, stage: OfferStage | None) -> None:
        """Open the network port of the parameter server shard. The shard's network server admits no
        client before `_open` is called.
        """
        core, settings = self.core, self.own
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
            self.port = self.server.listen(
                settings.bind, settings.port, self.run.transport.dgt_dscp
            )
            logging.info("PS shard %d listens on %s:%d", settings.id_ps, settings.bind, self.port)
        else:
            self.port = self.server.take_over(stage.listening, stage.guard)
        server = self.server
        server.programs = self.saved.programs
        if self.run.model_is_offered:
            is_agreed = server.scripts.has_begun if self.leads else lambda phase: True
            server.ended_models = EndedModels(self.saved.ended_models())
            server.ended_models.restore(self.saved.since)
            self.phases = server.phases = NextPhase(self._stage_of, is_agreed)
        server.watch = AdmissionWatch(settings.start_timeout_seconds, lambda: server.guard.refused)
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
        self.metrics = instruments.open_port(self.run, settings.node)
        if (datagrams := self.server.datagrams) is not None:
            datagrams.receiver.restore(self.saved.datagrams)
            datagrams.open(self.run.transport, settings.bind)

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
        if self.leads and self.run.method.sync.draws_workers:
            self.server.on_draws = self._record_draws
        about = self.board.about()
        if self.offer is not None:
            about |= {WEIGHTS_DIGEST: self.offer.weights_digest, PHASE: self.phase}
        self.server.open_for(self._identity(), json.dumps(about))

    def _record_draws(self, draws: Sequence[Draw]) -> None:
        try:
            self._draws.record(draws)
        except OSError as error:  # a full disk must not end the run
            logging.warning("the file %s cannot be written: %s", self._draws.path, error)

    def _propose(self, found: events.GroupsChanged) -> None:
        """Write the groups of workers that shard 0 has measured to the run directory.

        A later run can use the worker groups that shard 0 has formed from measured speeds. A run
        does not use the worker groups that it writes, because it splits the data at its start.
        """
        if len(found.speeds) < self.run.nb_workers:
            return
        try:
            flags = write_groups(self.run.run_dir, found.groups, found.speeds)
        except OSError as error:  # a full disk must not end the run
            logging.error("cannot write the file with the proposed worker groups: %s", error)
            return
        logging.info("flags that divide a later run's data by the workers' speed: %s", flags)

    # -- phases (models) of a script --------------------------------------------------------

    @property
    def _share(self) -> float:
        return self.layout.size / self.spec.num_parameters

    def _stage_of(self, phase: int) -> OfferStage:
        """Return the object that receives the script's next model (called on reader threads)."""
        stages: list[OfferStage] = []

        def take(received: ReceivedOffer) -> None:
            self._build_phase(stages[0], received)

        args = (self.run, self.own, phase, self.run_id, self.server.guard, take)
        stages.append(OfferStage.of_phase(*args))
        return stages[0]

    def _build_phase(self, stage: OfferStage, received: ReceivedOffer) -> None:
        """Build the script's next model, which a worker offers, or refuse the offer.

        The model that a worker offers is built on the thread that reads this worker's stream.
        """
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
        except Exception as error:  # noqa: BLE001 - Keras raises any type for odd arguments
            stage.refuse(received, f"{error}" or type(error).__name__)
            return
        self.server.queue.put(functools.partial(self._begin_phase, stage, initials, core, keeping))

    def _begin_phase(
        self, stage: OfferStage, initials: ShardInitials, core: PsCore, keeping: JournalPolicy
    ) -> None:
        """Replace the shard's model by the script's next model.

        The shard's model is replaced on the writer thread. After the shard has replaced its model
        by the script's next model, the workers join the run again.
        """
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
        received = self._received()
        server.begin_phase(self.layout, self._share, self.bounds, self._groups)
        if server.datagrams is not None:
            server.datagrams.receiver.restore(received or DatagramCounts())
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
        logging.info("run phase %d begins at model version %d", self.phase, self.core.version)

    def _keep_ended(self, phase: int) -> None:
        """Store the final state of the current model before phase `phase` replaces it by another
        model.
        """
        ended, whole = self.server.ended_models, self.core.whole()
        whole = dataclasses.replace(whole, update=Update(None, self.core.model.theta.copy()))
        generation = self.core.config.generation
        try:
            ended.add(EndedModel(ended.since, phase - 1, self.layout, generation, whole), phase)
        # the run continues: only a restarted worker would need the saved model
        except OSError as error:
            logging.error("the final model of run phase %d cannot be saved: %s", phase - 1, error)

    # -- the running shard ------------------------------------------------------------------

    def _save(self, version: int, state: State) -> None:
        sent = self.server.connections.bytes_down()
        reports, received = self.server.reports.copy(), self._received() or DatagramCounts()
        journaled = self.server.journaled
        state, begun = journaled.consistent(state), journaled.begin()
        logging.debug("queueing a checkpoint of version %d", version)
        self.saved.put(version, state, self.run_id, sent, reports, received, begun)

    def _received(self) -> DatagramCounts | None:
        """Return the counts of received UDP datagrams; None if the training method sends no
        datagrams.
        """
        port = self.server.datagrams
        return port.counts() if port is not None else None

    def on_signal(self, number: int, frame: Any) -> None:
        """End the run early because this process has received a signal."""
        logging.info("%s: stopping", signal.Signals(number).name)
        self.interrupt()

    def _over(self) -> bool:
        """Return True if every client knows of the run's end, or the wait for them has timed
        out.
        """
        connections = self.server.connections
        if self.fenced is not None:
            return True
        if self.core.stop_reason is None:
            return False
        if self.leader is not None and leader_client.figures_are_final(self.server):
            self.leader.report_end()
        # A signal to a following shard (id 1 and up) does not end the run. The workers of the run
        # continue and do not leave, so the shard waits for no client.
        if self.interrupted and not self.leads:
            return True
        since = time.monotonic() - (self.core.ended_at or 0.0)
        if since >= self.own.linger_seconds or (self.interrupted and self._nothing_flows(since)):
            return True
        waits_for_supervisor = self.leads and not self._had_supervisor() and not self.interrupted
        everyone_left = all(client.left or client.stream.lost for client in connections.everyone())
        patience = self.own.linger_seconds / 3 if waits_for_supervisor else 0.2
        return everyone_left and since >= patience

    def _nothing_flows(self, since: float) -> bool:
        """Return True if no bytes were sent to any client for `_INTERRUPTED_LINGER_SECONDS`.

        A client that is suspended, or whose host is lost, never disconnects, so waiting longer for
        this client is useless.

        Args:
            since: Time since the end of the run, in seconds.
        """
        num_bytes = sum(client.stream.bytes_sent for client in self.server.connections.everyone())
        if num_bytes != self._flowed[0]:
            self._flowed = num_bytes, since
        return since - self._flowed[1] >= _INTERRUPTED_LINGER_SECONDS

    def _had_supervisor(self) -> bool:
        """Return True if the run's Supervisor has connected.

        If workers send the model, even a Supervisor that only reads the run's status counts as
        connected.
        """
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
        """Save the shard's state when the training run has ended. If the shard's final state cannot
        be saved, `_leaves_all_behind` logs the reason and returns False.
        """
        try:
            self._leave_behind()
        except (ConfigurationError, OSError) as error:
            logging.error("the final state of the run cannot be saved: %s", error)
            return False
        return True

    def _leave_behind(self) -> None:
        """Write the last checkpoint, and the run's summary if no Supervisor writes the summary."""
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
        """Return True if a Supervisor has written the summary of the finished run."""
        if self.server.connections.was_evaluated:
            return True
        # The Supervisor's report may not have arrived yet, so look for its summary file, too.
        return has_evaluated_summary(self.run, self.core.version, self.core.stop_reason)
