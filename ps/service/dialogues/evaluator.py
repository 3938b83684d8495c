"""Dialogue of a PS shard with the process that evaluates the model of the scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from thinwire.proto import thinwire_pb2 as pb
from thinwire.ps.service.dialogues.base import ConnectedDialogue, RemoteClient, ShardSide
from thinwire.ps.service.dialogues.evaluations import check_evaluated
from thinwire.ps.service.dialogues.observer import ObserverDialogue, ObserverSide

if TYPE_CHECKING:
    from thinwire.ps.scripts.run_control import RunControl


class EvaluatorDialogue(ObserverDialogue):
    """Dialogue with an evaluator, which pulls models and sends the results of evaluations.

    Args:
        scripts: Control streams of the run's scripts, which request the evaluations.
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
        self._scripts = scripts

    def end(self) -> None:
        """Note that the evaluator's stream has ended."""
        super().end()
        self._serve_end(self._scripts.lose_evaluator)

    def _evaluated(self, evaluated: pb.Evaluated, payload: memoryview) -> None:
        check_evaluated(evaluated)
        take = self._scripts.take_evaluation
        self._serve("an evaluation", take, self.connection, evaluated)

    messages: ClassVar[dict[str, Any]] = {
        "pull": ObserverDialogue._pull,
        "slots": ObserverDialogue._request_slots,
        "evaluated": _evaluated,
        "heartbeat": ConnectedDialogue._heartbeat,
        "leave": ObserverDialogue._leave,
    }
