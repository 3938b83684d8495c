"""Evaluations that the scripts of a run request, and who makes them: a plain object, no threads.

At the end of an epoch a script waits for the evaluation of that epoch. It is requested from the
evaluator once, when the leader has come there: of the scripts that are not behind the others by a
whole evaluation the one with the lowest id. All get the same answer, whenever they come. Where
nobody evaluates, because no Supervisor starts an evaluator, or the one that did has been away for a
lease, all are notified of that, and it stays so for that epoch.

The evaluator runs no callbacks and trains nothing. Where a script reports that its callbacks, or
what training has changed beside the weights, take part in an evaluation, one of the waiting scripts
evaluates in place of the evaluator: the one with the lowest id. If it is lost, another does.

All state is soft: a shard that is started again learns it from its scripts, which report once more
what they wait for and the answers that they have received.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence

from thinwire.proto import thinwire_pb2 as pb
from thinwire.ps.scripts.barriers import AT_END, position_of

#: The fit, from 1, and the epoch; at a fit's beginning -1, at its end infinity.
Position = tuple[float, float]

#: How long an evaluator may take from a script's first request until it has connected.
START_SECONDS = 600.0
#: How long one that has connected may take for an answer.
ANSWER_SECONDS = 3600.0
#: Without any update for so long, nobody waits for the leader: it may wait for those who wait.
STALL_SECONDS = 5.0
#: What is kept for scripts and Supervisors that come later.
_MOST_ANSWERS, _MOST_FITS = 10_000, 1000
_NOWHERE: Position = (0, -1)


@dataclasses.dataclass(frozen=True)
class ForScript:
    """A message for a worker's script."""

    worker: int
    message: pb.ToClient


@dataclasses.dataclass(frozen=True)
class ForEvaluator:
    """A message for the evaluator; there is one."""

    message: pb.ToClient


@dataclasses.dataclass(frozen=True)
class ForSupervisors:
    """A message for Supervisors that start evaluators."""

    message: pb.ToClient


Notice = ForScript | ForEvaluator | ForSupervisors


@dataclasses.dataclass
class _EvaluatedScript:
    """One incarnation of a worker's script.

    Attributes:
        incarnation: Which.
        position: How far it is known to have come.
        waits_for: The epoch whose evaluation it waits for; None: it does not.
        since: From when on.
        by_script: Whether a script must make that evaluation.
    """

    incarnation: int
    position: Position = _NOWHERE
    waits_for: tuple[int, int] | None = None
    since: float = 0.0
    by_script: bool = False


