"""State of the evaluations of the model that the workers' scripts request from an evaluator.

At the end of a training epoch, a worker's script waits for the evaluation of the model after that
epoch. Shard 0 requests the evaluation of an epoch from the run's evaluator once, when the leading
script reaches the epoch's end. The leading script is the script with the lowest worker id among the
scripts that are not behind by a whole evaluation. All scripts get the same evaluation result for an
epoch, even if they request it at different times. If there is no evaluator (`evaluators`), the
shard answers the scripts that the epoch is not evaluated.

The evaluator process runs no callbacks of the script and trains nothing. If an evaluation depends
on a script's callbacks, or on state other than the weights, a worker's script must make the
evaluation. To make an evaluation in a worker's script, the shard appoints the waiting script with
the lowest worker id. If the script that must make an evaluation is lost, the shard appoints another
script.

The shard does not save the requests for evaluations. After a restart of the shard, the workers'
scripts report again for which evaluation they wait, and the results that they have received.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.barriers import Point, position_of
from thinwire.ps.scripts.evaluators import ANSWER_SECONDS, Evaluators
from thinwire.ps.scripts.notices import EVALUATOR, SUPERVISORS, Notice, Outcome, notice

#: Place of a script in its training: number of the call of fit (from 1) and number of the epoch.
#: The epoch number is -1 before the fit and infinite after the fit.
Position = tuple[float, float]

#: Seconds without an update after which an evaluation is requested although the leading script has
#: not reached the end of the epoch. The leading script's worker may wait in a round for a worker
#: whose script waits for this evaluation.
STALL_SECONDS = 5.0
#: Number of evaluation results, and number of calls of fit, that are stored for scripts and
#: Supervisors that connect late.
_MOST_ANSWERS, _MOST_FITS = 10_000, 1000
_NOWHERE: Position = (0, -1)


@dataclasses.dataclass
class _EvaluatedScript:
    """State of one incarnation (process start) of a worker's script at the evaluations.

    Attributes:
        incarnation: Random number that identifies one start of the script's process.
        position: Latest (fit, epoch) that the script has reported: numbers of its call of fit and
            of its epoch.
        waits_for: (fit, epoch) whose evaluation the script waits for; None if the script does not
            wait.
        since: Time at which the script began to wait for an evaluation, in seconds of the shard's
            clock.
        by_script: True if a worker's script, not the evaluator, must make the evaluation.
    """

    incarnation: int
    position: Position = _NOWHERE
    waits_for: tuple[int, int] | None = None
    since: float = 0.0
    by_script: bool = False


class Evaluations:
    """State of the evaluations that the scripts of a run request, which shard 0 stores.

    Args:
        evaluators: State of the run's evaluator and of its Supervisors.
        present: Function that returns the ids of the workers whose scripts are in the run at a
            given time of the shard's clock.
    """

    def __init__(self, evaluators: Evaluators, present: Callable[[float], Sequence[int]]) -> None:
        self._evaluators, self._present = evaluators, present
        self._scripts: dict[int, _EvaluatedScript] = {}
        self._fits: dict[int, pb.FitBegun] = {}
        self._histories: dict[int, pb.FitEnded] = {}
        self._answers: dict[tuple[int, int], pb.Evaluated] = {}
        # Results of all evaluations, in the order of their arrival.
        self._made: list[pb.Evaluated] = []
        # (fit, epoch) -> time at which scripts requested this evaluation; only unanswered requests.
        self._requested: dict[tuple[int, int], float] = {}
        # (fit, epoch) -> (worker id, incarnation) of the script that must make this evaluation.
        self._appointed: dict[tuple[int, int], tuple[int, int]] = {}
        # Number of a call of fit -> first epoch that a worker's script evaluates, for the calls
        # that scripts evaluate.
        self._of_scripts: dict[int, pb.EpochEnded] = {}
        self._version, self._moved_at = -1, -math.inf

    # -- the workers' scripts -----------------------------------------------------------------

    def begin(self, worker: int, incarnation: int, now: float) -> list[Outcome]:
        """Register the control stream of a worker's script, which may request evaluations.

        A new process of a worker's script has requested no evaluation yet.
        """
        known = self._scripts.get(worker)
        if known is None or known.incarnation != incarnation:
            self._scripts[worker] = _EvaluatedScript(incarnation)
        return self.settle(now)

    def begin_fit(self, worker: int, fit: pb.FitBegun, now: float) -> list[Outcome]:
        """Record that a worker's script has begun a call of fit; the script may report this
        twice.
        """
        self._advance(worker, (fit.fit, -1))
        known = self._fits.get(fit.fit)
        if known is not None and (known.validates or not fit.validates):
            return []
        self._fits[fit.fit] = fit
        _limit(self._fits, _MOST_FITS)
        receivers = EVALUATOR, SUPERVISORS
        return [*(notice(to, fit_begun=fit) for to in receivers), *self.settle(now)]

    def end_fit(self, fit: pb.FitEnded) -> list[Outcome]:
        """Record the history that a call of fit has returned; use only the first report of each
        fit.
        """
        if fit.fit in self._histories:
            return []
        self._histories[fit.fit] = fit
        _limit(self._histories, _MOST_FITS)
        return [notice(EVALUATOR, fit_ended=fit)]

    def arrive(self, worker: int, barrier: str, now: float) -> list[Outcome]:
        """Record that a worker's script has reached a barrier, for example the barrier after a
        fit.
        """
        fit, stage, _ = position_of(barrier)
        if math.isfinite(fit):
            self._advance(worker, (fit, math.inf if stage >= Point.END.place else -1))
        return self.settle(now)

    def request(
        self, worker: int, fit: int, epoch: int, now: float, by_script: bool = False
    ) -> list[Outcome]:
        """Record that a script waits for the evaluation of an epoch; the script may report this
        twice.

        Args:
            worker: Worker id of the script that waits for an evaluation.
            fit: Number of the script's call of fit; the first call is 1.
            epoch: Number of the epoch, as Keras counts epochs.
            now: Current time in seconds of the shard's clock.
            by_script: True if a worker's script, not the evaluator, must make this evaluation.
        """
        script = self._advance(worker, (fit, epoch))
        if script.waits_for != (fit, epoch):
            script.waits_for, script.since, script.by_script = (fit, epoch), now, by_script
        notices: list[Outcome] = []
        # A script that was appointed to evaluate reports again only after its stream was lost,
        # perhaps together with the request to evaluate. Without a second request the evaluation
        # would not be made.
        if self._appointed.get((fit, epoch)) == (worker, script.incarnation):
            notices.append(_request(worker, (fit, epoch), by_script=True))
        if by_script and fit not in self._of_scripts:
            self._of_scripts[fit] = pb.EpochEnded(fit=fit, epoch=epoch, by_script=True)
            notices.append(notice(EVALUATOR, epoch_ended=self._of_scripts[fit]))
            _limit(self._of_scripts, _MOST_FITS)
        return [*notices, *self.settle(now)]

    def know(self, worker: int, evaluated: pb.Evaluated, now: float) -> list[Outcome]:
        """Store an evaluation's result that a script received before this shard was restarted."""
        place = (evaluated.fit, evaluated.epoch)
        self._advance(worker, place)
        self._answers.setdefault(place, evaluated)
        self._forget(place)
        return self.settle(now)

    # -- Supervisors and the evaluator ----------------------------------------------------------

    def known_to_supervisors(self) -> list[pb.ToClient]:
        """Return the messages about earlier fits and evaluations for a new Supervisor."""
        fits = [pb.ToClient(fit_begun=fit) for fit in self._fits.values()]
        return fits + [pb.ToClient(evaluated=evaluated) for evaluated in self._made]

    def begin_evaluator(self, now: float) -> list[Outcome]:
        """Send a new evaluator the earlier fits and the open requests for evaluations."""
        return [
            *(notice(EVALUATOR, fit_begun=fit) for fit in self._fits.values()),
            *(notice(EVALUATOR, fit_ended=fit) for fit in self._histories.values()),
            *(notice(EVALUATOR, epoch_ended=first) for first in self._of_scripts.values()),
            *(_request(EVALUATOR, each) for each in self._requested if each not in self._appointed),
            *self.settle(now),
        ]

    def end_evaluator(self, now: float) -> list[Outcome]:
        """Record that the control stream of the run's evaluator has ended. An evaluator whose
        control stream to shard 0 has ended may connect again later.
        """
        self._requested = {
            place: since if place in self._appointed else now
            for place, since in self._requested.items()
        }
        return self.settle(now)

    def answer(self, evaluated: pb.Evaluated, now: float) -> list[Outcome]:
        """Record an evaluation's result; ignore further results for a request that is already
        answered.
        """
        place = (evaluated.fit, evaluated.epoch)
        if evaluated.answers:
            if place in self._answers:
                return []
            self._answers[place] = evaluated
            self._forget(place)
        notices: list[Outcome] = []
        if not evaluated.nobody:
            self._made.append(evaluated)
            del self._made[:-_MOST_ANSWERS]
            notices.append(notice(SUPERVISORS, evaluated=evaluated))
        return [*notices, *self.settle(now)]

    def answer_of_script(self, worker: int, evaluated: pb.Evaluated, now: float) -> list[Outcome]:
        """Record a script's evaluation result, unless another script was appointed for it."""
        appointed, _ = self._appointed.get((evaluated.fit, evaluated.epoch), (worker, 0))
        return self.answer(evaluated, now) if appointed == worker else []

    # -- deadlines ----------------------------------------------------------------------------

    def tick(self, now: float, version: int) -> list[Outcome]:
        """Return the messages to scripts and evaluators that result from passed deadlines.

        Args:
            now: Current time in seconds of the shard's clock.
            version: Number of updates that the shard has applied so far.
        """
        if version != self._version:
            self._version, self._moved_at = version, now
        return self.settle(now)

    def settle(self, now: float) -> list[Outcome]:
        """Return the messages that result from everything that is recorded at the time `now`."""
        notices: list[Outcome] = []
        for place, script in self._waiting():
            if place in self._answers:
                continue
            if now >= self._given_up_at(place):
                self._forget(place)
                (fit, epoch), why = place, self._evaluators.why_none()
                unmade = pb.Evaluated(fit=fit, epoch=epoch, answers=True, nobody=why)
                self._answers[place] = unmade
                continue
            if self._is_lost(place, now):
                self._forget(place)
            if place not in self._requested and (
                self._leader_position(now) >= place or now >= self._stalled_at(script)
            ):
                self._requested[place] = now
                notices.append(self._request_from(place, now))
        for worker, script in sorted(self._scripts.items()):
            if script.waits_for is not None and script.waits_for in self._answers:
                notices.append(notice(worker, evaluated=self._answers[script.waits_for]))
                script.waits_for = None
        _limit(self._answers, _MOST_ANSWERS)
        return notices

    # -- internal methods ---------------------------------------------------------------------

    def _advance(self, worker: int, position: Position) -> _EvaluatedScript:
        script = self._scripts[worker]
        script.position = max(script.position, position)
        if script.waits_for is not None and script.waits_for < position:
            script.waits_for = None
        return script

    def _waiting(self) -> list[tuple[tuple[int, int], _EvaluatedScript]]:
        """Return ((fit, epoch), script) of each script that waits for an evaluation, earliest
        first.
        """
        waiting = [
            (script.waits_for, script)
            for _, script in sorted(self._scripts.items())
            if script.waits_for is not None
        ]
        return sorted(waiting, key=lambda pair: pair[0])

    def _request_from(self, place: tuple[int, int], now: float) -> Outcome:
        """Request an evaluation from a script if a script must make it, else from the evaluator."""
        present = self._present(now)
        for worker, script in sorted(self._scripts.items()):
            if script.by_script and script.waits_for == place and worker in present:
                self._appointed[place] = worker, script.incarnation
                return _request(worker, place, by_script=True)
        return _request(EVALUATOR, place)

    def _is_lost(self, place: tuple[int, int], now: float) -> bool:
        """Return True if the script appointed to make an evaluation is lost or restarted."""
        if place not in self._appointed:
            return False
        worker, incarnation = self._appointed[place]
        is_same = self._scripts[worker].incarnation == incarnation
        return not is_same or worker not in self._present(now)

    def _forget(self, place: tuple[int, int]) -> None:
        """Delete the request of an evaluation, and the appointment of a script to make it."""
        self._requested.pop(place, None)
        self._appointed.pop(place, None)

    def _leader_position(self, now: float) -> Position:
        """Return the (fit, epoch) of the leading script, which decides when an evaluation is made.

        A script that is behind by a whole evaluation, for example after its restart, is not the
        leading script.
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
        """Return the time at which scripts stop waiting for an evaluation; -inf if they must not
        wait.
        """
        if place in self._appointed:
            return self._requested[place] + ANSWER_SECONDS
        if any(script.by_script and script.waits_for == place for script in self._scripts.values()):
            return math.inf
        return self._evaluators.given_up_at(self._requested.get(place, math.inf))


def _request(to: int, place: tuple[int, int], by_script: bool = False) -> Notice:
    fit, epoch = place
    return notice(to, epoch_ended=pb.EpochEnded(fit=fit, epoch=epoch, by_script=by_script))


def _limit(kept: dict, most: int) -> None:  # type: ignore[type-arg]
    """Delete the oldest entries of a dictionary that has more than `most` entries."""
    while len(kept) > most:
        del kept[next(iter(kept))]
