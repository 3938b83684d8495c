"""Kills the shards of a real run repeatedly and checks each restarted shard."""

from __future__ import annotations

import dataclasses
import itertools
import os
import pathlib
import random
import shutil
import signal
import time
from collections.abc import Callable
from typing import Any

from tests.chaos.checker import check
from tests.chaos.faults import Fault, Plan, Victim
from tests.chaos.history import CutOff
from tests.chaos.process_cast import Cast, wait_until
from tests.chaos.process_end import declared_by, ended
from tests.chaos.process_replay import Found, Witness, tear
from tests.checkpoint_files import entries, load
from thinwire.ops.types import State

#: Time limit for a node's action, on a machine that runs other work as well.
PATIENCE_SECONDS = 150.0
#: Updates of each worker between two kills, at most.
_MOST_STEPS = 25


@dataclasses.dataclass(frozen=True)
class Kill:
    """One kill -9 and its results."""

    plan: Plan
    shard: int
    version: int  # version of the restarted shard
    events: int  # replayed
    told: int  # pushes acknowledged to workers so far
    compared: int  # snapshots of the living shard that equal a replay of its journal
    torn: str  # damage to the journal
    seconds: float  # time until the shard was back


class Ambush:
    """Kills a shard the moment it is sent, or sends, a message of some kind."""

    def __init__(self, pid: int, shard: int, body: str, vanishes: bool) -> None:
        """Lie in wait.

        Args:
            pid: Process id of the shard.
            shard: Its number.
            body: Kind of the message: "push" or "reply".
            vanishes: True if the message is dropped.
        """
        self._pid, self._shard, self._body, self._vanishes = pid, shard, body, vanishes
        self.done = False

    def __call__(self, worker: int, shard: int, message: Any) -> bool:
        """Kill the shard at the message; see `proxy_messages.Ambusher`."""
        del worker
        if shard != self._shard or message.WhichOneof("body") != self._body:
            return True
        if self.done:
            return not self._vanishes
        os.kill(self._pid, signal.SIGKILL)
        self.done = True
        return not self._vanishes


