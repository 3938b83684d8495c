"""Dialogues of a PS shard with clients that send no updates: Supervisors, evaluators, shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from thinwire.ops.printable import printable
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed
from thinwire.ps.core import events
from thinwire.ps.persistence.journal import STOP_REASON
from thinwire.ps.service.connections import Connection
from thinwire.ps.service.dialogues.base import LONGEST_MESSAGE, ConnectedDialogue
from thinwire.ps.service.dialogues.evaluations import check_evaluated
from thinwire.ps.wire import reports
from thinwire.runtime.run.settings import LIMIT_REASONS


class ObserverDialogue(ConnectedDialogue):
    """Dialogue with a Supervisor, an evaluator, another shard, or a worker's script.

    Attributes:
        halt_causes: Causes that the client's request to end the run may name.
    """

    halt_causes: ClassVar[tuple[str, ...]] = ()
    _number = 0  # running number of the observer in `Connections`; 0 before `begin`

    def begin(self) -> None:
        """Add the client to the shard's open connections, and queue its admission."""
        self._number = self._shard.connections.add_observer(self.connection)
        self._serve("a Hello", self._writer.observers.welcome, self.connection)

    def on_frame(self, num_bytes: int) -> None:
        """Do nothing: only workers have leases."""

    def end(self) -> None:
        """Note that the client's stream has ended."""
        self._shard.connections.drop_observer(self._number)

    def _serve_end(self, lost: Callable[[Connection], None]) -> None:
        """Queue the call of `lost` with this connection, behind the client's messages."""
        self._serve("the end of a stream", lost, self.connection)

    def _pull(self, pull: pb.Pull, payload: memoryview) -> None:
        self._serve("the model", self._writer.observers.observe, self.connection, self._number)

    def _request_slots(self, slots: pb.SlotsRequest, payload: memoryview) -> None:
        send_slots = self._writer.observers.send_slots
        self._serve("the optimizer", send_slots, self.connection, slots.weights)

    def _leave(self, leave: pb.Leave, payload: memoryview) -> None:
        self.connection.left = True

    def _halt(self, halt: pb.Halt, payload: memoryview) -> None:
        known = self.halt_causes
        if halt.cause not in known:
            raise Malformed(f"unknown cause {halt.cause!r:.80} to end the run; known: {known}")
        self._shard.queue.put(events.Stop(halt.cause))


class SupervisorDialogue(ObserverDialogue):
    """Dialogue with a Supervisor, or with a command that reads the run's status."""

    halt_causes: ClassVar[tuple[str, ...]] = (*LIMIT_REASONS, "interrupted", "diverged")

    def end(self) -> None:
        """Note that the Supervisor's stream has ended; it starts no evaluator any more."""
        super().end()
        self._serve_end(self._writer.scripts.lose_supervisor)

    def _report(self, report: pb.Report, payload: memoryview) -> None:
        _check_report(report)

    def _evaluator(self, evaluator: pb.Evaluator, payload: memoryview) -> None:
        """Queue the report about whether the Supervisor starts an evaluator."""
        why = printable(evaluator.message, LONGEST_MESSAGE)
        offer = self._writer.scripts.offer_evaluator
        self._serve("an evaluator", offer, self.connection, evaluator, why)

    messages: ClassVar[dict[str, Any]] = {
        "pull": ObserverDialogue._pull,
        "halt": ObserverDialogue._halt,
        "heartbeat": ConnectedDialogue._heartbeat,
        "leave": ObserverDialogue._leave,
        "report": _report,
        "evaluator": _evaluator,
    }


class EvaluatorDialogue(ObserverDialogue):
    """Dialogue with an evaluator, which pulls models and sends the results of evaluations."""

    def end(self) -> None:
        """Note that the evaluator's stream has ended."""
        super().end()
        self._serve_end(self._writer.scripts.lost)

    def _evaluated(self, evaluated: pb.Evaluated, payload: memoryview) -> None:
        check_evaluated(evaluated)
        self._serve("an evaluation", self._writer.scripts.receive, self.connection, evaluated)

    messages: ClassVar[dict[str, Any]] = {
        "pull": ObserverDialogue._pull,
        "slots": ObserverDialogue._request_slots,
        "evaluated": _evaluated,
        "heartbeat": ConnectedDialogue._heartbeat,
        "leave": ObserverDialogue._leave,
    }


class FollowerDialogue(ObserverDialogue):
    """Dialogue of shard 0 with a following shard (id 1 and up), which reports its counters and its
    silent workers.
    """

    halt_causes: ClassVar[tuple[str, ...]] = (STOP_REASON,)

    def begin(self) -> None:
        """Admit the following shard, and record its address if the shard has its model."""
        hello, directory = self._hello, self._shard.directory
        if hello.model:
            conflict = directory.announce(hello.id, hello.generation, hello.peer_address)
            if conflict is not None:
                self._client.reject("hello", (pb.REASON_ID_TAKEN, conflict))
        super().begin()

    def _unreachable(self, heartbeat: pb.Heartbeat, payload: memoryview) -> None:
        """Queue the workers that the following shard reports as silent."""
        for member in heartbeat.unreachable:
            silent = events.WorkerIncarnation(member.worker, member.incarnation)
            self._shard.queue.put(events.WorkerUnreachable(silent))

    def _report(self, report: pb.Report, payload: memoryview) -> None:
        _check_report(report)
        reports.check_shard(report.document)
        self._shard.reports[(pb.ROLE_SHARD, self.connection.id)] = report.document

    messages: ClassVar[dict[str, Any]] = {
        "heartbeat": _unreachable,
        "halt": ObserverDialogue._halt,
        "report": _report,
        "leave": ObserverDialogue._leave,
    }


def _check_report(report: pb.Report) -> None:
    """Reject a report that is too long, or that only workers send.

    Raises:
        Malformed: The report has records of training rounds, or a too long document.
    """
    reports.check_size(report.document)
    if report.rounds:
        raise Malformed("a client that is not a worker sent time records of training rounds")
