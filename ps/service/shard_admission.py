"""Admission of clients to a PS shard that has a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from thinwire.proto import thinwire_pb2 as pb
from thinwire.ps.service.dialogues.base import (
    Admission,
    ConnectedDialogue,
    Dialogue,
    EndOfStream,
    RemoteClient,
)
from thinwire.ps.service.dialogues.observers import (
    EvaluatorDialogue,
    FollowerDialogue,
    SupervisorDialogue,
)
from thinwire.ps.service.dialogues.script import ScriptDialogue
from thinwire.ps.service.dialogues.worker import WorkerDialogue
from thinwire.ps.service.handshake import Identity, check_hello, checked_link, program_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from thinwire.ps.service.writer import ShardWriter


class PhaseGate(Protocol):
    """Acceptor of the script's next model while a shard still serves the current model."""

    def admission(self, phase: int) -> Admission | None:
        """Return the admission of workers whose scripts already have the model of a later phase;
        None if the scripts have not agreed on this phase yet.
        """

    def tick(self) -> None:
        """Send heartbeats to waiting workers; make workers that wait too long retry (called on the
        writer thread).
        """


#: Role of a client in its Hello -> class of the dialogue with the client.
_DIALOGUES: dict[int, type[ConnectedDialogue]] = {
    pb.ROLE_WORKER: WorkerDialogue,
    pb.ROLE_SCRIPT: ScriptDialogue,
    pb.ROLE_EVALUATOR: EvaluatorDialogue,
    pb.ROLE_SHARD: FollowerDialogue,
    pb.ROLE_SUPERVISOR: SupervisorDialogue,
}


class ShardAdmission(Admission):
    """Admission of clients to a shard that has a model.

    Args:
        writer: Handler of the clients' messages on the shard's writer thread.
        phases: Acceptor of the script's next model; None if the model cannot change.
    """

    def __init__(self, writer: ShardWriter, phases: PhaseGate | None) -> None:
        self._writer, self._shard, self._phases = writer, writer.shard, phases
        self._largest_payload = writer.shard.served.largest_push

    def refusal_of(self, body: str) -> str:
        """Return why a message before the client's Hello is malformed."""
        return f"{body} before hello"

    def payload_limit(self, message: pb.ToServer) -> int:
        """Return the largest legal payload of every client's messages, in bytes."""
        return self._largest_payload

    def payload_memory(self, num_bytes: int) -> NDArray[Any]:
        """Return the memory of a payload, a [num_bytes] uint8 array."""
        return self._shard.payloads(num_bytes)

    def admit(self, hello: pb.Hello, client: RemoteClient) -> Dialogue:
        """Return the dialogue that the Hello of an authenticated client begins.

        Raises:
            EndOfStream: The Hello is refused; the client has got the refusal.
            Malformed: A value in the Hello is out of its bounds.
        """
        identity, phases = self._shard.identity, self._phases
        if identity is None:
            client.refuse(pb.REASON_STARTING, "this PS is not ready yet; try again.")
            raise EndOfStream
        is_worker = hello.role == pb.ROLE_WORKER
        if is_worker and hello.phase > identity.phase and phases is not None:
            admission = phases.admission(hello.phase)
            if admission is None:
                text = "the scripts have not agreed on this phase; try again."
                client.refuse(pb.REASON_STARTING, text)
                raise EndOfStream
            return admission.admit(hello, client)
        refusal = self._other_program(hello, identity) or check_hello(hello, identity)
        # A worker whose script is behind the run's phase (model) does not count as an error,
        # because the worker retries at a later call of fit.
        if refusal is not None and refusal[0] == pb.REASON_PHASE:
            client.refuse(*refusal, phase=identity.phase)
            raise EndOfStream
        if refusal is not None:
            client.reject("hello", refusal)
        if (full := client.guard.hello_received(client.stream)) is not None:
            client.reject(full[0], (pb.REASON_FULL, full[1]))
        checked_link(hello.link)
        if is_worker and self._writer.scripts.barriers.is_worker(hello.id):
            self._shard.programs.record(hello.id, program_of(hello))
        dialogue = _DIALOGUES[hello.role](client, hello, self._writer)
        dialogue.begin()
        return dialogue

    def _other_program(self, hello: pb.Hello, identity: Identity) -> tuple[int, str] | None:
        """Return the refusal of a worker whose program (script) has changed; else None."""
        if hello.role != pb.ROLE_WORKER or hello.run_id not in ("", identity.run_id):
            return None
        programs, version = self._shard.programs, self._shard.version
        text = programs.refusal_of(hello.id, program_of(hello), version)
        return None if text is None else (pb.REASON_OTHER_PROGRAM, text)