class Trial:
    """A run with kills of its shards.

    Args:
        cast: Its processes, not yet started.
        seed: Seed of all choices that the plans leave open.
    """

    def __init__(self, cast: Cast, seed: int) -> None:
        self.cast, self._dice = cast, random.Random(seed)
        self._cuts: list[CutOff] = []
        self._witnesses: dict[int, Witness] = {}
        self.kills: list[Kill] = []
        self.between: Callable[[], None] = self._all_run  # called again and again while waiting
        self.codes: dict[str, int] = {}  # at the end
        self.num_cut = 0  # records cut off: their updates may be lost

    @property
    def num_told(self) -> int:
        """How many pushes shards have acknowledged to workers, summed over shards."""
        return sum(len(told) for told in list(self.cast.hearing.told.values()))

    def begin(self, supervisor: bool) -> None:
        """Start all nodes and wait until they work."""
        self.cast.start_all(supervisor)
        self.progress(2)

    def progress(self, steps: int) -> None:
        """Wait until every shard has acknowledged this many more updates of every worker.

        Raises:
            AssertionError: That takes too long.
        """
        if self.cast.protected:  # the proxies cannot read the traffic
            self._progress_of_run(steps)
            return
        told = self.cast.hearing.told
        pairs = [
            (worker, shard)
            for worker in range(1, self.cast.nb_workers + 1)
            for shard in range(self.cast.nb_ps)
        ]
        before = {pair: len(told[pair]) for pair in pairs}

        def enough() -> bool:
            self.between()
            return all(len(told[pair]) >= before[pair] + steps for pair in pairs)

        wait_until(enough, PATIENCE_SECONDS, f"{steps} more answers to every worker")

    def _progress_of_run(self, steps: int) -> None:
        def pushes() -> list[int]:
            self.between()
            status = self.cast.status(PATIENCE_SECONDS)
            return [worker.pushes for worker in status.workers if worker.id]

        before = pushes()
        wait_until(
            lambda: (
                len(now := pushes()) == self.cast.nb_workers
                and all(n >= b + steps for n, b in itertools.zip_longest(now, before, fillvalue=0))
            ),
            PATIENCE_SECONDS,
            f"{steps} more pushes of every worker",
        )

    def strike(self, plan: Plan) -> Kill:
        """Kill a shard as planned; check its files and its restarted state.

        Raises:
            AssertionError: Something is lost, double, or different.
        """
        dice = random.Random(plan.seed)
        shard = 0 if plan.victim is Victim.SHARD_0 else dice.randrange(1, self.cast.nb_ps)
        self.progress(1 + int(plan.instant * _MOST_STEPS))
        return self.kill_and_judge(plan, shard, dice)

    def kill_and_judge(self, plan: Plan, shard: int, dice: random.Random) -> Kill:
        """Kill this shard now, in the planned way, and check the result."""
        self._kill(plan.fault, shard, dice)
        return self.judge(plan, shard, dice)

    def judge(self, plan: Plan, shard: int, dice: random.Random) -> Kill:
        """Check the files of a shard that is being killed, restart it, and check its new state."""
        name, started = f"ps-{shard}", time.monotonic()
        self.cast.nodes.processes[name].wait(30)
        self.cast.fall_silent(shard)
        self.cast.hearing.ambush = None
        witness = self._witness(shard)
        found, compared, torn, lost = self._autopsy(witness, plan, dice)
        first = self._revive(witness, name)
        witness.check_return(found, first, lost)
        self.kills.append(
            Kill(
                plan,
                shard,
                found.core.version,
                found.replayed.num_records,
                self.num_told,
                compared,
                torn,
                time.monotonic() - started,
            )
        )
        return self.kills[-1]

    def _kill(self, fault: Fault, shard: int, dice: random.Random) -> None:
        pid = self.cast.pid(f"ps-{shard}")
        if fault is Fault.KILL_IN_SNAPSHOT:
            folder = self._witness(shard).folder
            wait_until(lambda: any(folder.rglob(".tmp-*")), 5.0)
            os.kill(pid, signal.SIGKILL)
            return
        if self.cast.protected:  # the proxies cannot read the traffic
            os.kill(pid, signal.SIGKILL)
            return
        body = "reply" if fault is Fault.KILL_AFTER_PUSH else "push"
        vanishes = fault is not Fault.KILL_IN_JOURNAL
        ambush = Ambush(pid, shard, body, vanishes)
        if fault is Fault.KILL_IN_JOURNAL:  # about when the push has come
            time.sleep(dice.uniform(0.0, 0.02))
        self.cast.hearing.ambush = ambush
        wait_until(lambda: ambush.done, PATIENCE_SECONDS, f"a {body} to or from shard {shard}")

    def _autopsy(self, witness: Witness, plan: Plan, dice: random.Random) -> tuple[Found, int, str]:
        """Replay the shard's files; damage the journal first if the plan requests it."""
        folder = self.cast.folder / "copies" / f"{len(self.kills):03d}-{witness.name}"
        copy = witness.copy(folder)
        compared = witness.check_living(copy)
        found, torn, lost = witness.replay(copy), "", 0
        damage = found.replayed.damage
        assert damage is None or "cut short" in damage, damage
        if plan.fault is Fault.KILL_IN_JOURNAL:
            cut = dice.random() < 0.5
            torn = tear(witness.folder, dice, cut)
            after = witness.replay(witness.copy(folder.with_name(folder.name + "-torn")))
            assert bool(torn) == ("cut short" in (after.replayed.damage or "")), (
                torn,
                after.replayed.damage,
            )
            if torn and cut:
                self.num_cut += 1
            found, lost = after, found.core.version - after.core.version
            if lost:
                cut = CutOff(at=time.monotonic(), shard=witness.number, updates=lost)
                self._cuts.append(cut)
        shutil.rmtree(self.cast.folder / "copies")
        return found, compared, torn, lost

    def _revive(self, witness: Witness, name: str) -> State:
        """Restart a shard; return the first snapshot that it writes."""
        known = entries(witness.folder)
        self.cast.start(name)
        fresh: list[pathlib.Path] = []

        def written() -> bool:
            fresh[:] = [path for path in entries(witness.folder) if path.name > known[-1].name]
            self.between()
            return bool(fresh)

        wait_until(written, PATIENCE_SECONDS, f"a snapshot of {name}, which was started anew")
        return load(fresh[0])[1]

    def _witness(self, shard: int) -> Witness:
        if shard not in self._witnesses:
            self._witnesses[shard] = Witness(self.cast.run_dir, shard)
        return self._witnesses[shard]

    def _all_run(self) -> None:
        for name in self.cast.nodes.processes:
            if not self.cast.is_running(name) and name not in self._struck():
                raise AssertionError(f"{name} has ended; {self.cast.nodes.output(name)[-3000:]}")

    def _struck(self) -> set[str]:
        return (
            {f"ps-{shard}" for shard in range(self.cast.nb_ps)}
            if self.cast.hearing.ambush
            else set()
        )

    def end(self) -> dict[str, Any]:
        """End the run; return its summary.

        Raises:
            AssertionError: A node ends with another exit code than 0, or its history breaks a
                promise.
        """
        self.cast.halt()
        self.codes = self.cast.wait(list(self.cast.nodes.processes), PATIENCE_SECONDS)
        assert set(self.codes.values()) == {0}, self.codes
        history = self.cast.history().with_others(self._cuts + ended(self.cast))
        broken = check(history, declared_by(self.cast))
        assert not broken, "\n".join(map(str, broken))
        summary = self.cast.nodes.summary()
        assert summary["journal"]["on"], summary["journal"]
        if not self.num_cut:
            assert summary["membership"]["lost_updates"] == 0, summary["membership"]
        return summary
