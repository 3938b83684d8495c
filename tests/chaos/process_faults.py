"""Each fault that can hit a real node, one after the other in one run, and the recovery.

A full disk ends the run, so tests/test_journal_processes.py tests this fault alone.
"""

from __future__ import annotations

import os
import random
import signal
from typing import Any

from tests.chaos.faults import POSSIBLE, Fault, Plan, Victim
from tests.chaos.process_cast import Cast, wait_until
from tests.chaos.process_trial import PATIENCE_SECONDS, Trial
from tests.chaos.proxy import DOWN, UP
from tests.chaos.proxy_datagrams import Weather

#: Without TLS a garbled message on a stream cannot be told from a valid one. So the tests garble
#: datagrams, which have seals, and garble streams only if the run is protected.
_OF_DATAGRAMS = (Fault.DUPLICATED, Fault.REORDERED, Fault.GARBLED)
_SECONDS = (0.3, 1.0, 4.0)  # shorter and longer than a lease
_LONG_SECONDS = 8.0


def pairs(protected: bool) -> tuple[tuple[Fault, Victim], ...]:
    """Return the faults for processes; datagram faults only if the proxies can read the traffic."""
    left_out = {Fault.DISK_FULL, *((Fault.DUPLICATED, Fault.REORDERED) if protected else ())}
    if not protected:  # a worker's datagrams are on the way to a shard
        return tuple(
            (fault, victim)
            for fault, victim in POSSIBLE
            if fault not in left_out
            and not (fault in _OF_DATAGRAMS and victim is not Victim.WORKER)
        )
    return tuple(pair for pair in POSSIBLE if pair[0] not in left_out)


class Faults:
    """Applies faults to the nodes of a trial, and waits until all workers train again.

    Args:
        trial: Begun, with a Supervisor.
    """

    def __init__(self, trial: Trial) -> None:
        self._trial, self._cast = trial, trial.cast

    def befall(self, plan: Plan) -> str:
        """Carry out one plan; return the name of the victim.

        Raises:
            AssertionError: A node ended, a worker does not continue, or an update is lost.
        """
        dice = random.Random(plan.seed)
        name = _name_of(self._cast, plan.victim, dice)
        self._trial.progress(1 + int(10 * plan.instant))
        if plan.fault.kills and name.startswith("ps-"):
            self._trial.kill_and_judge(plan, int(name[3:]), dice)
        elif plan.fault.kills:
            self._kill_client(plan.fault, name)
        else:
            self._disturb(plan.fault, name, dice)
        self._trial.progress(2)
        return name

    def _kill_client(self, fault: Fault, name: str) -> None:
        """Kill a worker at one of its messages, or the Supervisor, and restart the node."""
        worker = int(name[7:]) if name.startswith("worker-") else 0
        if worker and not self._cast.protected:
            body = "reply" if fault is Fault.KILL_AFTER_PUSH else "push"
            ambush = WorkerAmbush(self._cast.pid(name), worker, body)
            self._cast.hearing.ambush = ambush
            wait_until(lambda: ambush.done, PATIENCE_SECONDS, f"a {body} of {name}")
        self._cast.kill(name)
        self._cast.hearing.ambush = None
        self._cast.start(name)

    def _disturb(self, fault: Fault, name: str, dice: random.Random) -> None:
        wires, seconds = self._cast.wires_of(name), dice.choice(_SECONDS)
        if fault in (Fault.SLOW, Fault.CLOCK_JUMP):
            self._stop(name, seconds if fault is Fault.SLOW else _LONG_SECONDS)
        elif fault in _OF_DATAGRAMS and not self._cast.protected:
            self._cast.weather.doubles = 0.3 * (fault is Fault.DUPLICATED)
            self._cast.weather.overtaken = 0.3 * (fault is Fault.REORDERED)
            self._cast.weather.garbles = 0.3 * (fault is Fault.GARBLED)
            self._trial.progress(5)
            vars(self._cast.weather).update(vars(Weather()))
        for wire in wires:
            if fault is Fault.CUT:
                wire.cut(seconds)
            elif fault is Fault.HALF_OPEN:
                wire.vanish(seconds)
            elif fault is Fault.GARBLED and self._cast.protected:
                wire.garble(seconds, 0.2, dice.choice((UP, DOWN)))

    def _stop(self, name: str, seconds: float) -> None:
        self._cast.signal(name, signal.SIGSTOP)
        wait_until(lambda: False, seconds)
        self._cast.signal(name, signal.SIGCONT)


class WorkerAmbush:
    """Kills a worker the moment it sends, or is sent, a message of some kind, which vanishes."""

    def __init__(self, pid: int, worker: int, body: str) -> None:
        """Lie in wait; see `process_trial.Ambush`."""
        self._pid, self._worker, self._body = pid, worker, body
        self.done = False

    def __call__(self, worker: int, shard: int, message: Any) -> bool:
        """Kill the victim at a message; see `proxy_messages.Ambusher`."""
        del shard
        if worker != self._worker or message.WhichOneof("body") != self._body:
            return True
        if not self.done:
            os.kill(self._pid, signal.SIGKILL)
            self.done = True
        return False


def _name_of(cast: Cast, victim: Victim, dice: random.Random) -> str:
    return {
        Victim.SHARD_0: "ps-0",
        Victim.OTHER_SHARD: dice.choice(cast.shards[1:]),
        Victim.WORKER: dice.choice(cast.workers),
        Victim.SUPERVISOR: "supervisor",
    }[victim]
