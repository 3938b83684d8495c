"""Replaces the model that a shard serves by the script's next model.

A change of the phase takes three steps. `PhaseChange.admission` returns the admission of workers
that may send the next model. `_build` makes the next `ServedModel` on the thread that reads this
worker's stream, while the shard serves the current model. `_begin` replaces the current
`ServedModel` on the writer thread. The shard handles no event while `_begin` runs, so no push,
reply, checkpoint or journal record sees a part of two phases.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Callable

from absl import logging

from thinwire.ops.types import Update
from thinwire.ps.flags import PsFlags
from thinwire.ps.persistence.policy import JournalPolicy
from thinwire.ps.persistence.shard_store import SavedShard
from thinwire.ps.scripts.ended_models import EndedModel
from thinwire.ps.scripts.initial_model import InitialModel, model_of_offer
from thinwire.ps.scripts.offering import OfferAdmission, OfferStage
from thinwire.ps.service.dialogues.offer import ReceivedOffer
from thinwire.ps.service.served_model import ServedModel
from thinwire.ps.service.server import ShardServer
from thinwire.ps.shard.introduction import Introduction
from thinwire.ps.shard.preparation import ShardInitials, build_core, log_placement
from thinwire.runtime.run.settings import Run


@dataclasses.dataclass(frozen=True)
class BuiltPhase:
    """A script's next model that a worker has sent and the shard has built, but does not serve yet.

    Attributes:
        stage: Object that has received the model and holds the streams of waiting workers.
        initial: The model before the first update, with the layouts of all shards.
        served: The model as clients will be served with it.
        keeping: Policy that decides whether the shard writes a journal for the model.
    """

    stage: OfferStage
    initial: InitialModel
    served: ServedModel
    keeping: JournalPolicy


class PhaseChange:
    """Acceptor and builder of the script's next models, and owner of the change to them.

    A worker whose Hello names a later phase than the shard's phase is admitted to an `OfferStage`.
    While a shard waits for the script's next model, it serves all other streams as before.

    Args:
        run: Settings of the training run.
        own: Settings of this PS shard from its command-line flags.
        saved: Saved files of the shard.
        server: Network server of the shard, which serves the current model.
        introduction: Presenter of the shard to shard 0 and to clients.
        save_now: Function that saves the shard's state and waits until it is on disk.
    """

    def __init__(
        self,
        run: Run,
        own: PsFlags,
        saved: SavedShard,
        server: ShardServer,
        introduction: Introduction,
        save_now: Callable[[], None],
    ) -> None:
        self._run, self._own, self._saved, self._server = run, own, saved, server
        self._introduction, self._save_now = introduction, save_now
        self._stage: OfferStage | None = None
        self._lock = threading.Lock()

    def admission(self, phase: int) -> OfferAdmission | None:
        """Return the admission of workers whose scripts already have the model of a later phase.

        Returns:
            The admission, or None if the scripts have not agreed on the phase yet; then the worker
            must retry.
        """
        if self._own.id_ps == 0 and self._server.scripts.barriers.phase < phase:
            return None
        with self._lock:
            if self._stage is None or self._stage.phase < phase:
                if self._stage is not None:
                    self._stage.close(True)
                run_id, guard = self._introduction.run_id, self._server.guard
                stage = OfferStage(self._run, self._own, run_id=run_id, phase=phase, guard=guard)
                stage.on_offer = functools.partial(self._build, stage)
                stage.begin_looking()
                self._stage = stage
            return OfferAdmission(self._stage)

    def tick(self) -> None:
        """Send heartbeats to waiting workers; make workers that wait too long retry (called on the
        writer thread).
        """
        if (stage := self._stage) is not None:
            stage.tick()

    def _close(self, stage: OfferStage) -> None:
        """Refuse all workers that wait to send a model that the shard already serves or has
        replaced.
        """
        with self._lock:
            if self._stage is stage:
                self._stage = None
        stage.close(True)

    def _build(self, stage: OfferStage, received: ReceivedOffer) -> None:
        """Build the script's next model, which a worker offers, or refuse the offer.

        The model that a worker offers is built on the thread that reads this worker's stream.
        """
        run, own, saved = self._run, self._own, self._saved
        try:
            initial = model_of_offer(run, own.id_ps, received.offer, received.payload)
            initials = ShardInitials(run, own.id_ps, initial)
            config = dataclasses.replace(
                initials.config(saved, own.start_timeout_seconds),
                generation=self._server.core.config.generation + 1,
                generations_undone=0,
            )
            core = build_core(initials, config, run.lease_seconds)
            served = initials.served(core, stage.phase, since=stage.phase)
            keeping = initials.journal_policy(saved, own.journal)
        except Exception as error:  # noqa: BLE001 - Keras raises any type for odd arguments
            stage.refuse(received, f"{error}" or type(error).__name__)
            return
        built = BuiltPhase(stage, initial, served, keeping)
        self._server.queue.put(functools.partial(self._begin, built))

    def _begin(self, built: BuiltPhase) -> None:
        """Replace the shard's model by the script's next model (called on the writer thread).

        After the shard has replaced its model, the workers join the run again.
        """
        run, own = self._run, self._own
        server, stage = self._server, built.stage
        if server.core.stop_reason is not None or stage.phase <= server.served.phase:
            self._close(stage)
            return
        server.journaled.close()
        # No local variable holds the former model: its weights are freed before the next model is
        # saved, so that the shard never needs memory for three models.
        server.begin_phase(self._continued(server.served, built.served))
        log_placement(run, own.id_ps, built.initial)
        if server.datagrams is not None:
            server.datagrams.open(run.transport, own.bind)
        built.keeping.start(server.journaled, server.served.decoder, run.lease_seconds)
        self._save_now()
        self._introduction.admit_to_next_phase()
        self._close(stage)
        version = server.core.version
        logging.info("run phase %d begins at model version %d", server.served.phase, version)

    def _continued(self, before: ServedModel, served: ServedModel) -> ServedModel:
        """Return the next model with the run's counts of the model before, which is stored if the
        next model has other variables.
        """
        if served.has_variables_of(before):
            served = dataclasses.replace(served, since=before.since)
        else:
            self._keep_ended(before, served.phase)
        served.core.continue_run_of(before.core)
        return served

    def _keep_ended(self, ended: ServedModel, phase: int) -> None:
        """Store the final state of a model before phase `phase` replaces it by another model."""
        core = ended.core
        whole = dataclasses.replace(core.whole(), update=Update(None, core.model.theta.copy()))
        generation = core.config.generation
        try:
            self._server.ended_models.add(
                EndedModel(ended.since, phase - 1, ended.layout, generation, whole)
            )
        # the run continues: only a restarted worker would need the saved model
        except OSError as error:
            logging.error("the final model of run phase %d cannot be saved: %s", phase - 1, error)
