"""How each fault acts on a simulated run, and which faults can be simulated."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from tests.chaos.faults import POSSIBLE, Fault, Plan, Victim
from tests.chaos.simulated_ambush import at_answer, at_push, let_be
from tests.chaos.simulated_disk import STAGES
from tests.chaos.simulated_run import LEASE_SECONDS, ChaoticRun
from thinwire.ps.core import events
from thinwire.simulator.links import SimulatedConnection
from thinwire.simulator.shard import SimulatedShard
from thinwire.simulator.storage import SimulatedKill
from thinwire.simulator.worker import SimulatedWorker

_NO_DISK = "a simulated worker keeps nothing: it comes back as one without a checkpoint"
_ONLY_LOOKS = (
    "simulated, a Supervisor is a look at the model now and then, which can only be missed"
)
#: Pairs that only real processes can show, and why.
NOT_SIMULATED: dict[tuple[Fault, Victim], str] = {
    (Fault.KILL_IN_SNAPSHOT, Victim.WORKER): _NO_DISK,
    (Fault.DISK_FULL, Victim.WORKER): _NO_DISK,
    (Fault.DISK_FULL, Victim.SUPERVISOR): _ONLY_LOOKS,
    (Fault.CLOCK_JUMP, Victim.SUPERVISOR): _ONLY_LOOKS,
    (Fault.GARBLED, Victim.SUPERVISOR): _ONLY_LOOKS,
}
SIMULATED = tuple(pair for pair in POSSIBLE if pair not in NOT_SIMULATED)

#: Virtual seconds that a process is down, or a link cut, or everything stands still.
_SHORT, _LONG = 0.05, 25.0


class Striker:
    """Lets a plan's fault happen once, at the first chance after its instant.

    Attributes:
        struck: Whether it has happened.
    """

    def __init__(self, run: ChaoticRun, plan: Plan, seconds: float) -> None:
        """Prepare the fault; `seconds` is the duration of the undisturbed run."""
        self.run, self.plan, self.rng = run, plan, plan.rng()
        self.struck = False
        self.at = plan.instant * seconds
        run.clock.at(self.at, self._strike)

    # -- choices ------------------------------------------------------------------------------

    def _seconds(self) -> float:
        """Return how long something lasts: from a moment to many leases."""
        return float(_SHORT * (_LONG / _SHORT) ** self.rng.random())

    def _chance(self) -> bool:
        return bool(self.rng.random() < 0.5)

    def _shard(self) -> SimulatedShard:
        shards = self.run.shards
        if self.plan.victim is Victim.SHARD_0:
            return shards[0]
        return shards[int(self.rng.integers(1, len(shards)))]

    def _worker(self) -> SimulatedWorker:
        return self.run.workers[int(self.rng.integers(len(self.run.workers)))]

    def _connections(self) -> list[SimulatedConnection]:
        """Return the victim's streams: all of them, or (for a worker) perhaps one stream."""
        if self.plan.victim is Victim.WORKER:
            found = self._worker().exchange.connections
            return [found[int(self.rng.integers(len(found)))]] if self._chance() else found
        shard = self._shard()
        return [worker.exchange.connections[shard.number] for worker in self.run.workers]

    def _strike(self) -> None:
        if self.run.is_over:
            return
        victims = "worker" if self.plan.victim is Victim.WORKER else "shard"
        by_name = f"_{self.plan.fault.name.lower()}"
        if self.plan.victim is Victim.SUPERVISOR:
            self._blind()
            return
        strike = getattr(self, f"{by_name}_{victims}", None) or getattr(self, by_name)
        strike()

    # -- the Supervisor -----------------------------------------------------------------------

    def _blind(self) -> None:
        self.struck = True
        self.run.blind_until = self.run.clock.now + self._seconds()

    # -- deaths of shards -----------------------------------------------------------------------

    def _come_back(self, shard: SimulatedShard) -> None:
        """Start a shard that has just been killed again, after a while."""
        self.struck = True
        back = functools.partial(_start, self.run, shard)
        self.run.clock.at(self.run.clock.now + self._seconds(), back)

    def _kill_at_push(self, shard: SimulatedShard, before: bool) -> None:
        handle, life = shard.journaled.handle, shard.life

        def deadly(event: events.Event, now: float) -> list[events.Action]:
            if self.struck or shard.life != life or not isinstance(event, events.Push):
                return handle(event, now)
            if not before:
                handle(event, now)
            self._come_back(shard)
            raise SimulatedKill

        shard.journaled.handle = deadly  # type: ignore[method-assign]

    def _kill_before_push_shard(self) -> None:
        shard = self._shard()
        if self._chance():  # between any two events
            shard.kill()
            self._come_back(shard)
        else:
            self._kill_at_push(shard, before=True)

    def _kill_after_push_shard(self) -> None:
        self._kill_at_push(self._shard(), before=False)

    def _when_killed(self, shard: SimulatedShard) -> None:
        """Hear of a death that the disk brings."""
        kill = shard.kill

        def noted() -> None:
            if shard.alive:  # perhaps not for the first time: disks bring several deaths
                self._come_back(shard)
            kill()

        shard.kill = noted  # type: ignore[method-assign]

    def _kill_in_snapshot_shard(self) -> None:
        shard = self._shard()
        self._when_killed(shard)
        self.run.disks[shard.number].dies_at = STAGES[int(self.rng.integers(len(STAGES)))]

    def _kill_in_journal_shard(self) -> None:
        shard = self._shard()
        self._when_killed(shard)
        self.run.disks[shard.number].tear_after = int(self.rng.integers(400))

    # -- deaths of workers ----------------------------------------------------------------------

    def _kill_at_own_push(self, before: bool) -> None:
        worker = self._worker()
        push = worker.exchange.push

        def deadly(outgoing: Any) -> None:
            if self.struck:
                push(outgoing)
                return
            let_be(worker.exchange, "push")
            is_seen = self._chance()
            if before:
                self._end(worker, is_seen)
                return
            push(outgoing)
            later = self.run.clock.now + float(self.rng.random()) * 0.1
            self.run.clock.at(later, functools.partial(self._end, worker, is_seen))

        worker.exchange.push = deadly  # type: ignore[method-assign]

    def _end(self, worker: SimulatedWorker, is_seen: bool) -> None:
        if self.struck or not worker.alive:
            return
        self.struck = True
        worker.die(is_seen)
        back = functools.partial(self.run.revive, worker)
        self.run.clock.at(self.run.clock.now + self._seconds(), back)

    def _kill_before_push_worker(self) -> None:
        self._kill_at_own_push(before=True)

    def _kill_after_push_worker(self) -> None:
        self._kill_at_own_push(before=False)

    # -- time -----------------------------------------------------------------------------------

    def _slow_shard(self) -> None:
        self.struck = True
        self._shard().freeze(self._seconds())

    def _slow_worker(self) -> None:
        self.struck = True
        self._worker().freeze(self._seconds())

    def _clock_jump_shard(self) -> None:
        """Time passes unseen: the shard's clock never goes back within one life (monotonic)."""
        self.struck = True
        self._shard().jump(float(10 ** self.rng.uniform(0.1, 5)))

    def _clock_jump_worker(self) -> None:
        self._slow_worker()

    # -- connections ----------------------------------------------------------------------------

    def _cut(self) -> None:
        """Break, or drop the messages of one or both directions until the cut is over."""
        self.struck = True
        seconds, kind = self._seconds(), int(self.rng.integers(4))
        for connection in self._connections():
            connection.cut_until = max(connection.cut_until, self.run.clock.now + seconds)
            if kind == 0:
                connection.snap()
            if kind in (1, 3):
                connection.hold(True, seconds)
            if kind in (2, 3):
                connection.hold(False, seconds)

    def _half_open(self) -> None:
        self.struck = True
        for connection in self._connections():
            connection.fall_silent()

    def _duplicated(self) -> None:
        """The stream breaks when the answer is on its way: the push is sent once more."""
        for connection in self._connections():
            at_answer(connection, self._snap)

    def _reordered(self) -> None:
        """A push is delayed on a stream that the worker abandons: it arrives after a newer push."""
        for connection in self._connections():
            at_push(connection, self._come_late)

    def _snap(self, connection: SimulatedConnection) -> None:
        self.struck = True
        connection.snap()

    def _come_late(self, connection: SimulatedConnection, number: int, event: Any) -> None:
        self.struck = True
        shard, raced = connection.shard, self._chance()
        late = self.run.clock.now + self._seconds() / 10
        if raced:  # a reader thread had looked at it when the newer stream was let in
            shard.at(late, functools.partial(shard.arrive, event))
        else:
            arrive = functools.partial(shard.receive, connection.worker, number, event)
            self.run.clock.at(late, arrive)
        connection.lose(number)

    def _garbled(self) -> None:
        """TCP's and TLS's sums do not fit: the stream breaks at that message."""
        for connection in self._connections():
            at_push(connection, lambda each, number, event: self._snap(each))

    # -- the disk ---------------------------------------------------------------------------------

    def _disk_full_shard(self) -> None:
        shard = self._shard()
        self.struck = True
        disk = self.run.disks[shard.number]
        disk.is_full = True
        if not self.run.keeps_journal:
            later = self.run.clock.now + min(5.0, self._seconds())
            self.run.clock.at(later, functools.partial(_free_space, disk))


def _start(run: ChaoticRun, shard: SimulatedShard) -> None:
    """Start a shard on a machine that may have been rebooted: its clock starts at any value.

    If the shard does not start, the simulated operator frees space and tries again.
    """
    if shard.alive or run.is_over:
        return
    shard.skew = float(np.random.default_rng([67, shard.life]).uniform(-1e5, 1e5))
    shard.start()
    if not shard.alive:
        run.disks[shard.number].is_full = False
        run.clock.at(run.clock.now + _SHORT, functools.partial(_start, run, shard))


def _free_space(disk: Any) -> None:
    disk.is_full = False


assert LEASE_SECONDS < _LONG
