"""Synchronization points (meetings) of the workers' scripts after each training epoch.

At the end of each training epoch, a worker's script meets the other workers' scripts twice. The
first meeting of an epoch takes place after the script's training steps: the script sends the state
of its training metrics and receives the sum over all scripts. The second meeting of an epoch takes
place after the script's callbacks: the script reports whether a callback has set ``stop_training``
and receives the number of epochs after which the fit ends for all scripts.

A meeting of scripts at the end of an epoch either waits for all scripts or answers without waiting.
If workers step together in rounds, their meeting waits: the shard answers when every script of the
run has arrived, so all scripts receive the same values. If workers step without rounds, their
meeting does not wait: the answer is the sum of the newest reports of all scripts, and an early end
of the fit takes effect after the current epoch of the fastest script.

A meeting of scripts does not wait for a script that is lost, for a script that is behind by a whole
epoch (after a restart), or for a script whose worker waits in a round for the push of another
worker. A worker that waits in a round for another worker's push may wait forever, because the
script of that other worker may wait at the meeting. A meeting of scripts has no time limit, because
a training epoch may take an hour longer on a slow device than on other devices.

The shard does not save which scripts wait at the meetings after an epoch. After a restart of the
shard, the workers' scripts report again at which meeting they wait, and the newest answer that they
have received.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from absl import logging

from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.barriers import Point, position_of
from thinwire.ps.scripts.notices import Outcome, notice

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Place of a script in its training: number of the call of fit, number of the epoch, and 0 after
#: the epoch's steps or 1 after its callbacks. The epoch number is -1 before the first epoch ends,
#: and infinite after the end of the fit.
Place = tuple[float, float, int]

#: Seconds without an update after which a meeting at an epoch's end does not wait for a script
#: whose worker waits in a round. Without this limit that worker and a script at the meeting could
#: wait for each other forever. The value is longer than the time that one update takes.
HELD_SECONDS = 0.5
#: Number of answers of epoch meetings that are stored for late scripts; one answer may have up to 1
#: MiB.
_MOST_ANSWERS = 4
_NOWHERE: Place = (0, -1, 0)


@dataclasses.dataclass
class _MeetingScript:
    """State of one incarnation (process start) of a worker's script at the epoch meetings.

    Attributes:
        incarnation: Random number that identifies one start of the script's process.
        place: The latest point (fit, epoch, stage) that the script has reached in its training;
            None if the shard does not know how far the script is.
        newest: The script's newest report of metrics after an epoch; None before the first report.
        waits_with: The report that the script has sent at the meeting where the script waits; None
            if it does not wait.
        since: Time at which the script began to wait at a meeting, in seconds of the shard's clock.
    """

    incarnation: int
    place: Place | None = None
    newest: pb.EpochMeeting | None = None
    waits_with: pb.EpochMeeting | None = None
    since: float = 0.0


class EpochMeetings:
    """State of the meetings of all scripts at the ends of epochs, which shard 0 stores.

    Args:
        present: Function that returns the ids of the workers whose scripts are in the run at a
            given time of the shard's clock.
        held: Function that returns the ids of the workers that wait in a round for other workers'
            pushes.
        stop_fit: Function that ends a call of fit in the other scripts, as `Barriers.stop_fit`.
    """

    def __init__(
        self,
        present: Callable[[float], Sequence[int]],
        held: Callable[[], Collection[int]],
        stop_fit: Callable[[int, int, int, float], list[Outcome]],
    ) -> None:
        self._present, self._held, self._stop_fit = present, held, stop_fit
        self._scripts: dict[int, _MeetingScript] = {}
        self._answers: dict[Place, pb.EpochMeeting] = {}
        # number of a call of fit -> number of epochs after which it ends early; 0: immediately
        self._ends: dict[int, int] = {}
        self._version, self._moved_at = -1, -math.inf

    def begin(self, worker: int, incarnation: int, now: float) -> list[Outcome]:
        """Register the control stream of a worker's script, which may wait at meetings after
        epochs.

        A new process of a worker's script has reached no meeting yet.
        """
        known = self._scripts.get(worker)
        if known is None:
            self._scripts[worker] = _MeetingScript(incarnation)
        elif known.incarnation != incarnation:
            self._scripts[worker] = _MeetingScript(incarnation, _NOWHERE)
        return self._settle(now)

    def arrive(self, worker: int, barrier: str, now: float) -> list[Outcome]:
        """Record that a worker's script has reached a barrier, for example the barrier after a
        fit.
        """
        fit, stage, _ = position_of(barrier)
        if math.isfinite(fit):
            self._advance(worker, (fit, math.inf if stage >= Point.END.place else -1, 0))
        return self._settle(now)

    def end_fit(self, fit: int, epochs: int) -> None:
        """Record that a call of fit ends for all scripts after `epochs` epochs; 0 means
        immediately.
        """
        self._ends.setdefault(fit, epochs)

    def meet(self, worker: int, meeting: pb.EpochMeeting, now: float) -> list[Outcome]:
        """Record that a script has reached a meeting at an epoch's end; a script may report this
        twice.

        Args:
            worker: Worker id of the script that has reached the meeting.
            meeting: Report that the script has sent for the meeting at an epoch's end.
            now: Current time in seconds of the shard's clock.
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
        outcomes: list[Outcome] = []
        if meeting.stops and meeting.fit not in self._ends:
            epochs = self._fastest(meeting.fit, worker, now)
            outcomes += self._end(worker, meeting.fit, epochs, now)
        # None unless the epoch meeting was answered before this script arrived
        answer = self._answers.get(place)
        if answer is None or meeting.after_callbacks:
            answer = self._answer(meeting, list(self._newest(meeting.fit, now)))
        return [*outcomes, notice(worker, epoch_meeting=answer), *self._settle(now)]

    # -- deadlines ----------------------------------------------------------------------------

    def tick(self, now: float, version: int) -> list[Outcome]:
        """Return the messages to workers' scripts that result from deadlines that have passed.

        Args:
            now: Current time in seconds of the shard's clock.
            version: Number of updates that the shard has applied so far.
        """
        if version != self._version:
            self._version, self._moved_at = version, now
        return self._settle(now)

    # -- internal methods ---------------------------------------------------------------------

    def _advance(self, worker: int, place: Place) -> _MeetingScript:
        script = self._scripts[worker]
        script.place = max(script.place or _NOWHERE, place)
        if script.waits_with is not None and place_of(script.waits_with) < place:
            script.waits_with = None
        return script

    def _waiting(self) -> list[tuple[Place, int, pb.EpochMeeting]]:
        """Return (place, worker id, report) of the scripts that wait at meetings, the earliest
        place first.
        """
        waiting = ((worker, script.waits_with) for worker, script in self._scripts.items())
        placed = [(place_of(report), worker, report) for worker, report in waiting if report]
        return sorted(placed, key=lambda each: each[:2])

    def _settle(self, now: float) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for place, worker, meeting in self._waiting():
            answer = self._answers.get(place)
            if answer is None:
                if not self._have_come(place, self._scripts[worker], now):
                    continue
                reports = [(w, report) for at, w, report in self._waiting() if at == place]
                stopping = next((w for w, report in reports if report.stops), None)
                if stopping is not None and meeting.fit not in self._ends:
                    outcomes += self._end(stopping, meeting.fit, meeting.epoch + 1, now)
                answer = self._answer(meeting, [report for _, report in reports])
                self._keep(place, answer)
            outcomes.append(notice(worker, epoch_meeting=answer))
            self._scripts[worker].waits_with = None
        return outcomes

    def _have_come(self, place: Place, script: _MeetingScript, now: float) -> bool:
        """Return True if the shard can now answer the meeting at `place`, where `script` waits."""
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
        """Return the answer of an epoch meeting, computed from the reports of the scripts."""
        answer = pb.EpochMeeting(
            fit=meeting.fit, epoch=meeting.epoch, after_callbacks=meeting.after_callbacks
        )
        if not meeting.after_callbacks:
            answer.states.extend(_sums([report.states for report in reports]))
        elif meeting.fit in self._ends:
            answer.epochs = self._ends[meeting.fit] or meeting.epoch + 1
        return answer

    def _newest(self, fit: int, now: float) -> Iterator[pb.EpochMeeting]:
        """Yield each script's newest report in a call of fit, in ascending order of worker ids."""
        present = set(self._present(now))
        for worker, script in sorted(self._scripts.items()):
            if worker in present and script.newest is not None and script.newest.fit == fit:
                yield script.newest

    def _fastest(self, fit: int, worker: int, now: float) -> int:
        """Return how many epochs of a fit the fastest script has done after its current epoch.

        Args:
            fit: Number of the script's call of fit; the first call is 1.
            worker: Worker id of the script that has just completed an epoch.
            now: Current time in seconds of the shard's clock.
        """
        most = 0
        for other in {worker, *self._present(now)}:
            script = self._scripts.get(other)
            in_fit, epoch, stage = (script and script.place) or _NOWHERE
            if script is None or in_fit != fit:
                continue
            # a script at stage 1 (after its callbacks) has begun the next epoch
            if math.isfinite(epoch):
                most = max(most, int(epoch) + 1 + (stage if other != worker else 0))
            elif script.newest is not None and script.newest.fit == fit:
                most = max(most, script.newest.epoch + 1)
        return most

    def _end(self, worker: int, fit: int, epochs: int, now: float) -> list[Outcome]:
        self._ends[fit] = epochs
        text = "the script of worker %d ends its call %d of fit after %d epochs"
        logging.info(text, worker, fit, epochs)
        return self._stop_fit(worker, fit, epochs, now)

    def _keep(self, place: Place, answer: pb.EpochMeeting) -> None:
        self._answers.setdefault(place, answer)
        while len(self._answers) > _MOST_ANSWERS:
            del self._answers[min(self._answers)]


def place_of(meeting: pb.EpochMeeting) -> Place:
    """Return the point (fit, epoch, stage) of a script's report."""
    return (meeting.fit, meeting.epoch, int(meeting.after_callbacks))


def _sums(reports: Sequence[Sequence[pb.MetricState]]) -> Iterator[pb.MetricState]:
    """Yield the sum over scripts of each metric that all scripts report with an equal number of
    values.
    """
    states: list[Mapping[str, NDArray[np.float64]]] = [
        {state.name: np.frombuffer(state.values, "<f8") for state in report} for report in reports
    ]
    for state in reports[0] if reports else ():
        rows = [report.get(state.name) for report in states]
        arrays = [row for row in rows if row is not None and row.size == len(state.values) // 8]
        if len(arrays) == len(rows):
            yield pb.MetricState(name=state.name, values=np.sum(arrays, axis=0).tobytes())
