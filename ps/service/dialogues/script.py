"""Dialogue of a PS shard with a worker's script: barriers, calls of fit, meetings, evaluations."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, ClassVar

from thinwire.ops.printable import printable
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed
from thinwire.ps.service.dialogues.base import LONGEST_MESSAGE
from thinwire.ps.service.dialogues.evaluations import (
    MOST_METRICS,
    check_evaluated,
    check_place,
    check_relayed,
)
from thinwire.ps.service.dialogues.observers import ObserverDialogue

#: Limits on the number of barriers in one message of a script, and on the length of a barrier's
#: name in characters.
_MOST_BARRIERS, _LONGEST_BARRIER = 20_000, 100
#: Limit on the characters of the training history of one call of fit.
_LONGEST_HISTORY = 900_000
#: Bytes of one value (float64) of a metric's state.
_STATE_BYTES = 8


class ScriptDialogue(ObserverDialogue):
    """Dialogue over the control stream of a worker's script."""

    def begin(self) -> None:
        """Queue the admission of the script, unless the run has no worker with the script's id."""
        worker = self.connection.id
        if not self._writer.scripts.barriers.is_worker(worker):
            text = f"id: there is no worker {worker}; give all nodes the same --nb_workers."
            self._client.reject("hello", (pb.REASON_ID_RANGE, text))
        super().begin()

    def end(self) -> None:
        """Note that the script's control stream has ended."""
        super().end()
        self._serve_end(self._writer.scripts.lost)

    def _receive(self, message: Any, payload: memoryview) -> None:
        _check(message)
        what = f"a {type(message).__name__} message"
        self._serve(what, self._writer.scripts.receive, self.connection, message)

    messages: ClassVar[dict[str, Any]] = {
        **dict.fromkeys(("fit_begun", "epoch_ended", "epoch_meeting", "fit_ended"), _receive),
        **dict.fromkeys(("evaluated", "barrier", "finished", "stop_fit", "heartbeat"), _receive),
        "slots": ObserverDialogue._request_slots,
        "leave": ObserverDialogue._leave,
    }


def _check(message: Any) -> None:
    """Reject a message that no script sends; make the text in it printable.

    Raises:
        Malformed: A value of the message is out of its bounds.
    """
    match message:
        case pb.Barrier():
            names = [*message.passed, *message.changed, message.name]
            if len(names) > _MOST_BARRIERS or max(map(len, names)) > _LONGEST_BARRIER:
                raise Malformed(f"{len(names)} barriers, or names longer than {_LONGEST_BARRIER}")
            if not all(name.isascii() and name.isprintable() for name in names):
                raise Malformed("the message has a barrier whose name is not printable ASCII")
        case pb.FitBegun() | pb.FitEnded():
            check_place(message.fit, 0)
            check_relayed(message)
            if isinstance(message, pb.FitEnded) and len(message.history) > _LONGEST_HISTORY:
                num = len(message.history)
                raise Malformed(f"a training history of {num} characters is too long")
        case pb.EpochEnded():
            check_place(message.fit, message.epoch)
            check_relayed(message)
        case pb.StopFit():
            check_place(message.fit, message.epochs)
        case pb.EpochMeeting():
            check_place(message.fit, message.epoch)
            check_relayed(message)
            _check_states(message.states)
        case pb.Evaluated():
            check_evaluated(message, names_versions=message.answers)
        case pb.Finished():
            message.message = printable(message.message, LONGEST_MESSAGE)


def _check_states(states: Collection[pb.MetricState]) -> None:
    """Reject metric states in an epoch meeting's message that no script can have."""
    names = {state.name for state in states}
    if not len(names) == len(states) <= MOST_METRICS:
        raise Malformed(
            f"the message has {len(states)} metrics with {len(names)} different names: "
            "too many metrics, or a repeated name"
        )
    for state in states:
        if len(state.values) % _STATE_BYTES or len(state.name) > LONGEST_MESSAGE:
            raise Malformed(f"metric {state.name!r:.80} has {len(state.values)} bytes, too many")
