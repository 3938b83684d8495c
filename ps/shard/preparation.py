"""Builds a PS shard from its initial model and its saved files, before the shard serves clients."""

from __future__ import annotations

import dataclasses
import functools
import secrets

from absl import logging

from thinwire.ops.kernels import load_kernels
from thinwire.ops.sharding import placement
from thinwire.ops.sharding.split import shard_spec
from thinwire.ops.types import State
from thinwire.ps.core.averages import WorkerAverages
from thinwire.ps.core.core import PsCore
from thinwire.ps.core.members import CoreConfig
from thinwire.ps.core.membership import Coordinator, FollowerMembership, Membership
from thinwire.ps.flags import PsFlags
from thinwire.ps.persistence.journal_format import EventCoder
from thinwire.ps.persistence.policy import JournalPolicy
from thinwire.ps.persistence.shard_store import SavedShard
from thinwire.ps.scripts.initial_model import InitialModel
from thinwire.ps.service.served_model import ServedModel
from thinwire.ps.wire.claims import ClaimBounds
from thinwire.runtime.run.settings import Run


class ShardInitials:
    """The initial weights and limits of a shard's state machines, for a new run and for a journal
    replay.

    Attributes:
        leads: True on shard 0, which decides about members and the end of the run.
        layout: Layout of the shard: the slices of variables that it holds.
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
        self.layout = model.layouts[id_ps]
        self._budget = run.budget(model.num_examples or 0)
        self.loss_scale = model.offer.loss_scale if model.offer else None
        scales_loss = self.loss_scale is not None
        self.bounds = ClaimBounds.of(
            model.method, model.num_examples, scales_loss, run.guards.measures, run.nb_workers
        )
        # Pushes arrive and are applied as numpy arrays: a GPU would need a copy of the whole model
        # per push.
        self.kernels = load_kernels(run.kernels, on_host=True)

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
        if saved.last.phase:
            patience = 0.0
        elif saved.last.core:
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
            spec=shard_spec(self.model.spec, self.layout),
            guards=run.guards,
            loss_scale=self.loss_scale,
            first_batches=self.model.offer.schedule_starts() if self.model.offer else (),
        )

    def journal_policy(self, saved: SavedShard, choice: str) -> JournalPolicy:
        """Return the policy that decides whether the shard writes a journal for this model.

        Args:
            saved: Saved files (checkpoints and journals) of the shard.
            choice: Value of the flag --journal: "auto", "on" or "off".
        """
        coder = EventCoder(self.layout, self.model.method, self.kernels, self.averages().size)
        return JournalPolicy(self.run, choice, saved, coder, self.model.spec)

    def served(self, core: PsCore, phase: int, since: int) -> ServedModel:
        """Return the model of this shard's initial values as clients are served with it.

        Args:
            core: State machine that `build_core` has built from these initial values.
            phase: Number of the script's phase in which the model is trained.
            since: Number of the first phase that trained the model's variables.
        """
        model = self.model
        return ServedModel.of(core, model.spec, self.layout, self.bounds, model.offer, phase, since)


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


def log_placement(run: Run, id_ps: int, model: InitialModel) -> None:
    """Log on shard 0 which variables each shard of the run holds, if the run has several shards."""
    for number, layout in enumerate(model.layouts if id_ps == 0 and run.nb_ps > 1 else ()):
        logging.info("PS shard %d has %s", number, placement.describe_shard(model.spec, layout))


@dataclasses.dataclass(frozen=True)
class PreparedShard:
    """A shard with its state from before a restart, if any, which serves no clients yet.

    Attributes:
        run: Settings of the training run.
        own: Settings of this PS shard from its command-line flags.
        saved: Saved files of the shard.
        run_id: Random identifier of the run; "" on a new shard with id 1 or higher, which receives
            the identifier from shard 0.
        served: The shard's model, with its restored state machine.
        keeping: Policy that decides whether the shard writes a journal, after the replay of the
            previous journal.
    """

    run: Run
    own: PsFlags
    saved: SavedShard
    run_id: str
    served: ServedModel
    keeping: JournalPolicy

    @classmethod
    def of(
        cls, run: Run, own: PsFlags, model: InitialModel, saved: SavedShard | None = None
    ) -> PreparedShard:
        """Build the shard's state machine, and restore its state from checkpoint and journal.

        Args:
            run: Settings of the training run.
            own: Settings of this PS shard from its command-line flags.
            model: The shard's model before the first update: variables, weights and layout.
            saved: Saved files of the shard; None to read the files from the run directory.

        Raises:
            ConfigurationError: The run directory holds a run with other settings or another model.
        """
        log_placement(run, own.id_ps, model)
        saved = saved or SavedShard(run, own.node)
        saved.check(model.spec)
        run_id = saved.last.run_id
        if not run_id and own.id_ps == 0:
            run_id = secrets.token_hex(8)
        initials = ShardInitials(run, own.id_ps, model)
        keeping = initials.journal_policy(saved, own.journal)
        is_changed = saved.changes(model.offer)
        # A journal holds pushes, not weights. A replay with other settings or another optimizer
        # would produce weights that the run never had. With changed settings the shard therefore
        # continues from its checkpoint and ignores the journal.
        keeping.replay(None if is_changed else functools.partial(build_core, initials))
        config = initials.config(saved, own.start_timeout_seconds)
        core = build_core(initials, config, run.lease_seconds, is_last=True)
        if saved.last.core and is_changed:
            _continue_otherwise(core, saved.last.core, saved.has_optimizers_of(model.offer))
        elif saved.last.core:
            core.load_state_dict(saved.last.core)
        served = initials.served(core, saved.last.phase, saved.last.since)
        return cls(run, own, saved, run_id, served, keeping)

    def finished(self) -> str | None:
        """Return the stop reason of a saved run that is finished; None if the shard must serve."""
        return None if self.run.resume else self.saved.finished


def _continue_otherwise(core: PsCore, state: State, same_optimizer: bool) -> None:
    """Continue a saved shard's weights and counters with changed settings (--resume)."""
    if begin_again := core.continue_from(state, same_optimizer):
        logging.warning("--resume: PS state that begins again: %s", ", ".join(begin_again))
