"""Builds all nodes of a simulated run, and advances virtual time until the run ends."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING

import numpy as np
from absl import logging

from thinwire.data.loading import TrainingShard, take_shards
from thinwire.ops.sharding.split import shard_positions, shard_spec
from thinwire.ops.sync.groups import format_groups
from thinwire.ps.core import events
from thinwire.ps.core.averages import WorkerAverages
from thinwire.ps.core.core import PsCore
from thinwire.ps.core.members import CoreConfig
from thinwire.ps.core.membership import Coordinator, FollowerMembership
from thinwire.ps.persistence.journal_format import EventCoder
from thinwire.ps.wire.claims import ClaimBounds
from thinwire.ps.wire.push_decoder import PushDecoder
from thinwire.runtime.run.settings import Run
from thinwire.runtime.run.sync_files import DrawsFile, write_groups
from thinwire.simulator.clock import Clock
from thinwire.simulator.exchange import SimulatedExchange
from thinwire.simulator.executors import InlineExecutor
from thinwire.simulator.faulty_gradients import trainer_of
from thinwire.simulator.flags import SimulatorFlags
from thinwire.simulator.shard import SimulatedDatagramPort, SimulatedShard
from thinwire.simulator.storage import StorageSetup, StoredShard
from thinwire.simulator.worker import SimulatedWorker, WorkerSetup
from thinwire.worker.core.core import WorkerCore
from thinwire.worker.telemetry.round_trace import MEASURES

if TYPE_CHECKING:
    from thinwire.data.registry import Dataset
    from thinwire.ops.kernels import Kernels
    from thinwire.simulator.messages import ModelSource


class Simulation:
    """One simulated training run on a virtual clock.

    Attributes:
        own: Settings of the Simulator, from its flags.
        spec: Names and shapes of the shared model's tensors.
        clock: Virtual clock of the simulation.
        shards: Simulated PS shards, shard 0 first.
        workers: Simulated workers, in order of their ids.
        end: Stop reason of the simulated run; None while the run continues.
    """

    def __init__(
        self,
        run: Run,
        own: SimulatorFlags,
        trainer: ModelSource,
        dataset: Dataset,
        bodies: Kernels,
        keeps: StorageSetup | None = None,
        executor: Executor | None = None,
    ) -> None:
        """Build every node of the simulated run, which the method `play` starts.

        Args:
            run: Settings of the simulated training run.
            own: Settings of the Simulator, from its flags.
            trainer: Trainer that computes the gradients of all workers.
            dataset: Data set with training examples.
            bodies: Kernels that perform the policies' array operations.
            keeps: Storage of the PS shards' state, so that shards can be killed and restarted.
                None: PS shards save no state, because an interrupted simulation is repeated, not
                resumed.
            executor: Executor that computes gradients concurrently with the simulation. None: each
                gradient is computed when its training step begins.

        Raises:
            ConfigurationError: There are more PS shards than the model can be split into, or the
                batch size does not fit a worker's share of the training examples.
        """
        self._run, self.own, self._bodies, self._trainer = run, own, bodies, trainer
        self.spec = trainer.spec
        self.clock = Clock()
        self.end: str | None = None
        self._executor = executor or InlineExecutor()
        self._initial, self._keeps_state = trainer.weights.copy(), keeps is not None
        self._layouts = run.method.place(self.spec, run.nb_ps)
        self._budget = run.budget(len(dataset.train_labels))
        self.shards = [self._shard(number) for number in range(run.nb_ps)]
        self.shards[0].followers = self.shards[1:]
        for shard in self.shards[1:]:
            shard.leader = self.shards[0]
        self.shards[0].on_end = self._note_end
        self.shards[0].on_groups = self._note_groups
        if run.method.sync.draws_workers:
            self.shards[0].on_draws = DrawsFile(run.run_dir).record
        bounds = ClaimBounds.of(run.method, len(dataset.train_labels))
        decoders = [
            PushDecoder(
                *(shard.layout, shard.core.model.kind, bodies, shard.core.averages.size, bounds),
                keeps_blocks=run.method.down_codec.relays,
            )
            for shard in self.shards
        ]
        for shard, decoder in zip(self.shards, decoders, strict=True):
            shard.decoder = decoder
            if run.method.router.uses_datagrams:
                shard.datagrams = SimulatedDatagramPort(shard, decoder, run.transport)
        self.workers = [
            SimulatedWorker(
                self._equipment(number, shard, decoders),
                trainer_of(number, trainer, own.garbage),
                self.clock,
            )
            for number, shard in enumerate(take_shards(run, dataset), start=1)
        ]
        if keeps is not None:
            self._keep(keeps)

    def play(self, keep: Callable[[float], None], interrupted: Callable[[], bool]) -> str:
        """Advance virtual time until the simulated run ends; return the run's stop reason.

        Args:
            keep: Function that is called after each event with the virtual time, to record the run.
            interrupted: Function that returns True if the user has interrupted the run.
        """
        self._schedule()
        while self.end is None:
            if interrupted() or not self.clock.advance():
                self.end = "interrupted"
            keep(self.clock.now)
        self._let_followers_finish()
        for worker in self.workers:
            if worker.alive:
                worker.leave("done")
        return self.end

    def _let_followers_finish(self) -> None:
        """Wait until all PS shards have applied the last update, then stop shards 1 and above."""
        # Shard 0 ends the run while parts of the last pushes are in flight to the remaining PS
        # shards. The wait takes at most the time of a lease, because a part may be lost with its
        # worker or stream.
        first, *followers = self.shards
        until = self.clock.now + self._run.lease_seconds
        while any(shard.core.version < first.core.version for shard in followers):
            if self.clock.now > until or not self.clock.advance():
                break
        for shard in followers:
            shard.handle(events.Stop(str(self.end)))

    def stop(self, reason: str) -> None:
        """Stop the simulated run with a stop reason, as a Supervisor would stop a real run."""
        self.shards[0].handle(events.Stop(reason))

    def _note_end(self, reason: str) -> None:
        self.end = reason

    def _note_groups(self, found: events.GroupsChanged) -> None:
        run = self._run
        logging.info(
            "worker groups by speed since %.3f s: %s", self.clock.now, format_groups(found.groups)
        )
        if len(found.speeds) == run.nb_workers:
            flags = write_groups(run.run_dir, found.groups, found.speeds)
            logging.info(
                "flags with which a later run divides the data by the workers' speed: %s", flags
            )

    # -- scheduled events -------------------------------------------------------------------

    def _schedule(self) -> None:
        for shard in self.shards:
            if not shard.alive:
                shard.start()
        for worker in self.workers:
            self.clock.at(0.0, worker.start)
        for outage in self.own.outages:
            worker = self.workers[outage.worker - 1]
            self.clock.at(outage.start, functools.partial(_kill, worker))
            if outage.end is not None:
                self.clock.at(outage.end, worker.start)
        self._beat()

    def _beat(self) -> None:
        """Renew all running workers' leases, as heartbeats do; schedule the next renewal."""
        awake_workers = [worker for worker in self.workers if worker.awake]
        for worker in awake_workers:
            for connection in worker.exchange.connections:
                if connection.carries:
                    connection.shard.arrive(events.WorkerAlive(worker.number))
        # Without a running worker, heartbeats continue only while the end of an outage is
        # scheduled. Otherwise they would advance the clock forever, and `play` could not detect
        # that the run is over.
        last_return = max((o.end for o in self.own.outages if o.end is not None), default=0.0)
        if awake_workers or self.clock.now <= last_return:
            self.clock.at(self.clock.now + self._run.lease_seconds / 3, self._beat)

    # -- building ---------------------------------------------------------------------------

    def _shard(self, number: int) -> SimulatedShard:
        run, layout = self._run, self._layouts[number]
        core = self._made(number, self._config(number, 0, 1, False), run.lease_seconds)
        shard = SimulatedShard(number, core, layout, self.own.servers[number], self.clock)
        shard.lease_seconds = run.lease_seconds
        return shard

    def _keep(self, keeps: StorageSetup) -> None:
        """Attach storage to every PS shard; `play` starts the shards from their saved states."""
        run = self._run
        for shard in self.shards:
            number, size = shard.number, shard.core.averages.size
            shard.kept = StoredShard(
                run,
                keeps.journal,
                keeps.disks[number],
                self.spec,
                functools.partial(EventCoder, shard.layout, run.method, self._bodies, size),
                functools.partial(self._made, number),
                functools.partial(self._config, number),
            )
            shard.alive = shard.is_open = False

    def _config(self, number: int, generation: int, undone: int, goes_on: bool) -> CoreConfig:
        """Return the settings of a PS core for one start of a PS shard, as a real shard has them.

        Args:
            number: Id of the PS shard.
            generation: Number of times that the PS shard was restarted.
            undone: Number of earlier generations (starts of the PS shard) that may have lost
                updates.
            goes_on: True if the PS shard resumes a saved run. The start timeout of a resumed run is
                only as long as workers need to reconnect.
        """
        run, patience = self._run, self.own.start_timeout_seconds
        return CoreConfig(
            budget=self._budget,
            schedule=run.schedule,
            nb_workers=run.nb_workers,
            generation=generation,
            generations_undone=undone,
            max_seconds=run.max_seconds if number == 0 else None,
            start_timeout_seconds=min(patience, 10.0 + 2 * run.lease_seconds)
            if goes_on
            else patience,
            snapshot_interval_seconds=run.checkpoint_interval_seconds
            if self._keeps_state
            else math.inf,
            spec=shard_spec(self.spec, self._layouts[number]),
            guards=run.guards,
        )

    def _made(self, number: int, config: CoreConfig, lease_seconds: float) -> PsCore:
        """Return the PS core (state machine) of a PS shard in its initial state."""
        run, layout = self._run, self._layouts[number]
        membership: Coordinator | FollowerMembership = Coordinator(run.nb_workers, lease_seconds)
        aux = WorkerAverages()
        if number == 0:
            aux = WorkerAverages(
                self._trainer.statistics, run.method.num_averaged(self.spec.num_parameters)
            )
        else:
            membership = FollowerMembership(run.nb_workers)
        theta = np.concatenate([self._initial[at] for at in shard_positions(self.spec, layout)])
        core = PsCore(config, run.method, theta, self._bodies, membership, aux)
        core.model.draw_noise_with(f"{run.seed} {number}".encode())
        return core

    def _equipment(
        self, number: int, shard: TrainingShard, decoders: Sequence[PushDecoder]
    ) -> WorkerSetup:
        run, device = self._run, self.own.devices[number - 1]
        draw = self.own.step_times[number - 1].sampler([run.seed, number])
        exchange = SimulatedExchange(
            number,
            device.link,
            run.seed * 1000 + number,
            self.shards,
            decoders,
            self.clock,
            run.method.router,
            run.transport,
        )
        exchange.patience_seconds = run.reconnect_timeout_seconds
        return WorkerSetup(
            number=number,
            make_core=functools.partial(
                WorkerCore,
                self.spec,
                self._layouts,
                run.method.of_part(shard.num_examples, run.batch_size),
                self._bodies,
                [run.seed, number],
                self._trainer.statistics,
                shard.num_train,
                rate_in_round=run.rate_in_round(shard.num_train),
            ),
            shard=shard,
            step_seconds=lambda: max(device.step_seconds, device.slowdown * draw()),
            exchange=exchange,
            measure=MEASURES[self.own.measure](
                run.method.pacer, exchange, clock=lambda: self.clock.now
            ),
            executor=self._executor,
        )


def _kill(worker: SimulatedWorker) -> None:
    if worker.alive:
        worker.die()
