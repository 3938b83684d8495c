"""Barriers at which the workers' training scripts wait for each other, and the end of the run.

A worker's script waits at a barrier before its first training step, at the beginning and the end of
each call of fit, and when it saves files after a fit. At its first barrier, a worker's script waits
for the start of the run's first evaluator, too (`evaluators`). If one worker's script has
another model at the beginning or end of a fit, all scripts begin to train that model (a new phase).
A worker's script reports to shard 0 when the script ends.

A barrier opens when every script in the run has reached this barrier or a later barrier. A script
is in the run until its worker finishes, is lost (its stream has been closed for the time of a
lease), or is absent (it has never connected within a time limit). An opened barrier stays open, so
that a worker that starts late or restarts can catch up.

One worker's script may stop a call of fit early for the scripts of all workers. Only the script of
the chief (one of the workers) writes files. The chief is the worker with the lowest id that is not
lost. A worker whose script has finished can be the chief (the worker whose script writes files).

The shard does not save at which barriers the workers' scripts wait. After a restart of the shard,
the workers' scripts report again at which barrier they wait, which barriers they have passed, and
whether they have finished.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.barriers import LAST, Point, parse, position_of
from thinwire.ps.scripts.evaluators import Evaluators
from thinwire.ps.scripts.notices import Outcome, ScriptsEnd, notice
from thinwire.runtime.run.settings import FINISHED, RETURNED_EARLY, SCRIPT_FAILED


@dataclasses.dataclass
class _Script:
    """State of one incarnation (process start) of a worker's script.

    Attributes:
        incarnation: Random number that identifies one start of the script's process.
        seen_at: Time of the last message from the script, in seconds of the shard's clock.
        waits_at: Name of the barrier at which the script waits; None if the script does not wait.
        fit: Number of the newest fit that the script has begun; the first call of fit is 1.
        has_finished: True if the script has reported its end.
    """

    incarnation: int
    seen_at: float
    waits_at: str | None = None
    fit: float = 0
    has_finished: bool = False


class Barriers:
    """State of the barriers between all workers' scripts, which shard 0 stores.

    Attributes:
        ended: Cause of the end of the run; None while the run continues.
        phase: Number of the newest phase (model) of the run that shard 0 knows of; the first is 0.

    Args:
        nb_workers: Number of workers of the run; worker ids are 1 to `nb_workers`.
        evaluators: State of the run's evaluator; the scripts wait for the start of the first one
            before their first training step.
        lease_seconds: Time without a message after which a script counts as lost, in seconds.
        patience_seconds: Time in seconds, from the connection of the first script, after which a
            script that has never connected counts as absent.
    """

    def __init__(
        self,
        nb_workers: int,
        evaluators: Evaluators,
        lease_seconds: float,
        patience_seconds: float,
    ) -> None:
        self._nb_workers, self._evaluators = nb_workers, evaluators
        self._lease_seconds, self._patience_seconds = lease_seconds, patience_seconds
        self._scripts: dict[int, _Script] = {}
        self._opened: set[str] = set()
        # names of the barriers at which a script's model has changed
        self._changes: set[str] = set()
        self.phase = 0
        # number of a call of fit -> number of epochs after which the call ends
        self._stopped: dict[int, int] = {}
        self._chief = 1
        # time at which scripts that have never connected count as absent
        self._absent_at = math.inf
        self.ended: ScriptsEnd | None = None

    def is_worker(self, worker: int) -> bool:
        """Return True if the run has a worker with this id."""
        return 1 <= worker <= self._nb_workers

    def begin(self, worker: int, incarnation: int, now: float) -> list[Outcome]:
        """Register the control stream of a worker's script, which may wait at barriers.

        A new process of a worker's script has reached no barrier yet.
        """
        self._absent_at = min(self._absent_at, now + self._patience_seconds)
        self._evaluators.script_came(now)
        known = self._scripts.get(worker)
        is_new = known is None or known.incarnation != incarnation
        if is_new:
            self._scripts[worker] = _Script(incarnation, now)
        outcomes = self.alive(worker, now)
        # a restarted script is behind the other scripts and must end a stopped fit immediately
        stops = [
            _stop(worker, fit, 0 if is_new else epochs)
            for fit, epochs in sorted(self._stopped.items())
        ]
        return [_chief(worker, self._chief), *stops, *outcomes]

    def arrive(self, worker: int, arrival: pb.Barrier, now: float) -> list[Outcome]:
        """Record that a worker's script has reached a barrier. If a script reports the same barrier
        twice, the second report changes nothing.

        Args:
            worker: Worker id of the script that has reached the barrier.
            arrival: Message of the script; its name is empty if the script has reconnected and only
                reports which barriers it has passed.
            now: Current time in seconds of the shard's clock.
        """
        script, name, passed = self._scripts[worker], arrival.name, arrival.passed
        if arrival.changes and name not in self._opened:
            self._changes.add(name)
        for changed in arrival.changed:
            self._begin_phase(changed)
        # A script that has passed a barrier which this shard did not open shows that the shard was
        # restarted during the run. All scripts had connected before, so two leases are enough time
        # for them to reconnect.
        if passed:
            self._opened.update(passed)
            self._absent_at = min(self._absent_at, now + 2 * self._lease_seconds)
        fits = [position_of(barrier)[0] for barrier in (*passed, name)]
        script.fit = max([script.fit, *(fit for fit in fits if fit < math.inf)])
        script.waits_at = name or None
        return self.alive(worker, now)

    def stop_fit(self, worker: int, fit: int, epochs: int, now: float) -> list[Outcome]:
        """Record that a script ends its current call of fit early; end this fit in all other
        scripts.

        Args:
            worker: Worker id of the script that ends the fit.
            fit: Number of the script's call of fit; the first call is 1.
            epochs: Number of epochs after which the call of fit ends; 0 ends it immediately.
            now: Current time in seconds of the shard's clock.
        """
        stops: list[Outcome] = []
        if fit == self._scripts[worker].fit and fit not in self._stopped:
            self._stopped[fit] = epochs
            receivers = [receiver for receiver in sorted(self._scripts) if receiver != worker]
            stops += [_stop(receiver, fit, epochs) for receiver in receivers]
        return [*stops, *self.alive(worker, now)]

    def finish(self, worker: int, failed: bool, message: str, now: float) -> list[Outcome]:
        """Record that a worker's script has ended. A worker's script that has failed ends the run
        for all scripts.
        """
        script = self._scripts[worker]
        script.has_finished, script.waits_at = True, None
        if failed:
            return self._end(SCRIPT_FAILED, f"worker {worker} failed: {message}")
        return self.alive(worker, now)

    def alive(self, worker: int, now: float) -> list[Outcome]:
        """Record the time of a heartbeat message of a worker's script."""
        self._scripts[worker].seen_at = now
        return self.tick(now)

    def lost(self, worker: int, incarnation: int, now: float) -> None:
        """Record that the control stream of a worker's script has ended. A worker's script whose
        stream has ended may reconnect within the time of a lease.
        """
        script = self._scripts.get(worker)
        if script is not None and script.incarnation == incarnation:
            script.seen_at = now

    def present(self, now: float) -> list[int]:
        """Return the ids of the workers whose scripts are not finished, lost or absent,
        ascending.
        """
        return [w for w in range(1, self._nb_workers + 1) if now < self._gone_at(w)]

    def is_running(self, worker: int, now: float) -> bool:
        """Return True if a worker's script has connected, has not ended, and is not lost."""
        return worker in self._scripts and now < self._gone_at(worker)

    def tick(self, now: float) -> list[Outcome]:
        """Return the messages to workers' scripts that result from deadlines that have passed."""
        if self.ended is not None:
            return []
        if (early := self._returned_early()) is not None:
            return self._end(RETURNED_EARLY, early)
        present = self.present(now)
        if not present and any(script.has_finished for script in self._scripts.values()):
            return self._end(FINISHED)
        reached = min((self._position(worker) for worker in present), default=LAST)
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
            barrier = pb.Barrier(name=name, changes=changes, offers=offers)
            openings.append(notice(worker, barrier=barrier))
        return openings

    # -- internal methods --------------------------------------------------------------------

    def _held_until(self, name: str) -> float:
        """Return the time before which a barrier stays closed even if all scripts have arrived."""
        barrier = parse(name)
        if barrier is None or barrier.point.is_of_fit:
            return -math.inf
        with_supervisor = barrier.point is Point.START_WITH_SUPERVISOR
        return min(self._evaluators.first_is_awaited_until(with_supervisor), self._absent_at)

    def _begin_phase(self, name: str) -> None:
        self._changes.add(name)
        if (barrier := parse(name)) is not None:
            self.phase = max(self.phase, barrier.phase)

    def _name_chief(self, now: float) -> list[Outcome]:
        """Notify all workers' scripts if another worker becomes the chief, whose script writes
        files.
        """
        scripts = self._scripts
        ended = {worker for worker, script in scripts.items() if script.has_finished}
        workers = range(1, self._nb_workers + 1)
        candidates = (w for w in workers if now < self._gone_at(w) or w in ended)
        chief = next(candidates, self._chief)
        if chief == self._chief:
            return []
        self._chief = chief
        return [_chief(worker, chief) for worker in sorted(scripts)]

    def _waiting(self) -> Iterator[tuple[int, str]]:
        for worker, script in sorted(self._scripts.items()):
            if script.waits_at is not None:
                yield worker, script.waits_at

    def _position(self, worker: int) -> tuple[float, int, int]:
        """Return the sort key of the barrier at which a worker's script waits.

        A barrier cannot open before all scripts with smaller keys have reached it. The sort key of
        a script that waits at no barrier is before the keys of all barriers.
        """
        script = self._scripts.get(worker)
        if script is None or script.waits_at is None:
            return (-1, 0, 0)
        return position_of(script.waits_at)

    def _gone_at(self, worker: int) -> float:
        """Return the time at which a silent script counts as lost or absent; -inf if it has
        finished.
        """
        script = self._scripts.get(worker)
        if script is None:
            return self._absent_at
        return -math.inf if script.has_finished else script.seen_at + self._lease_seconds

    def _returned_early(self) -> str | None:
        """Return an error text if a script ended although another script is in a later call of fit.

        Returns:
            The error text, or None if no script ended early.
        """
        ahead = max(self._scripts, key=lambda worker: self._scripts[worker].fit, default=None)
        if ahead is None:
            return None
        newest = self._scripts[ahead].fit
        for worker, script in sorted(self._scripts.items()):
            if script.has_finished and script.fit < newest:
                return (
                    f"worker {worker} returned early: its script ended after {script.fit:.0f} "
                    f"calls of fit, but the script of worker {ahead} has begun call {newest:.0f}; "
                    "let all scripts make the same calls."
                )
        return None

    def _end(self, cause: str, message: str = "") -> list[Outcome]:
        if self.ended is None:
            self.ended = ScriptsEnd(cause, message)
            return [self.ended]
        return []


def _stop(worker: int, fit: int, epochs: int) -> Outcome:
    return notice(worker, stop_fit=pb.StopFit(fit=fit, epochs=epochs))


def _chief(worker: int, chief: int) -> Outcome:
    """Return the notice to a worker's script which worker is the chief, whose script writes
    files.
    """
    return notice(worker, chief=pb.Chief(worker=chief))
