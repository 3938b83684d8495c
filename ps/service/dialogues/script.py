"""Dialogue of a PS shard with a worker's script: barriers, calls of fit, meetings, evaluations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from thinwire.ops.printable import printable
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed
from thinwire.ps.scripts.barriers import BarrierArrival
from thinwire.ps.service.dialogues.base import LONGEST_MESSAGE, RemoteClient, ShardSide
from thinwire.ps.service.dialogues.evaluations import (
    MOST_METRICS,
    check_evaluated,
    check_place,
    check_relayed,
)
from thinwire.ps.service.dialogues.observer import ObserverDialogue, ObserverSide

if TYPE_CHECKING:
    from thinwire.ps.scripts.run_control import RunControl

#: Limits on the number of barriers in one message of a script, and on the length of a barrier's
#: name in characters.
_MOST_BARRIERS, _LONGEST_BARRIER = 20_000, 100
#: Limit on the characters of the training history of one call of fit.
_LONGEST_HISTORY = 900_000
#: Bytes of one value (float64) of a metric's state.
_STATE_BYTES = 8


class ScriptDialogue(ObserverDialogue):
    """Dialogue over the control stream of a worker's script.

    Args:
        scripts: Control streams of the run's scripts.
    """

    def __init__(
        self,
        client: RemoteClient,
        hello: pb.Hello,
        shard: ShardSide,
        observers: ObserverSide,
        scripts: RunControl,
    ) -> None:
        super().__init__(client, hello, shard, observers, hello.incarnation)
        self._client, self._scripts = client, scripts

    def begin(self) -> None:
        """Queue the admission of the script, unless the run has no worker with the script's id."""
        worker = self.connection.id
        if not self._scripts.is_worker(worker):
            text = self._scripts.range_refusal(worker)
            self._client.reject("hello", (pb.REASON_ID_RANGE, text))
        super().begin()

    def _admit(self) -> None:
        self._serve("a Hello", self._observers.welcome, self.connection)

    def end(self) -> None:
        """Note that the script's control stream has ended."""
        super().end()
        self._serve_end(self._scripts.lost)

    def _barrier(self, barrier: pb.Barrier, payload: memoryview) -> None:
        names = [*barrier.passed, *barrier.changed, barrier.name]
        if len(names) > _MOST_BARRIERS or max(map(len, names)) > _LONGEST_BARRIER:
            raise Malformed(f"{len(names)} barriers, or names longer than {_LONGEST_BARRIER}")
        if not all(name.isascii() and name.isprintable() for name in names):
            raise Malformed("the message has a barrier whose name is not printable ASCII")
        arrival = BarrierArrival(
            barrier.name, tuple(barrier.passed), barrier.changes, tuple(barrier.changed)
        )
        self._serve("a barrier", self._scripts.arrive, self.connection, arrival)

    def _stop_fit(self, stop: pb.StopFit, payload: memoryview) -> None:
        check_place(stop.fit, stop.epochs)
        stop_fit = self._scripts.stop_fit
        self._serve("the end of a fit", stop_fit, self.connection, stop.fit, stop.epochs)

    def _epoch_meeting(self, meeting: pb.EpochMeeting, payload: memoryview) -> None:
        _check_meeting(meeting)
        self._serve("the end of an epoch", self._scripts.meet, self.connection, meeting)

    def _finished(self, finished: pb.Finished, payload: memoryview) -> None:
        finish, message = self._scripts.finish, printable(finished.message, LONGEST_MESSAGE)
        self._serve("the end of a script", finish, self.connection, finished.failed, message)

    def _fit_begun(self, fit: pb.FitBegun, payload: memoryview) -> None:
        check_place(fit.fit, 0)
        self._receive(fit)

    def _epoch_ended(self, ended: pb.EpochEnded, payload: memoryview) -> None:
        check_place(ended.fit, ended.epoch)
        self._receive(ended)

    def _fit_ended(self, fit: pb.FitEnded, payload: memoryview) -> None:
        check_place(fit.fit, 0)
        if len(fit.history) > _LONGEST_HISTORY:
            raise Malformed(f"a training history of {len(fit.history)} characters is too long")
        self._receive(fit)

    def _evaluated(self, evaluated: pb.Evaluated, payload: memoryview) -> None:
        check_evaluated(evaluated, names_versions=evaluated.answers)
        self._receive(evaluated)

    def _receive(self, message: Any) -> None:
        check_relayed(message)
        self._serve("a script's fit", self._scripts.receive, self.connection, message)

    def _alive(self, heartbeat: pb.Heartbeat, payload: memoryview) -> None:
        self._serve("a heartbeat", self._scripts.alive, self.connection)

    messages: ClassVar[dict[str, Any]] = {
        "fit_begun": _fit_begun,
        "epoch_ended": _epoch_ended,
        "epoch_meeting": _epoch_meeting,
        "fit_ended": _fit_ended,
        "evaluated": _evaluated,
        "barrier": _barrier,
        "finished": _finished,
        "slots": ObserverDialogue._request_slots,
        "stop_fit": _stop_fit,
        "heartbeat": _alive,
        "leave": ObserverDialogue._leave,
    }


def _check_meeting(meeting: pb.EpochMeeting) -> None:
    """Reject metric states in an epoch meeting's message that no script can have."""
    check_place(meeting.fit, meeting.epoch)
    check_relayed(meeting)
    names = {state.name for state in meeting.states}
    if not len(names) == len(meeting.states) <= MOST_METRICS:
        raise Malformed(
            f"the message has {len(meeting.states)} metrics with {len(names)} different names: "
            "too many metrics, or a repeated name"
        )
    for state in meeting.states:
        if len(state.values) % _STATE_BYTES or len(state.name) > LONGEST_MESSAGE:
            raise Malformed(f"metric {state.name!r:.80} has {len(state.values)} bytes, too many")
