"""A fault every few seconds on the processes of a run, and its repair."""

from __future__ import annotations

import collections
import heapq
import itertools
import os
import random
import signal
import time
from collections.abc import Callable

from tests.chaos import soak_strangers
from tests.chaos.faults import Fault, Plan, Victim
from tests.chaos.process_trial import Trial
from tests.chaos.proxy import DOWN, UP

#: Exit codes of a node that received an end request before the run's end.
_ASKED_TO_GO = (0, 130)
_SECONDS_TO_GO = 60.0
#: Longest start of a node on a busy machine; a node that ends earlier has not started its work.
_START_SECONDS = 20.0


class Churn:
    """Applies and repairs faults; to be called from one thread.

    Args:
        trial: The trial with the running processes.
        seed: Seed of all random choices.

    Attributes:
        counts: Name of an action -> how often it was done.
        spared: Names of nodes that are not killed or ended for now.
        failures: Unexpected events.
        births: name -> start times of its processes.
    """

    def __init__(self, trial: Trial, seed: int) -> None:
        self._trial, self.cast = trial, trial.cast
        self._dice = random.Random(seed)
        self.counts: collections.Counter[str] = collections.Counter()
        self.spared: set[str] = set()
        self.failures: list[str] = []
        self.births: dict[str, list[float]] = collections.defaultdict(list)
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._down: set[str] = set()  # not to be touched: will be restarted
        self._going: dict[str, float] = {}  # a node that was requested to end -> its time limit
        for name in self.cast.names:
            self.born(name)
        trial.between = self.mend
        self._faults: dict[str, Callable[[], bool]] = {
            "kill -9 of a worker": lambda: self._kill_worker(forgets=False),
            "kill -9 of a worker, back as a new life": lambda: self._kill_worker(forgets=True),
            "SIGTERM to a worker, started again": self._ask_to_go,
            "kill -9 of a shard": self._kill_shard,
            "kill -9 of the Supervisor": self._replace_supervisor,
            "SIGSTOP, SIGCONT": self._stop,
            "cut": self._cut,
            "half-open": self._vanish,
            "one direction stalled": self._stall,
            "slow wire": self._delay,
            "connections reset": self._reset,
            "stranger": self._stranger,
        }
        if self.cast.protected:  # only seals and TLS reveal garbled bytes
            self._faults["garbled"] = self._garble

    def strike(self) -> str:
        """Apply one fault to one node; return the fault's name."""
        while True:
            what = self._dice.choice(list(self._faults))
            if self._faults[what]():
                self.counts[what] += 1
                return what

    def mend(self) -> None:
        """Run due actions, and record nodes that ended without a request."""
        now = time.monotonic()
        for name, until in list(self._going.items()):
            self._see_off(name, until)
        while self._due and self._due[0][0] <= now:
            heapq.heappop(self._due)[2]()
        for name in list(self.cast.nodes.processes):
            if not self.cast.is_running(name) and name not in self._down:
                code = self.cast.nodes.processes[name].returncode
                said = self.cast.nodes.output(name)[-1500:]
                self.failures.append(f"{name} ended with {code} unasked: ...{said}")
                self._start(name)

    def heal(self, seconds: float) -> None:
        """Wait until all faults are repaired."""
        deadline = time.monotonic() + seconds
        while (self._due or self._going) and time.monotonic() < deadline:
            self.mend()
            time.sleep(0.05)

    def born(self, name: str) -> None:
        """Note that a process has begun a life."""
        self.births[name].append(time.monotonic())

    # -- faults: whether it could be done ---------------------------------------------------------

    def _kill_worker(self, forgets: bool) -> bool:
        name = self._one_of(self.cast.workers)
        if name is None:
            return False
        self.cast.kill(name)
        if forgets:
            self.cast.forget(name)
        self._start_later(name, self._dice.uniform(0.0, 6.0))
        return True

    def _ask_to_go(self) -> bool:
        name = self._one_of(self.cast.workers)
        if name is None:
            return False
        self.cast.signal(name, signal.SIGTERM)
        self._down.add(name)
        self._going[name] = time.monotonic() + _SECONDS_TO_GO
        return True

    def _kill_shard(self) -> bool:
        name = self._one_of(self.cast.shards)
        if name is None:
            return False
        number = int(name[3:])
        os.kill(self.cast.pid(name), signal.SIGKILL)
        self._down.add(name)
        victim = Victim.OTHER_SHARD if number else Victim.SHARD_0
        plan = Plan(Fault.KILL_AFTER_PUSH, victim, 0.0, self._dice.getrandbits(31))
        try:
            self._trial.judge(plan, number, self._dice)
        except AssertionError as error:
            self.failures.append(f"{name}, killed: {error}")
            if not self.cast.is_running(name):
                self.cast.start(name)
        self.born(name)
        self._down.discard(name)
        return True

    def _replace_supervisor(self) -> bool:
        name = self._one_of(["supervisor"])
        if name is None:
            return False
        self.cast.kill(name)
        self._start_later(name, self._dice.uniform(0.0, 4.0))
        return True

    def _stop(self) -> bool:
        name = self._dice.choice([each for each in self.cast.names if each not in self._down])
        self.cast.signal(name, signal.SIGSTOP)
        seconds = self._dice.choice((0.3, 1.0, 2.5, 8.0))
        self._later(seconds, lambda: self.cast.signal(name, signal.SIGCONT))
        return True

    def _cut(self) -> bool:
        seconds = self._dice.choice((0.2, 1.0, 3.0, 12.0))
        for wire in self.cast.wires_of(self._dice.choice(self.cast.names)):
            wire.cut(seconds)
        return True

    def _vanish(self) -> bool:
        seconds = self._dice.choice((1.0, 4.0, 12.0))
        for wire in self.cast.wires_of(self._dice.choice(self.cast.names)):
            wire.vanish(seconds)
        return True

    def _stall(self) -> bool:
        seconds, way = self._dice.choice((0.5, 2.0, 8.0)), self._dice.choice((UP, DOWN))
        for wire in self.cast.wires_of(self._dice.choice(self.cast.names)):
            wire.stall(seconds, way)
        return True

    def _delay(self) -> bool:
        for wire in self.cast.wires_of(self._dice.choice(self.cast.names)):
            wire.delay(self._dice.uniform(1.0, 6.0), self._dice.uniform(0.01, 0.2))
        return True

    def _reset(self) -> bool:
        for wire in self.cast.wires_of(self._dice.choice(self.cast.names)):
            wire.reset()
        return True

    def _garble(self) -> bool:
        way = self._dice.choice((UP, DOWN))
        for wire in self.cast.wires_of(self._dice.choice(self.cast.names)):
            wire.garble(self._dice.uniform(1.0, 4.0), 0.05, way)
        return True

    def _stranger(self) -> bool:
        port = self._dice.choice(self.cast.ports)
        leave = soak_strangers.call(port, self._dice)
        self._later(self._dice.uniform(0.1, 8.0), leave)
        return True

    # -- repairs ----------------------------------------------------------------------------------

    def _one_of(self, names: list[str]) -> str | None:
        """Return the name of a node that may be killed now."""
        free = [name for name in names if name not in self._down and name not in self.spared]
        return self._dice.choice(free) if free else None

    def _start_later(self, name: str, seconds: float) -> None:
        self._down.add(name)
        self._later(seconds, lambda: self._start(name))

    def _start(self, name: str) -> None:
        self.cast.start(name)
        self.born(name)
        self._down.discard(name)

    def _later(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time.monotonic() + seconds, next(self._order), what))

    def _see_off(self, name: str, until: float) -> None:
        """Restart a worker that has ended on request."""
        if self.cast.is_running(name):
            if time.monotonic() < until:
                return
            self.failures.append(f"{name} was asked to go and did not in {_SECONDS_TO_GO:g} s")
            self.cast.kill(name)
        code = self.cast.nodes.processes[name].returncode
        starts = time.monotonic() - self.births[name][-1] < _START_SECONDS
        too_soon = code == -signal.SIGTERM and starts  # Python itself was still starting
        if code not in _ASKED_TO_GO and code != -signal.SIGKILL and not too_soon:
            self.failures.append(f"{name} was asked to go and ended with {code}")
        del self._going[name]
        self._start_later(name, self._dice.uniform(0.0, 4.0))
