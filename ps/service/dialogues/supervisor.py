"""Dialogue of a PS shard with a Supervisor."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from thinwire.ops.printable import printable
from thinwire.proto import thinwire_pb2 as pb
from thinwire.ps.service.dialogues.base import (
    LONGEST_MESSAGE,
    ConnectedDialogue,
    RemoteClient,
    ShardSide,
)
from thinwire.ps.service.dialogues.observer import ObserverDialogue, ObserverSide, check_report
from thinwire.runtime.run.settings import LIMIT_REASONS

if TYPE_CHECKING:
    from thinwire.ps.scripts.run_control import RunControl


class SupervisorDialogue(ObserverDialogue):
    """Dialogue with a Supervisor, or with a command that reads the run's status.

    Args:
        scripts: Control streams of the run's scripts, whose evaluators the Supervisor starts.
    """

    halt_causes: ClassVar[tuple[str, ...]] = (*LIMIT_REASONS, "interrupted", "diverged")

    def __init__(
        self,
        client: RemoteClient,
        hello: pb.Hello,
        shard: ShardSide,
        observers: ObserverSide,
        scripts: RunControl,
    ) -> None:
        super().__init__(client, hello, shard, observers)
        self._scripts = scripts

    def end(self) -> None:
        """Note that the Supervisor's stream has ended; it starts no evaluator any more."""
        super().end()
        self._serve_end(self._scripts.lose_supervisor)

    def _report(self, report: pb.Report, payload: memoryview) -> None:
        check_report(report)

    def _evaluator(self, evaluator: pb.Evaluator, payload: memoryview) -> None:
        """Queue the report about whether the Supervisor starts an evaluator."""
        why = printable(evaluator.message, LONGEST_MESSAGE)
        state = (evaluator.available, why, evaluator.starting)
        self._serve("an evaluator", self._scripts.offer_evaluator, self.connection, *state)

    messages: ClassVar[dict[str, Any]] = {
        "pull": ObserverDialogue._pull,
        "halt": ObserverDialogue._halt,
        "heartbeat": ConnectedDialogue._heartbeat,
        "leave": ObserverDialogue._leave,
        "report": _report,
        "evaluator": _evaluator,
    }
