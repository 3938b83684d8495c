"""Where scripts meet at the end of each epoch: a plain object, no threads.

A script comes to two places at the end of an epoch. At the first, its steps are done: it brings the
state of its training metrics, and gets the sum over all scripts. At the second, its callbacks have
run: it brings whether one of them has set ``stop_training``, and gets the number of epochs after
which the fit ends for all.

There are two ways to meet. Workers that step in rounds wait: the answer is due when every script of
the run has come, so all have the same values of the same rows. Other workers do not wait: the
answer is the sum of the newest report of each script, and the fit ends after the epoch that the
fastest script is in.

A script is not waited for in three cases: it is gone; it is behind by a whole epoch, as one that
was started again; or its worker waits in a round, for a push that may never come because another
script waits here. There is no limit of time: an epoch may take an hour longer on a slow device.

All state is soft. A shard that is started again learns it from its scripts: they repeat what they
wait for, and the newest answer that they have received.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from thinwire.proto import thinwire_pb2 as pb
from thinwire.ps.scripts.barriers import AT_END, position_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: The fit, the epoch, and 0 at its last step or 1 behind its callbacks. The epoch is -1 before the
#: first one ends, and infinite when the fit has ended.
Place = tuple[float, float, int]

#: After so long without an update, nobody waits for a script whose worker waits in a round. It may
#: wait for the push of a worker whose script waits here. An update that is under way comes sooner.
HELD_SECONDS = 0.5
#: Answers that are kept for scripts that come later. One may have a mebibyte.
_MOST_ANSWERS = 4
_NOWHERE: Place = (0, -1, 0)


@dataclasses.dataclass(frozen=True)
class MeetingAnswer:
    """A script gets its answer."""

    worker: int
    meeting: pb.EpochMeeting


@dataclasses.dataclass(frozen=True)
class FitEndsEarly:
    """A script has ended a fit for all, after so many epochs."""

    worker: int
    fit: int
    epochs: int


MeetingOutcome = MeetingAnswer | FitEndsEarly


@dataclasses.dataclass
class _MeetingScript:
    """One incarnation of a worker's script.

    Attributes:
        incarnation: Which.
        place: The farthest place that it has come to; None: this shard does not know yet.
        newest: What it has brought to the newest end of steps; None: nothing yet.
        waits_with: What it waits with; None: it is on its way.
        since: When it began to wait.
    """

    incarnation: int
    place: Place | None = None
    newest: pb.EpochMeeting | None = None
    waits_with: pb.EpochMeeting | None = None
    since: float = 0.0


class EpochMeetings:
    """The ends of epochs of a run's scripts, as shard 0 knows them.

    Args:
        present: Returns the workers whose scripts are in the run, at a time of this shard's clock.
        held: Returns the workers that wait in a round.
    """

    def __init__(
        self,
        present: Callable[[float], Sequence[int]],
        held: Callable[[], Collection[int]] = frozenset,
    ) -> None:
        self._present, self._held = present, held
        self._scripts: dict[int, _MeetingScript] = {}
        self._answers: dict[Place, pb.EpochMeeting] = {}
        self._ends: dict[int, int] = {}  # fit -> epochs after which it ends early; 0: immediately
        self._version, self._moved_at = -1, -math.inf

    def begin(self, worker: int, incarnation: int, now: float) -> list[MeetingOutcome]:
        """Note a script's stream; another incarnation starts from the beginning."""
        known = self._scripts.get(worker)
        if known is None:
            self._scripts[worker] = _MeetingScript(incarnation)
        elif known.incarnation != incarnation:
            self._scripts[worker] = _MeetingScript(incarnation, _NOWHERE)
        return self._settle(now)

    def arrive(self, worker: int, barrier: str, now: float) -> list[MeetingOutcome]:
        """Note that a script has come to a barrier, such as the one at the end of a fit."""
        fit, stage, _ = position_of(barrier)
        if math.isfinite(fit):
            self._advance(worker, (fit, math.inf if stage >= AT_END else -1, 0))
        return self._settle(now)

    def end_fit(self, fit: int, epochs: int) -> None:
        """Note that a fit ends for all after so many epochs; 0: immediately."""
        self._ends.setdefault(fit, epochs)

    def meet(self, worker: int, meeting: pb.EpochMeeting, now: float) -> list[MeetingOutcome]:
        """Note that a script has come to the end of an epoch, once or again.

        Args:
            worker: Whose script.
            meeting: What it brings.
            now: By this shard's clock.
        """
        place = place_of(meeting)
        script = self._advance(worker, place)
        if meeting.answers:
            self._keep(place, meeting)
            return self._settle(now)
        if not meeting.after_callbacks:
            script.newest = meeting
        if meeting.waits and place > max(self._answers, default=_NOWHERE):
            if script.waits_with is None or place_of(script.waits_with) != place:
                script.since = now
            script.waits_with = meeting
            return self._settle(now)
        outcomes: list[MeetingOutcome] = []
        if meeting.stops and meeting.fit not in self._ends:
            outcomes.append(self._end(worker, meeting.fit, self._fastest(meeting.fit, worker, now)))
        answer = self._answers.get(place)  # others were not kept waiting for it
        if answer is None or meeting.after_callbacks:
            answer = self._answer(meeting, list(self._newest(meeting.fit, now)))
        return [*outcomes, MeetingAnswer(worker, answer), *self._settle(now)]

    # -- time ---------------------------------------------------------------------------------

    def excuse(self, seconds: float) -> None:
        """Do not count a time in which this process stood still and received nothing."""
        for script in self._scripts.values():
            script.since += seconds
        self._moved_at += seconds

    def tick(self, now: float, version: int) -> list[MeetingOutcome]:
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
        if not self._waiting():
            return None
        return now + HELD_SECONDS  # which workers wait in a round changes without a message here

    # -- inside -------------------------------------------------------------------------------

    def _advance(self, worker: int, place: Place) -> _MeetingScript:
        script = self._scripts[worker]
        script.place = max(script.place or _NOWHERE, place)
        if script.waits_with is not None and place_of(script.waits_with) < place:
            script.waits_with = None
        return script

    def _waiting(self) -> list[tuple[int, _MeetingScript]]:
        """Return the scripts that wait, those at the earliest place first."""
        waiting = [(w, each) for w, each in sorted(self._scripts.items()) if each.waits_with]
        return sorted(waiting, key=lambda pair: place_of(pair[1].waits_with))

    def _settle(self, now: float) -> list[MeetingOutcome]:
        outcomes: list[MeetingOutcome] = []
        for worker, script in self._waiting():
            meeting = script.waits_with
            if meeting is None:
                continue
            place = place_of(meeting)
            answer = self._answers.get(place)
            if answer is None:
                if not self._have_come(place, script, now):
                    continue
                here = [
                    (other, each.waits_with)
                    for other, each in sorted(self._scripts.items())
                    if each.waits_with is not None and place_of(each.waits_with) == place
                ]
                stopping = next((other for other, each in here if each.stops), None)
                if stopping is not None and meeting.fit not in self._ends:
                    outcomes.append(self._end(stopping, meeting.fit, meeting.epoch + 1))
                answer = self._answer(meeting, [each for _, each in here])
                self._keep(place, answer)
            outcomes.append(MeetingAnswer(worker, answer))
            script.waits_with = None
        return outcomes

    def _have_come(self, place: Place, script: _MeetingScript, now: float) -> bool:
        """Return whether nobody has to be waited for at a place, where `script` waits."""
        quiet = now - max(script.since, self._moved_at)
        held = self._held() if quiet >= HELD_SECONDS else ()
        newest = max(self._answers, default=_NOWHERE)
        for worker in self._present(now):
            other = self._scripts.get(worker)
            at = None if other is None else other.place
            if (at is None or newest <= at < place) and worker not in held:
                return False
        return True

    def _answer(
        self, meeting: pb.EpochMeeting, reports: Sequence[pb.EpochMeeting]
    ) -> pb.EpochMeeting:
        """Return the answer to those who meet, from what scripts have brought."""
        answer = pb.EpochMeeting(
            fit=meeting.fit, epoch=meeting.epoch, after_callbacks=meeting.after_callbacks
        )
        if not meeting.after_callbacks:
            answer.states.extend(_sums([each.states for each in reports]))
        elif meeting.fit in self._ends:
            answer.epochs = self._ends[meeting.fit] or meeting.epoch + 1
        return answer

    def _newest(self, fit: int, now: float) -> Iterator[pb.EpochMeeting]:
        """Yield what each script of the run has brought last in a fit, in order of worker."""
        present = set(self._present(now))
        for worker, script in sorted(self._scripts.items()):
            if worker in present and script.newest is not None and script.newest.fit == fit:
                yield script.newest

    def _fastest(self, fit: int, worker: int, now: float) -> int:
        """Return how many epochs of a fit the fastest script will have at the end of its present.

        Args:
            fit: From 1.
            worker: Whose script has ended an epoch just now.
            now: By this shard's clock.
        """
        most = 0
        for other in {worker, *self._present(now)}:
            script = self._scripts.get(other)
            in_fit, epoch, stage = (script and script.place) or _NOWHERE
            if script is None or in_fit != fit:
                continue
            if math.isfinite(epoch):  # behind its callbacks the next epoch has begun
                most = max(most, int(epoch) + 1 + (stage if other != worker else 0))
            elif script.newest is not None and script.newest.fit == fit:
                most = max(most, script.newest.epoch + 1)
        return most

    def _end(self, worker: int, fit: int, epochs: int) -> FitEndsEarly:
        self._ends[fit] = epochs
        return FitEndsEarly(worker, fit, epochs)

    def _keep(self, place: Place, answer: pb.EpochMeeting) -> None:
        self._answers.setdefault(place, answer)
        while len(self._answers) > _MOST_ANSWERS:
            del self._answers[min(self._answers)]


def place_of(meeting: pb.EpochMeeting | None) -> Place:
    """Return where a script is that brings a meeting."""
    if meeting is None:
        return _NOWHERE
    return (meeting.fit, meeting.epoch, int(meeting.after_callbacks))


def _sums(reports: Sequence[Sequence[pb.MetricState]]) -> Iterator[pb.MetricState]:
    """Yield the sums of the metrics that all scripts have brought, with as many values each."""
    states: list[Mapping[str, NDArray[np.float64]]] = [
        {state.name: np.frombuffer(state.values, "<f8") for state in report} for report in reports
    ]
    for state in reports[0] if reports else ():
        rows = [each.get(state.name) for each in states]
        arrays = [row for row in rows if row is not None and row.size == len(state.values) // 8]
        if len(arrays) == len(rows):
            yield pb.MetricState(name=state.name, values=np.sum(arrays, axis=0).tobytes())
