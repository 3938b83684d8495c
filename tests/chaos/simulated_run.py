"""A whole simulated run that stores its state on disk and records its history under faults.

A worker's state stays in memory between two incarnations, as a real worker's in a checkpoint.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import pathlib
from typing import Any

from tests.chaos.checker import Declared
from tests.chaos.recorder import Recorder
from tests.chaos.simulated_disk import FaultyDisk
from tests.thinwire.simulator.toy import IDEAL, ToyTrainer, dataset, run_of
from tests.virtual.toy import KERNELS, method
from thinwire.ops.types import Link
from thinwire.ps.core import events
from thinwire.ps.wire.claims import ClaimBounds
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
_LINGER_SECONDS = 15.0  # that an ended shard stays available
_DRAIN_SECONDS = 3.0  # in which followers receive pending messages at the end
_STEPS_PER_CHECKPOINT = 3  # steps of a worker
#: Stop reasons after which the same commands are given once more.
_TO_GO_ON = ("journal_failed",)


@dataclasses.dataclass(frozen=True)
class Case:
    """Settings of a simulated run."""

    name: str  # name of the method
    nb_ps: int = 1
    journal: str = "on"
    nb_workers: int = 3
    iter_max: int = 36
    choices: tuple[tuple[str, Any], ...] = ()
    seed: int = 1

    def __str__(self) -> str:
        return f"{self.name}, {self.nb_ps} shards, --journal={self.journal}"


class Stuck(AssertionError):
    """A run does not come to its end."""


class ChaoticRun(Simulation):
    """Plays on through deaths and restarts. To be made and played within `recorder.installed()`.

    Attributes:
        recorder: Writes the history.
    """

    def __init__(self, case: Case, folder: pathlib.Path, recorder: Recorder) -> None:
        self.case, self.recorder = case, recorder
        self.keeps_journal = case.journal == "on"
        choices = dict(case.choices)
        overrides = dict(choices.pop("overrides", ()))
        chosen = method(case.name, case.nb_workers, overrides=overrides, **choices)
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
        self.blind_until = 0.0
        self.reasons: list[str] = []
        self._kept: dict[int, tuple[int, Any]] = {}  # worker -> (step, state) of its checkpoint
        recorder.now = lambda: self.clock.now
        for shard in self.shards[1:]:
            shard.on_end = functools.partial(self._note_follower_end, shard)
        for worker in self.workers:
            self._look_after(worker)

    @property
    def declared(self) -> Declared:
        """The checker's settings of the run."""
        claims = ClaimBounds.of(self.run.method, len(dataset().train_labels))
        seed, iter_max = self.run.seed, self.run.iter_max or 0
        return Declared(self.run.method, self.spec, self._layouts, seed, iter_max, claims)

    def _note_follower_end(self, shard: SimulatedShard, reason: str) -> None:
        """A shard has ended, and its process with it; it returns when there is disk space."""
        if reason in _TO_GO_ON and not self.is_over:
            again = functools.partial(self._replace, shard)
            self.clock.at(self.clock.now + _LINGER_SECONDS, again)

    def _replace(self, shard: SimulatedShard) -> None:
        if self.is_over or not shard.alive or shard.core.stop_reason is None:
            return
        self.disks[shard.number].is_full = False
        shard.finish()
        for port in shard.ports.values():
            port.stream = None
            port.connection.snap()
        shard.start()

    def _look_after(self, worker: Any) -> None:
        """Restart a worker that has given up, and store its checkpoints."""
        on_replies, on_joined = worker.on_replies, worker.on_joined

        def noted_replies(replies: list[Any]) -> None:
            on_replies(replies)
            if worker.core.step % _STEPS_PER_CHECKPOINT == 0:
                self._kept[worker.number] = worker.core.step, copy.deepcopy(worker.core.save())

        def noted_joined(last_step: int) -> None:
            if worker.number in self._kept:
                worker.core.restore(copy.deepcopy(self._kept[worker.number][1]), last_step)
            on_joined(last_step)

        worker.on_replies, worker.on_joined = noted_replies, noted_joined
        for name in ("on_unreachable", "on_refused"):
            setattr(worker, name, functools.partial(self._give_up, worker, getattr(worker, name)))

    def _give_up(self, worker: Any, end: Any) -> None:
        """End a worker's process, and restart it as its launcher would."""
        end()
        self.clock.at(self.clock.now + _RESTART_SECONDS, functools.partial(self.revive, worker))

    def revive(self, worker: Any) -> None:
        """Start a worker's process unless it runs."""
        if not worker.alive and not self.is_over:
            worker.start()

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
            self.recorder.end(shard.number, shard.core)
        return self.end

    def _advance(self) -> None:
        self.num_appointments += 1
        if self.clock.now > LATEST_SECONDS or self.num_appointments > MOST_APPOINTMENTS:
            versions = [shard.core.version for shard in self.shards]
            raise Stuck(f"the run does not end: versions {versions} at {self.clock.now:.1f} s")
        if not self.clock.advance():
            raise Stuck(f"nothing is left to happen at {self.clock.now:.1f} s")

    def _go_on(self) -> None:
        """All nodes have ended; the disk has space again, and the same commands are given."""
        for worker in self.workers:
            worker.exchange.end_life()
        for shard, disk in zip(self.shards, self.disks, strict=True):
            if shard.alive:
                shard.finish()
            disk.is_full = False
        self.end = None
        for shard in self.shards:
            shard.start()
        for worker in self.workers:
            worker.start()

    def _let_followers_finish(self) -> None:
        """Restart dead followers, and let them receive pending messages."""
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
