"""Barriers of the scripts of a run, and how the run ends with them: a plain object, no threads.

A script comes to a barrier before its first step, where it also waits for the run's first evaluator
(`first_evaluator`), at the beginning and at the end of each of its fits, where its model may
have become another one: then a phase of the run begins for all; and where it saves after a fit. It
also reports its own end. A barrier opens when every script that is in the run has come to it, or to
a later one. In the run is every worker that has not finished; one whose stream has been away for a
lease counts as lost, and one that never came as absent after a time of its own. What has opened
stays open, so that a worker which comes late, or again, catches up.

One script may stop a fit for all. The files are written by the chief, the lowest worker that is not
lost; one that has finished still is.

All state is soft: a shard that is started again learns it from its scripts, which report once more
what they wait for, what they have passed, and that they have finished.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence

from thinwire.ps.scripts.first_evaluator import FirstEvaluator
from thinwire.runtime.run.settings import FINISHED, RETURNED_EARLY, SCRIPT_FAILED

#: Barriers of one fit, in order: before it, at its last step, when its callbacks have ended, where
#: a loop goes on behind it, and by number where a file has been saved after it. At "begin" and
#: "left" a phase may begin: then one script offers its model, and all join.
OF_FIT = (
    *("begin", "begin-offered", "begin-joined", "end"),
    *("left", "left-offered", "left-joined", "loop", "saved"),
)
AT_END = OF_FIT.index("end")
#: The barrier before a script's first step. A script gives it the second name where the run has a
#: Supervisor, so that all wait for its evaluator though it may not have reported one yet.
START, START_WITH_SUPERVISOR = STARTS = ("start", "start-with-supervisor")
_CHANGING = {"begin": 0, "left": 1}
#: Names that order barriers and count fits. Others count as the last ones.
_NAMED = re.compile(rf"fit-(\d{{1,9}})-({'|'.join(OF_FIT)})(?:-(\d{{1,9}}))?")
_LAST, _FIRST = (math.inf, 0, 0), (0, 0, 0)


@dataclasses.dataclass(frozen=True)
class BarrierArrival:
    """What a script reports when it comes to a barrier, or comes back.

    Attributes:
        name: Of the barrier; empty: none, it only reports what it has passed.
        passed: Those that it has passed already.
        changes: Its model is another one than at the barrier before.
        changed: Those of `passed` at which a phase has begun.
    """

    name: str
    passed: Sequence[str] = ()
    changes: bool = False
    changed: Sequence[str] = ()


@dataclasses.dataclass(frozen=True)
class BarrierOpening:
    """A script may go on.

    Attributes:
        worker: Whose.
        name: Of the barrier.
        changes: A phase begins here, for some script's model is another one.
        offers: This script is to offer its model; the others then take over that.
    """

    worker: int
    name: str
    changes: bool = False
    offers: bool = False


@dataclasses.dataclass(frozen=True)
class ScriptsEnd:
    """The run is over; `message` is for people, and empty where there is nothing to explain."""

    cause: str
    message: str = ""


@dataclasses.dataclass(frozen=True)
class FitStop:
    """A script is to end a fit before its time."""

    worker: int
    fit: int
    epochs: int  # after how many; 0: immediately


@dataclasses.dataclass(frozen=True)
class ChiefNamed:
    """A script learns which worker writes the files."""

    worker: int
    chief: int


Outcome = BarrierOpening | ScriptsEnd | FitStop | ChiefNamed
#: Fit, stage, and number within the stage.
_Position = tuple[float, int, int]


def position_of(name: str) -> _Position:
    """Return where a barrier stands among the others.

    >>> position_of("fit-2-begin") < position_of("fit-2-end") < position_of("fit-10-begin")
    True
    >>> position_of("fit-1-end") < position_of("fit-1-saved-2") < position_of("fit-1-saved-10")
    True
    >>> position_of("start") < position_of("fit-1-begin")
    True
    """
    if name in STARTS:
        return _FIRST
    found = _NAMED.fullmatch(name)
    return (int(found[1]), OF_FIT.index(found[2]), int(found[3] or 0)) if found else _LAST


def phase_of(name: str) -> int:
    """Return the number of the phase that may begin at a barrier; 0: none may.

    >>> phase_of("fit-2-begin"), phase_of("fit-2-left"), phase_of("fit-2-end")
    (4, 5, 0)
    """
    found = _NAMED.fullmatch(name)
    return 2 * int(found[1]) + _CHANGING[found[2]] if found and found[2] in _CHANGING else 0


@dataclasses.dataclass
class _Script:
    """One incarnation of a worker's script.

    Attributes:
        incarnation: Which.
        seen_at: When anything came of it last.
        waits_at: The barrier that it waits at; None: it is on its way.
        fit: The newest fit that it has begun, from 1.
        has_finished: It will do no more.
    """

    incarnation: int
    seen_at: float
    waits_at: str | None = None
    fit: float = 0
    has_finished: bool = False


class Barriers:
    """The scripts of a run, as shard 0 knows them.

    Attributes:
        ended: Why the run is over; None: it is not, as far as scripts are concerned.
        first_evaluator: Whose start the scripts wait for before their first step.
        phase: The newest that has begun, as far as this shard knows; 0: the first.

    Args:
        nb_workers: Of the run; their scripts have the ids from 1 on.
        lease_seconds: Silence after which a script counts as lost.
        patience_seconds: From the first script's appearance, after which those that never came
            count as absent.
    """

    def __init__(self, nb_workers: int, lease_seconds: float, patience_seconds: float) -> None:
        self._nb_workers, self._lease_seconds = nb_workers, lease_seconds
        self._patience_seconds = patience_seconds
        self.first_evaluator = FirstEvaluator(lease_seconds)
        self._scripts: dict[int, _Script] = {}
        self._opened: set[str] = set()
        self._changes: set[str] = set()  # barriers at which some model is another one
        self.phase = 0
        self._stopped: dict[int, int] = {}  # fit -> after how many epochs
        self._chief = 1
        self._absent_at = math.inf  # when those who never came count as absent
        self.ended: ScriptsEnd | None = None

    def is_worker(self, worker: int) -> bool:
        """Return whether there is a worker of this id."""
        return 1 <= worker <= self._nb_workers

    def begin(self, worker: int, incarnation: int, now: float) -> list[Outcome]:
        """Note a script's stream; another incarnation begins anew."""
        self._absent_at = min(self._absent_at, now + self._patience_seconds)
        self.first_evaluator.script_came(now)
        known = self._scripts.get(worker)
        is_new = known is None or known.incarnation != incarnation
        if is_new:
            self._scripts[worker] = _Script(incarnation, now)
        outcomes = self._seen(worker, now)
        stops = [  # nobody waits for epochs of a script that comes late
            FitStop(worker, fit, 0 if is_new else epochs)
            for fit, epochs in sorted(self._stopped.items())
        ]
        return [ChiefNamed(worker, self._chief), *stops, *outcomes]

    def arrive(self, worker: int, arrival: BarrierArrival, now: float) -> list[Outcome]:
        """Note that a script has come to a barrier, once or again.

        Args:
            worker: Whose.
            arrival: Of it.
            now: By this shard's clock.
        """
        script, name, passed = self._scripts[worker], arrival.name, arrival.passed
        if arrival.changes and name not in self._opened:
            self._changes.add(name)
        for changed in arrival.changed:
            self._begin_phase(changed)
        if passed:  # the shard was started again in the middle of the run: all had come once
            self._opened.update(passed)
            self._absent_at = min(self._absent_at, now + 2 * self._lease_seconds)
        fits = [position_of(each)[0] for each in (*passed, name)]
        script.fit = max([script.fit, *(fit for fit in fits if fit < math.inf)])
        script.waits_at = name or None
        return self._seen(worker, now)

    def stop_fit(self, worker: int, fit: int, epochs: int, now: float) -> list[Outcome]:
        """Note that a script ends its present fit before its time: so do all others.

        Args:
            worker: Whose.
            fit: Its number.
            epochs: After how many of its epochs; 0: immediately.
            now: By this shard's clock.
        """
        stops: list[Outcome] = []
        if fit == self._scripts[worker].fit and fit not in self._stopped:
            self._stopped[fit] = epochs
            others = [other for other in sorted(self._scripts) if other != worker]
            stops += [FitStop(other, fit, epochs) for other in others]
        return [*stops, *self._seen(worker, now)]

    def finish(self, worker: int, failed: bool, message: str, now: float) -> list[Outcome]:
        """Note that a script has ended, once or again; one that failed ends the run."""
        script = self._scripts[worker]
        script.has_finished, script.waits_at = True, None
        if failed:
            return self._end(SCRIPT_FAILED, f"worker {worker} failed: {message}")
        return self._seen(worker, now)

    def alive(self, worker: int, now: float) -> list[Outcome]:
        """Note a sign of life."""
        return self._seen(worker, now)

    def lost(self, worker: int, incarnation: int, now: float) -> None:
        """Note that a script's stream has ended; it may come back within a lease."""
        script = self._scripts.get(worker)
        if script is not None and script.incarnation == incarnation:
            script.seen_at = now

    def excuse(self, seconds: float) -> None:
        """Do not count a time in which this process stood still and received nothing."""
        for script in self._scripts.values():
            script.seen_at += seconds
        self._absent_at += seconds
        self.first_evaluator.excuse(seconds)

    def present(self, now: float) -> list[int]:
        """Return the workers that the others wait for."""
        return [w for w in range(1, self._nb_workers + 1) if now < self._gone_at(w)]

    def is_running(self, worker: int, now: float) -> bool:
        """Return whether a worker's script has come and is expected to go on."""
        return worker in self._scripts and now < self._gone_at(worker)

    def tick(self, now: float) -> list[Outcome]:
        """Return what has become due by time alone."""
        return self._settle(now)

    def next_deadline(self, now: float) -> float | None:
        """Return when `tick` may have an effect; None: not before something else happens."""
        if self.ended is not None or not self._scripts:
            return None
        moments = [self._gone_at(worker) for worker in range(1, self._nb_workers + 1)]
        moments += [self._held_until(name) for _, name in self._waiting()]
        return min((when for when in moments if now < when < math.inf), default=None)

    # -- inside ------------------------------------------------------------------------------

    def _seen(self, worker: int, now: float) -> list[Outcome]:
        self._scripts[worker].seen_at = now
        return self._settle(now)

    def _settle(self, now: float) -> list[Outcome]:
        if self.ended is not None:
            return []
        if (early := self._returned_early()) is not None:
            return self._end(RETURNED_EARLY, early)
        present = self.present(now)
        if not present and any(script.has_finished for script in self._scripts.values()):
            return self._end(FINISHED)
        reached = min((self._position(worker) for worker in present), default=_LAST)
        openings = self._name_chief(now)
        for worker, name in list(self._waiting()):
            is_closed = position_of(name) > reached or now < self._held_until(name)
            if name not in self._opened and is_closed:
                continue
            self._opened.add(name)
            self._scripts[worker].waits_at = None
            if changes := name in self._changes:
                self._begin_phase(name)
            offers = changes and present[:1] == [worker]
            openings.append(BarrierOpening(worker, name, changes, offers))
        return openings

    def _held_until(self, name: str) -> float:
        """Return until when a barrier stays closed though all scripts have come to it."""
        if name not in STARTS:
            return -math.inf
        waits_until = self.first_evaluator.waits_until(name == START_WITH_SUPERVISOR)
        return min(waits_until, self._absent_at)

    def _begin_phase(self, name: str) -> None:
        self._changes.add(name)
        self.phase = max(self.phase, phase_of(name))

    def _name_chief(self, now: float) -> list[Outcome]:
        """Let all scripts know if another worker is to write the files."""
        scripts = self._scripts
        ended = {worker for worker, script in scripts.items() if script.has_finished}
        workers = range(1, self._nb_workers + 1)
        there = (each for each in workers if now < self._gone_at(each) or each in ended)
        chief = next(there, self._chief)
        if chief == self._chief:
            return []
        self._chief = chief
        return [ChiefNamed(worker, chief) for worker in sorted(scripts)]

    def _waiting(self) -> Iterator[tuple[int, str]]:
        for worker, script in sorted(self._scripts.items()):
            if script.waits_at is not None:
                yield worker, script.waits_at

    def _position(self, worker: int) -> _Position:
        """Return the barrier up to which a worker lets the others pass."""
        script = self._scripts.get(worker)
        if script is None or script.waits_at is None:
            return (-1, 0, 0)
        return position_of(script.waits_at)

    def _gone_at(self, worker: int) -> float:
        """Return from when on nobody waits for a worker, if nothing more comes of it."""
        script = self._scripts.get(worker)
        if script is None:
            return self._absent_at
        return -math.inf if script.has_finished else script.seen_at + self._lease_seconds

    def _returned_early(self) -> str | None:
        """Return whose script has ended while another is in a later fit; None: nobody's."""
        ahead = max(self._scripts, key=lambda worker: self._scripts[worker].fit, default=None)
        if ahead is None:
            return None
        newest = self._scripts[ahead].fit
        for worker, script in sorted(self._scripts.items()):
            if script.has_finished and script.fit < newest:
                return (
                    f"worker {worker} returned early: its script ended after {script.fit:.0f} "
                    f"calls of fit, and that of worker {ahead} has begun call {newest:.0f}; let "
                    "all scripts make the same calls."
                )
        return None

    def _end(self, cause: str, message: str = "") -> list[Outcome]:
        if self.ended is None:
            self.ended = ScriptsEnd(cause, message)
            return [self.ended]
        return []
