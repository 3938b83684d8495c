"""Replaces the model that a shard serves by the script's next model.

A change of the phase takes three steps. `PhaseChange.stage_of` returns the object that receives the
next model from a worker. `_build` makes the next `ServedModel` on the thread that reads this
worker's stream, while the shard serves the current model. `_begin` replaces the current
`ServedModel` on the writer thread. The shard handles no event while `_begin` runs, so no push,
reply, checkpoint or journal record sees a part of two phases.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

from absl import logging

from thinwire.ops.types import Update
from thinwire.ps.flags import PsFlags
from thinwire.ps.persistence.policy import JournalPolicy
from thinwire.ps.persistence.shard_store import SavedShard
from thinwire.ps.scripts.ended_models import EndedModel
from thinwire.ps.scripts.initial_model import InitialModel, model_of_offer
from thinwire.ps.scripts.offering import OfferStage
from thinwire.ps.scripts.phases import NextPhase
from thinwire.ps.service.dialogues.offer import ReceivedOffer
from thinwire.ps.service.served_model import ServedModel
from thinwire.ps.service.server import ShardServer
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
    """Builder of the script's next models, and owner of the change to them.

    Args:
        run: Settings of the training run.
        own: Settings of this PS shard from its command-line flags.
        saved: Saved files of the shard.
        server: Network server of the shard, which serves the current model.
        gate: Object that passes on workers that already have the script's next model.
        run_id: Function that returns the random identifier of the run.
        reopen: Function that saves the shard with its new model and admits clients again.
    """

    def __init__(
        self,
        run: Run,
        own: PsFlags,
        saved: SavedShard,
        server: ShardServer,
        gate: NextPhase,
        run_id: Callable[[], str],
        reopen: Callable[[], None],
    ) -> None:
        self._run, self._own, self._saved = run, own, saved
        self._server, self._gate = server, gate
        self._run_id, self._reopen = run_id, reopen

    def stage_of(self, phase: int) -> OfferStage:
        """Return the object that receives the script's next model (called on reader threads)."""
        stages: list[OfferStage] = []

        def take(received: ReceivedOffer) -> None:
            self._build(stages[0], received)

        args = (self._run, self._own, phase, self._run_id(), self._server.guard, take)
        stages.append(OfferStage.of_phase(*args))
        return stages[0]

    def _build(self, stage: OfferStage, received: ReceivedOffer) -> None:
        """Build the script's next model, which a worker offers, or refuse the offer.

        The model that a worker offers is built on the thread that reads this worker's stream.
        """
        run, own = self._run, self._own
        try:
            initial = model_of_offer(run, own.id_ps, received.offer, received.payload)
            initials = ShardInitials(run, own.id_ps, initial)
            config = dataclasses.replace(
                initials.config(self._saved, own.start_timeout_seconds),
                generation=self._server.core.config.generation + 1,
                generations_undone=0,
            )
            core = build_core(initials, config, run.lease_seconds)
            served = initials.served(core, stage.phase, since=stage.phase)
            keeping = initials.journal_policy(self._saved, own.journal)
        except Exception as error:  # noqa: BLE001 - Keras raises any type for odd arguments
            stage.refuse(received, f"{error}" or type(error).__name__)
            return
        built = BuiltPhase(stage, initial, served, keeping)
        self._server.queue.put(functools.partial(self._begin, built))

    def _begin(self, built: BuiltPhase) -> None:
        """Replace the shard's model by the script's next model (called on the writer thread).

        After the shard has replaced its model, the workers join the run again.
        """
        server, stage = self._server, built.stage
        if server.core.stop_reason is not None or stage.phase <= server.served.phase:
            self._gate.close(stage)
            return
        server.journaled.close()
        # No local variable holds the former model: its weights are freed before the next model is
        # saved, so that the shard never needs memory for three models.
        server.begin_phase(self._continued(server.served, built.served))
        log_placement(self._run, self._own.id_ps, built.initial)
        if server.datagrams is not None:
            server.datagrams.open(self._run.transport, self._own.bind)
        built.keeping.start(server.journaled, server.served.decoder, self._run.lease_seconds)
        self._reopen()
        self._gate.close(stage)
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
