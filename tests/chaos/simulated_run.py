"""A whole simulated run that keeps its state on disk, is struck by one fault, and is examined."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import Any

import numpy as np

from tests.chaos.faults import Plan
from tests.chaos.simulated_disk import FaultyDisk
from tests.chaos.simulated_ledger import Fork, Key, Ledger
from tests.harness import KERNELS, method
from tests.thinwire.simulator.toy import IDEAL, ToyTrainer, dataset, run_of
from thinwire.ops.sharding.split import shard_positions
from thinwire.ops.types import Link
from thinwire.ps.core import events
from thinwire.simulator import devices
from thinwire.simulator.flags import SimulatorFlags
from thinwire.simulator.shard import SimulatedShard
from thinwire.simulator.simulation import Simulation
from thinwire.simulator.storage import SimulatedKill, StorageSetup
from thinwire.worker.flags import EmulatedDevice

LEASE_SECONDS = 2.0
#: Virtual: by then every run has ended, faults and patience included ...
LATEST_SECONDS = 1500.0
#: ... after this many appointments at most.
MOST_APPOINTMENTS = 200_000
_WATCH_SECONDS = 0.7  # between two looks of the Supervisor
_RESTART_SECONDS = 5.0  # after which a worker that gave up is started again
_LINGER_SECONDS = 15.0  # of a shard that has ended by itself
_DRAIN_SECONDS = 3.0  # for which followers take what is on its way at the end
#: Stop reasons after which the same commands are given once more.
_TO_GO_ON = ("journal_failed",)


@dataclasses.dataclass(frozen=True)
class Case:
    """What is run."""

    name: str  # of the method
    nb_ps: int = 1
    journal: str = "on"
    nb_workers: int = 3
    iter_max: int = 36
    choices: tuple[tuple[str, Any], ...] = ()
    seed: int = 1

    def __str__(self) -> str:
        return f"{self.name}, {self.nb_ps} shards, --journal={self.journal}"


class ChaoticRun(Simulation):
    """Plays on through deaths and restarts; keeps ledgers of what is true."""

    def __init__(self, case: Case, folder: pathlib.Path) -> None:
        self.case = case
        chosen = method(case.name, case.nb_workers, **dict(case.choices))
        run = run_of(
            chosen,
            case.nb_workers,
            nb_ps=case.nb_ps,
            iter_max=case.iter_max,
            lease_seconds=LEASE_SECONDS,
            checkpoint_interval_seconds=0.9,
            run_dir=folder,
            seed=case.seed,
            keep_checkpoints=2,
        )
        link = Link(0.5, 20.0)
        steps = ",".join(str(0.2 + 0.13 * number) for number in range(case.nb_workers))
        own = SimulatorFlags(
            devices=(EmulatedDevice(link, 1.0, 0.0),) * case.nb_workers,
            step_times=devices.parse_speeds(steps, case.nb_workers),
            outages=devices.parse_outages("", case.nb_workers),
            servers=(IDEAL,) * case.nb_ps,
            threads=1,
            clip_norm=0.0,
            measure="off",
            start_timeout_seconds=600.0,
            settings={},
        )
        self.disks = tuple(FaultyDisk() for _ in range(case.nb_ps))
        keeps = StorageSetup(case.journal, self.disks)
        super().__init__(run, own, ToyTrainer(case.seed), dataset(), KERNELS, keeps)
        self.run, self.num_appointments, self.num_observations = run, 0, 0
        self.ledgers: list[Ledger] = []
        self.sent: list[dict[Key, Any]] = [{} for _ in self.shards]
        self.acknowledged: list[dict[tuple[int, int], int]] = [{} for _ in self.shards]
        self.checked_models = 0
        self.watches_until = self.blind_until = 0.0
        self.reasons: list[str] = []
        self.rng = np.random.default_rng([61, case.seed])
        for shard, disk in zip(self.shards, self.disks, strict=True):
            shard.on_begin = self._note_life
            self.ledgers.append(Ledger(shard.number, keeps_journal=case.journal == "on"))
            disk.on_saved = self.ledgers[-1].note_saved
            if shard.number:
                shard.on_end = functools.partial(self._note_follower_end, shard)
        for worker in self.workers:
            self._listen_to(worker)

    # -- what is noted ------------------------------------------------------------------------

    def _note_life(self, shard: SimulatedShard) -> None:
        self.ledgers[shard.number].begin(shard.core)

    def _note_follower_end(self, shard: SimulatedShard, reason: str) -> None:
        """A shard has ended by itself, and its process with it; it returns when there is space."""
        if reason in _TO_GO_ON and not self.is_over:
            again = functools.partial(self._replace, shard)
            self.clock.at(self.clock.now + _LINGER_SECONDS, again)

    def _replace(self, shard: SimulatedShard) -> None:
        if self.is_over or not shard.alive or shard.core.stop_reason is None:
            return
        self.ledgers[shard.number].tolerates_end = True
        self.disks[shard.number].is_full = False
        shard.finish()
        for port in shard.ports.values():
            port.stream = None
            port.connection.snap()
        shard.start()

    def _listen_to(self, worker: Any) -> None:
        exchange, on_replies = worker.exchange, worker.on_replies
        send, on_settled = exchange.send, exchange.on_settled

        def noted_send(shard: int, event: Any, sizes: list[int], counted: bool) -> None:
            if isinstance(event, events.Push):
                key = (event.worker, event.incarnation, event.step)
                self.sent[shard].setdefault(key, event.update)
            send(shard, event, sizes, counted)

        def noted_settled(shard: int, reply: Any) -> None:
            step = exchange.clients[shard].step
            if reply is not None:
                heard = self.ledgers[shard].heard
                heard[reply.generation] = max(heard.get(reply.generation, 0), reply.version)
                if step and not reply.refused and not reply.stop:
                    self.acknowledged[shard][worker.number, step] = reply.version
            on_settled(shard, reply)

        def noted_replied(replies: list[Any]) -> None:
            core = worker.core
            on_replies(replies)
            self._compare_models(worker.number, core)

        exchange.send, exchange.on_settled = noted_send, noted_settled
        worker.on_replies = noted_replied
        for name in ("on_unreachable", "on_refused"):
            setattr(worker, name, functools.partial(self._give_up, worker, getattr(worker, name)))

    def _give_up(self, worker: Any, end: Any) -> None:
        """Let a worker's process end, and whoever looks after it start it again."""
        end()
        self.clock.at(self.clock.now + _RESTART_SECONDS, functools.partial(self.revive, worker))

    def revive(self, worker: Any) -> None:
        """Start a worker's process unless it runs."""
        if not worker.alive and not self.is_over:
            worker.start()

    def _compare_models(self, number: int, core: Any) -> None:
        """A worker's own model is what every shard says that it has."""
        for shard, layout in enumerate(self._layouts):
            held = self.ledgers[shard].held
            known = held.get((number, core.generations[shard], core.versions[shard]))
            where = shard_positions(self.spec, layout)
            mine = np.concatenate([core.base[at] for at in where]).tobytes()
            if known is None or mine != known:
                raise Fork(
                    f"worker {number} at {core.versions[shard]} of generation "
                    f"{core.generations[shard]} does not have what shard {shard} says it has"
                )
            self.checked_models += 1

    # -- the run --------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """Whether nothing more is to be done."""
        return self.end is not None

    def play_on(self) -> str:
        """Play to the end, with restarts of everything where a disk was full; return why."""
        self._schedule()
        self.clock.at(_WATCH_SECONDS, self._observe)
        while True:
            while self.end is None:
                self._advance()
            self.reasons.append(self.end)
            if self.end not in _TO_GO_ON:
                break
            self._go_on()
        self._let_followers_finish()
        for shard in self.shards:
            shard.finish()
        return self.end

    def _advance(self) -> None:
        self.num_appointments += 1
        if self.clock.now > LATEST_SECONDS or self.num_appointments > MOST_APPOINTMENTS:
            versions = [shard.core.version for shard in self.shards]
            raise Fork(f"the run does not end: versions {versions} at {self.clock.now:.1f} s")
        if not self.clock.advance():
            raise Fork(f"nothing is left to happen at {self.clock.now:.1f} s")

    def _go_on(self) -> None:
        """All nodes have ended; the disk has space again, and the same commands are given."""
        for worker in self.workers:
            worker.exchange.end_life()
        for shard, disk, ledger in zip(self.shards, self.disks, self.ledgers, strict=True):
            ledger.tolerates_end = True
            if shard.alive:
                shard.finish()
            disk.is_full = False
        self.end = None
        for shard in self.shards:
            shard.start()
        for worker in self.workers:
            worker.start()

    def _let_followers_finish(self) -> None:
        """Let followers that are dead come back, and take what is on its way."""
        first, *others = self.shards
        until = self.clock.now + _DRAIN_SECONDS
        while self.clock.now <= until and any(s.core.version < first.core.version for s in others):
            self._advance()
        deadline = self.clock.now + 100.0
        while not all(shard.listens for shard in others) and self.clock.now < deadline:
            self._advance()
        for shard in others:
            shard.handle(events.Stop(str(self.end)))

    def _observe(self) -> None:
        """Look at the model, as a Supervisor does, unless it cannot."""
        self.clock.at(self.clock.now + _WATCH_SECONDS, self._observe)
        if self.clock.now < self.blind_until or self.is_over:
            return
        for shard in self.shards:
            if shard.listens:
                try:
                    shard.observe()
                except SimulatedKill:
                    shard.kill()
        self.num_observations += 1

    # -- what must be true at the end -----------------------------------------------------------

    def check(self) -> None:
        """Examine the run.

        Raises:
            Fork: Something that must be true is not.
        """
        for shard, ledger in zip(self.shards, self.ledgers, strict=True):
            ledger.check_once()
            ledger.check_losses(shard.core.counters.lost_updates)
            self._check_acknowledged(shard, ledger)
            where = shard_positions(self.spec, shard.layout)
            theta = np.concatenate([self._initial[at] for at in where])
            whole = not self.run.method.router.uses_datagrams
            ledger.check_replay(theta, self.sent[shard.number] if whole else None)
            if not np.isfinite(shard.core.model.theta).all():
                raise Fork(f"shard {shard.number} holds NaN or infinity")

    def _check_acknowledged(self, shard: SimulatedShard, ledger: Ledger) -> None:
        applied = {(key[0], key[2]) for entry in ledger.applied for key, _, _ in entry.pushes}
        spent = shard.core.version >= self.run.iter_max
        undone = {(key[0], key[2]) for key in ledger.undone}
        for (worker, step), version in self.acknowledged[shard.number].items():
            if (worker, step) in applied or (worker, step) in undone:
                continue
            if spent and version >= self.run.iter_max:
                continue
            raise Fork(
                f"shard {shard.number} acknowledged step {step} of worker {worker} "
                f"(version {version}) and has not applied it"
            )


@dataclasses.dataclass
class Outcome:
    """What became of a run."""

    case: Case
    plan: Plan | None
    struck: bool
    error: str = ""
    reason: str = ""
    seconds: float = 0.0  # virtual
    lost_updates: tuple[int, int] = (0, 0)  # as counted, as undone
    restarts: int = 0
    models: int = 0  # workers' own models that were compared
