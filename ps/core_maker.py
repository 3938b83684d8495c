"""What a shard's core begins with: first weights, limits of the run, its rule, who takes part."""

from __future__ import annotations

import numpy as np

from data.chosen import num_train
from models.shared import SharedModel, has_gpu
from models.statistics import FlatVariables
from ops import kernels, routing
from ops.run import Run
from ops.schedule import Budget
from ops.sync import SyncRule
from ops.types import ShardLayout
from ps.aux_mean import AuxMean
from ps.claims import ClaimBounds
from ps.core import PsCore
from ps.members import CoreConfig
from ps.membership import Coordinator, Follower
from ps.saved_shard import SavedShard


class CoreMaker:
    """Makes cores of one shard that have been told nothing: of this life, and of replayed ones.

    Attributes:
        kernels: What they compute with.
        bounds: What workers of the run may claim.

    Args:
        run: The run's settings.
        leads: Whether this is shard 0.
        shared: The model.
        layout: Of this shard.
        examples: Size of the training set; None: counted, where --epochs needs it.
    """

    def __init__(
        self,
        run: Run,
        leads: bool,
        shared: SharedModel,
        layout: ShardLayout,
        examples: int | None,
    ) -> None:
        self._run, self._leads, self._shared, self._layout = run, leads, shared, layout
        flat = shared.flat()
        self._theta = np.concatenate([flat[at] for at in routing.positions(shared.spec, layout)])
        num_train = _num_train(run, shared, examples)
        self._budget = Budget(run.iter_max, num_train and max(1, round(run.epochs * num_train)))
        self.bounds = ClaimBounds.of(run.method, num_train)
        has_gpu(run)  # refuses one that is not there
        # Weights and pushes are numpy's: on a GPU, the whole model would be copied for each push.
        self.kernels = kernels.load(run.kernels)

    def aux(self) -> AuxMean:
        """Return what this shard averages beside the weights: on shard 0 alone, if anything."""
        if not self._leads:
            return AuxMean()
        method, shared = self._run.method, self._shared
        statistics = FlatVariables(shared.statistics if method.bn_sync else [])
        return AuxMean(statistics.read(), method.num_averaged(shared.spec.num_parameters))

    def config(self, saved: SavedShard, start_timeout_seconds: float) -> CoreConfig:
        """Return the settings of the life that follows on what is saved.

        A run that goes on waits only as long as workers take to come back.
        """
        run, patience = self._run, start_timeout_seconds
        if saved.core:
            patience = min(patience, 10.0 + 2 * run.lease_seconds)
        return CoreConfig(
            budget=self._budget,
            schedule=run.schedule,
            nb_workers=run.nb_workers,
            generation=saved.generation,
            generations_undone=saved.generations_undone,
            max_seconds=run.max_seconds if self._leads else None,
            start_timeout_seconds=patience,
            snapshot_interval_seconds=run.checkpoint_interval_seconds,
            offsets=self._layout.offsets,
            guards=run.guards,
        )

    def make(self, config: CoreConfig, lease_seconds: float) -> PsCore:
        """Return a core at version 0, with weights of its own."""
        method = self._run.method
        rule = method.sync
        membership: Coordinator | Follower
        if self._leads:
            membership = Coordinator(config.nb_workers, lease_seconds)
        else:  # leave to go on is shard 0's alone to give
            membership = Follower(config.nb_workers, lease_seconds)
            rule = SyncRule(rule.groups)
        theta = self._theta.copy()
        return PsCore(config, method, theta, self.kernels, membership, rule, self.aux())


def _num_train(run: Run, shared: SharedModel, examples: int | None) -> int | None:
    """Return the size of the training set; None where no --epochs ask for it."""
    if run.epochs is None or examples is not None:
        return None if run.epochs is None else examples
    return num_train(run.data, run.model, shared.user_module, run.seed)
