"""Dialogue of a PS shard with the process that evaluates the model of the scripts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from thinwire.proto import thinwire_pb2 as pb
from thinwire.ps.service.connections import Connection, Connections
from thinwire.ps.service.dialogues.base import ConnectedDialogue, RemoteClient, ShardSide
from thinwire.ps.service.dialogues.evaluations import check_evaluated
from thinwire.ps.service.dialogues.observer import ObserverDialogue

if TYPE_CHECKING:
    from thinwire.ps.scripts.run_control import RunControl


class EvaluatorDialogue(ObserverDialogue):
    """Dialogue with an evaluator, which pulls models and sends the results of evaluations.

    Args:
        observe: Function that sends the model that the evaluator evaluates to a connection with a
            running number (called on the writer thread).
        send_slots: Function that sends the optimizer's state, and the weights if the second
            argument is True (called on the writer thread).
        scripts: Control streams of the run's scripts, which request the evaluations.
    """

    def __init__(
        self,
        client: RemoteClient,
        hello: pb.Hello,
        shard: ShardSide,
        connections: Connections,
        welcome: Callable[[Connection], None],
        observe: Callable[[Connection, int], None],
        send_slots: Callable[[Connection, bool], None],
        scripts: RunControl,
    ) -> None:
        super().__init__(client, hello, shard, connections, welcome, hello.incarnation)
        self._observe, self._send_slots, self._scripts = observe, send_slots, scripts

    def end(self) -> None:
        """Note that the evaluator's stream has ended."""
        super().end()
        self._serve_end(self._scripts.lose_evaluator)

    def _pull(self, pull: pb.Pull, payload: memoryview) -> None:
        self._serve("the model", self._observe, self.connection, self._number)

    def _request_slots(self, slots: pb.SlotsRequest, payload: memoryview) -> None:
        self._serve("the optimizer", self._send_slots, self.connection, slots.weights)

    def _evaluated(self, evaluated: pb.Evaluated, payload: memoryview) -> None:
        check_evaluated(evaluated)
        take = self._scripts.take_evaluation
        self._serve("an evaluation", take, self.connection, evaluated)

    messages: ClassVar[dict[str, Any]] = {
        "pull": _pull,
        "slots": _request_slots,
        "evaluated": _evaluated,
        "heartbeat": ConnectedDialogue._heartbeat,
        "leave": ObserverDialogue._leave,
    }