class Evaluations:
    """The evaluations of a run, as shard 0 knows them.

    Args:
        lease_seconds: Silence after which a Supervisor counts as lost.
        present: Returns the workers whose scripts are in the run, at a time of this shard's clock.
    """

    def __init__(self, lease_seconds: float, present: Callable[[float], Sequence[int]]) -> None:
        self._lease_seconds, self._present = lease_seconds, present
        self._scripts: dict[int, _EvaluatedScript] = {}
        self._fits: dict[int, pb.FitBegun] = {}
        self._histories: dict[int, pb.FitEnded] = {}
        self._answers: dict[tuple[int, int], pb.Evaluated] = {}
        self._made: list[pb.Evaluated] = []  # all, in order
        self._requested: dict[tuple[int, int], float] = {}  # since when; not answered yet
        self._appointed: dict[
            tuple[int, int], tuple[int, int]
        ] = {}  # worker and incarnation, if one
        self._of_scripts: dict[int, pb.EpochEnded] = {}  # fits that scripts evaluate: their first
        self._supervisors: set[int] = set()  # that start evaluators
        self._has_evaluator = False
        self._given_up = ""  # why the Supervisor starts none
        self._alone_since: float | None = None  # without any Supervisor
        self._version, self._moved_at = -1, -math.inf

    # -- scripts ------------------------------------------------------------------------------

    def begin(self, worker: int, incarnation: int, now: float) -> list[Notice]:
        """Note a script's stream; another incarnation begins anew."""
        if self._alone_since is None:
            self._alone_since = now
        known = self._scripts.get(worker)
        if known is None or known.incarnation != incarnation:
            self._scripts[worker] = _EvaluatedScript(incarnation)
        return self._settle(now)

    def begin_fit(self, worker: int, fit: pb.FitBegun, now: float) -> list[Notice]:
        """Note that a script has begun a fit, once or again."""
        self._advance(worker, (fit.fit, -1))
        known = self._fits.get(fit.fit)
        if known is not None and (known.validates or not fit.validates):
            return []
        self._fits[fit.fit] = fit
        _limit(self._fits, _MOST_FITS)
        message = pb.ToClient(fit_begun=fit)
        return [*self._for_evaluator(message), ForSupervisors(message), *self._settle(now)]

    def end_fit(self, fit: pb.FitEnded) -> list[Notice]:
        """Note what a script's fit has returned; the first script's counts."""
        if fit.fit in self._histories:
            return []
        self._histories[fit.fit] = fit
        _limit(self._histories, _MOST_FITS)
        return list(self._for_evaluator(pb.ToClient(fit_ended=fit)))

    def arrive(self, worker: int, barrier: str, now: float) -> list[Notice]:
        """Note that a script has come to a barrier, as the one at the end of a fit."""
        fit, place, _ = position_of(barrier)
        if math.isfinite(fit):
            self._advance(worker, (fit, math.inf if place >= AT_END else -1))
        return self._settle(now)

    def request(
        self, worker: int, fit: int, epoch: int, now: float, by_script: bool = False
    ) -> list[Notice]:
        """Note that a script waits for the evaluation of an epoch, once or again.

        Args:
            worker: Whose script.
            fit: From 1.
            epoch: As Keras counts them.
            now: By this shard's clock.
            by_script: Whether a script must evaluate.
        """
        script = self._advance(worker, (fit, epoch))
        if script.waits_for != (fit, epoch):
            script.waits_for, script.since, script.by_script = (fit, epoch), now, by_script
        notices: list[Notice] = []
        if self._appointed.get((fit, epoch)) == (worker, script.incarnation):  # its stream was lost
            notices.append(ForScript(worker, _request((fit, epoch), by_script=True)))
        if by_script and fit not in self._of_scripts:
            self._of_scripts[fit] = pb.EpochEnded(fit=fit, epoch=epoch, by_script=True)
            notices += self._for_evaluator(pb.ToClient(epoch_ended=self._of_scripts[fit]))
            _limit(self._of_scripts, _MOST_FITS)
        return [*notices, *self._settle(now)]

    def know(self, worker: int, evaluated: pb.Evaluated, now: float) -> list[Notice]:
        """Learn an answer from a script that has received it, from this shard's former life."""
        place = (evaluated.fit, evaluated.epoch)
        self._advance(worker, place)
        self._answers.setdefault(place, evaluated)
        self._forget(place)
        return self._settle(now)

    # -- Supervisors and the evaluator ----------------------------------------------------------

    def offer(self, supervisor: int, now: float) -> list[pb.ToClient]:
        """Note that a Supervisor starts an evaluator where one is wanted.

        Args:
            supervisor: A number of its stream.
            now: By this shard's clock.

        Returns:
            What it has to know of before.
        """
        del now
        self._supervisors.add(supervisor)
        self._given_up, self._alone_since = "", None
        fits = [pb.ToClient(fit_begun=fit) for fit in self._fits.values()]
        return fits + [pb.ToClient(evaluated=evaluated) for evaluated in self._made]

    def withdraw(self, supervisor: int, why: str, now: float) -> list[Notice]:
        """Note that a Supervisor starts no evaluator.

        Args:
            supervisor: A number of its stream.
            why: What has become of its evaluator; empty: the stream has ended, which may come back.
            now: By this shard's clock.
        """
        is_known = supervisor in self._supervisors
        self._supervisors.discard(supervisor)
        if not self._supervisors and (why or is_known):
            self._given_up, self._alone_since = why, now
        return self._settle(now)

    def begin_evaluator(self, now: float) -> list[Notice]:
        """Note the evaluator's stream; it gets all that it has to know of before."""
        self._has_evaluator = True
        news = [pb.ToClient(fit_begun=fit) for fit in self._fits.values()]
        news += [pb.ToClient(fit_ended=fit) for fit in self._histories.values()]
        news += [pb.ToClient(epoch_ended=first) for first in self._of_scripts.values()]
        news += [_request(place) for place in self._requested if place not in self._appointed]
        return [*map(ForEvaluator, news), *self._settle(now)]

    def end_evaluator(self, now: float) -> list[Notice]:
        """Note that the evaluator's stream has ended; another may come."""
        self._has_evaluator = False
        self._requested = {
            place: since if place in self._appointed else now
            for place, since in self._requested.items()
        }
        return self._settle(now)

    def answer(self, evaluated: pb.Evaluated, now: float) -> list[Notice]:
        """Note an evaluation of the evaluator or a script; the first answer to a request counts."""
        place = (evaluated.fit, evaluated.epoch)
        if evaluated.answers:
            if place in self._answers:
                return []
            self._answers[place] = evaluated
            self._forget(place)
        notices: list[Notice] = []
        if not evaluated.nobody:
            self._made.append(evaluated)
            del self._made[:-_MOST_ANSWERS]
            notices.append(ForSupervisors(pb.ToClient(evaluated=evaluated)))
        return [*notices, *self._settle(now)]

    def answer_of_script(self, worker: int, evaluated: pb.Evaluated, now: float) -> list[Notice]:
        """Note an evaluation of a script, unless another one was appointed since."""
        appointed, _ = self._appointed.get((evaluated.fit, evaluated.epoch), (worker, 0))
        return self.answer(evaluated, now) if appointed == worker else []

    # -- time ---------------------------------------------------------------------------------

    def excuse(self, seconds: float) -> None:
        """Do not count a time in which this process stood still and received nothing."""
        for script in self._scripts.values():
            script.since += seconds
        self._requested = {place: since + seconds for place, since in self._requested.items()}
        self._moved_at += seconds
        if self._alone_since is not None:
            self._alone_since += seconds

    def tick(self, now: float, version: int) -> list[Notice]:
        """Return what has become due by time alone.

        Args:
            now: By this shard's clock.
            version: Updates applied so far.
        """
        if version != self._version:
            self._version, self._moved_at = version, now
        return self._settle(now)

    def next_deadline(self, now: float) -> float | None:
        """Return when `tick` may have an effect; None: not before something else happens."""
        moments = [self._given_up_at(place) for place, _ in self._waiting()]
        moments += [self._stalled_at(script) for _, script in self._waiting()]
        return min((when for when in moments if now < when < math.inf), default=None)

    # -- inside -------------------------------------------------------------------------------

    def _advance(self, worker: int, position: Position) -> _EvaluatedScript:
        script = self._scripts[worker]
        script.position = max(script.position, position)
        if script.waits_for is not None and script.waits_for < position:
            script.waits_for = None
        return script

    def _for_evaluator(self, message: pb.ToClient) -> Iterator[Notice]:
        if self._has_evaluator:
            yield ForEvaluator(message)

    def _waiting(self) -> list[tuple[tuple[int, int], _EvaluatedScript]]:
        """Return the scripts that wait, and for what, the earliest epoch first."""
        waiting = [
            (script.waits_for, script)
            for _, script in sorted(self._scripts.items())
            if script.waits_for is not None
        ]
        return sorted(waiting, key=lambda pair: pair[0])

    def _settle(self, now: float) -> list[Notice]:
        notices: list[Notice] = []
        for place, script in self._waiting():
            if place in self._answers:
                continue
            if now >= self._given_up_at(place):
                self._forget(place)
                self._answers[place] = self._nobody(place)
                continue
            if self._is_lost(place, now):
                self._forget(place)
            if place not in self._requested and (
                self._leader_position(now) >= place or now >= self._stalled_at(script)
            ):
                self._requested[place] = now
                notices += self._request_from(place, now)
        for worker, script in sorted(self._scripts.items()):
            if script.waits_for is not None and script.waits_for in self._answers:
                message = pb.ToClient(evaluated=self._answers[script.waits_for])
                notices.append(ForScript(worker, message))
                script.waits_for = None
        _limit(self._answers, _MOST_ANSWERS)
        return notices

    def _request_from(self, place: tuple[int, int], now: float) -> Iterator[Notice]:
        """Request an evaluation: from a script where one must make it, else from the evaluator."""
        present = self._present(now)
        for worker, script in sorted(self._scripts.items()):
            if script.by_script and script.waits_for == place and worker in present:
                self._appointed[place] = worker, script.incarnation
                yield ForScript(worker, _request(place, by_script=True))
                return
        yield from self._for_evaluator(_request(place))

    def _is_lost(self, place: tuple[int, int], now: float) -> bool:
        """Return whether the script that was appointed for an evaluation is not there any more."""
        if place not in self._appointed:
            return False
        worker, incarnation = self._appointed[place]
        is_same = self._scripts[worker].incarnation == incarnation
        return not is_same or worker not in self._present(now)

    def _forget(self, place: tuple[int, int]) -> None:
        """Forget whom an evaluation was requested from."""
        self._requested.pop(place, None)
        self._appointed.pop(place, None)

    def _leader_position(self, now: float) -> Position:
        """Return how far the script has come that decides when an evaluation is made.

        One that is behind by a whole evaluation, as one that was started again, is not waited for.
        """
        places = [*self._answers, *self._requested]
        newest = max(places, default=_NOWHERE)
        present = self._present(now)
        positions = [self._scripts[w].position for w in sorted(present) if w in self._scripts]
        upfront = [position for position in positions if position >= newest]
        return next(iter([*upfront, *positions]), _NOWHERE)

    def _stalled_at(self, script: _EvaluatedScript) -> float:
        return max(script.since, self._moved_at) + STALL_SECONDS

    def _given_up_at(self, place: tuple[int, int]) -> float:
        """Return from when on nobody will make an evaluation."""
        if place in self._appointed:
            return self._requested[place] + ANSWER_SECONDS
        if any(each.by_script and each.waits_for == place for each in self._scripts.values()):
            return math.inf
        if self._has_evaluator or self._supervisors:
            return self._requested.get(place, math.inf) + self._patience_seconds
        if self._given_up:
            return -math.inf
        return -math.inf if self._alone_since is None else self._alone_since + self._lease_seconds

    @property
    def _patience_seconds(self) -> float:
        return ANSWER_SECONDS if self._has_evaluator else START_SECONDS

    def _nobody(self, place: tuple[int, int]) -> pb.Evaluated:
        why = self._given_up or "there is no Supervisor"
        if self._has_evaluator or self._supervisors:
            what = "answered" if self._has_evaluator else "come"
            why = f"the evaluator has not {what} within {self._patience_seconds:g} s"
        fit, epoch = place
        return pb.Evaluated(fit=fit, epoch=epoch, answers=True, nobody=why)


def _request(place: tuple[int, int], by_script: bool = False) -> pb.ToClient:
    ended = pb.EpochEnded(fit=place[0], epoch=place[1], by_script=by_script)
    return pb.ToClient(epoch_ended=ended)


def _limit(kept: dict, most: int) -> None:  # type: ignore[type-arg]
    """Forget the oldest entries of a dictionary."""
    while len(kept) > most:
        del kept[next(iter(kept))]
