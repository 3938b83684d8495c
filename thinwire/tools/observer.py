"""Contacts PS shard 0 of a run as an observer: reads the run's status, or ends the run.

An observer connects with the role of a Supervisor but without a model. An observer evaluates no
model and does not replace the run's Supervisor.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import time
from collections.abc import Mapping

from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.grpc import StreamLost, Unreachable
from thinwire.proto.grpc.session import ClientSession, RequestRejected
from thinwire.proto.security import credentials as trust
from thinwire.runtime.run.credentials import Credentials
from thinwire.runtime.telemetry.run_status import RunStatus
from thinwire.tools.arguments import CREDENTIAL_FLAGS

#: Maximum payload of an answer with a status, in bytes: such an answer has no payload.
_NO_PAYLOAD = 0
#: Maximum size, in bytes, of a model that is pulled to measure the link to a PS shard.
_MOST_PULLED_BYTES = 1 << 28
_NODE = "supervisor-0"


@dataclasses.dataclass(frozen=True)
class Contact:
    """Address of PS shard 0, and the credentials and time limit for requests to shard 0.

    Attributes:
        address: ``host:port`` of PS shard 0.
        credentials: TLS certificate and token of a Supervisor of the run.
        seconds: Time limit of a request to PS shard 0, in seconds.
    """

    address: str
    credentials: Credentials
    seconds: float


def credentials_of(given: argparse.Namespace, flags_of_run: Mapping[str, str]) -> Credentials:
    """Return the credentials that the command line names, or else the run's flags.

    Args:
        given: Parsed command line with the flags of credentials.
        flags_of_run: Name -> value of the flags of a node of the run.

    Raises:
        ConfigurationError: A credential file cannot be read, or certificate and key do not match.
    """
    values = [getattr(given, name) for name in CREDENTIAL_FLAGS]
    if not any(values):
        values = [flags_of_run.get(name, "") for name in CREDENTIAL_FLAGS]
    paths = [path.replace("{node}", _NODE) if path else None for path in values]
    token = os.environ.get(trust.TOKEN_VARIABLE, "")
    return trust.read(trust.CredentialFiles(*paths), token, trust.PART_OF_SUPERVISOR, serves=False)


def read_status(contact: Contact) -> RunStatus:
    """Request the run's present status from PS shard 0, and return the status.

    Raises:
        Unreachable: PS shard 0 sent no status within the time limit.
        RequestRejected: The PS shard rejects this observer.
    """
    with _Conversation(contact) as shard:
        message, _ = shard.wait_for("report", "sent no status")
        try:
            return RunStatus.from_json(message.report.document)
        except ValueError as error:
            raise Unreachable(
                f"{contact.address} sent a status that this version cannot read: {error}"
            ) from error


@dataclasses.dataclass(frozen=True)
class EndedRun:
    """Answer of PS shard 0 to an observer's request to end the run.

    Attributes:
        cause: Stop reason of the run. If the run had ended before the request, the reason is the
            earlier one.
        had_model: True if the run had a model. Without a model, which a worker sends, PS shard 0
            ends without notifying the workers, which continue to look for a PS.
    """

    cause: str
    had_model: bool = True


def end_run(contact: Contact, cause: str) -> EndedRun:
    """Request the end of the run from PS shard 0.

    Args:
        contact: Address and credentials of PS shard 0.
        cause: Stop reason that PS shard 0 must record.

    Raises:
        Unreachable: PS shard 0 did not confirm the run's end within the time limit.
        RequestRejected: The PS shard rejects this observer.
    """
    try:
        with _Conversation(contact, halts=True) as shard:
            shard.session.send_control(pb.ToServer(halt=pb.Halt(cause=cause)))
            message, _ = shard.wait_for("halt", "did not confirm the end")
            return EndedRun(message.halt.cause)
    except RequestRejected as error:
        if error.reason != pb.REASON_ENDS:
            raise
        return EndedRun(cause, had_model=False)


def measure_downlink(contact: Contact) -> float | None:
    """Pull a PS shard's parameters; return the rate in Mbit/s, or None for a large model.

    Raises:
        Unreachable: The PS shard's parameters did not arrive within the time limit.
        RequestRejected: The PS shard rejects this observer.
    """
    if 4 * read_status(contact).num_parameters > _MOST_PULLED_BYTES:
        return None
    with _Conversation(contact, _MOST_PULLED_BYTES) as shard:
        began = time.monotonic()
        shard.session.send_control(pb.ToServer(pull=pb.Pull(observe=True)))
        _, payload = shard.wait_for("reply", "sent no model")
        return 8e-6 * len(payload) / (time.monotonic() - began)


class _Conversation(contextlib.AbstractContextManager["_Conversation"]):
    """gRPC stream to a PS shard for one request of an observer.

    Args:
        contact: Address and credentials of the PS shard.
        most_payload_bytes: Maximum payload of the shard's answer, in bytes.
        halts: True to end a PS shard that has not received a model.

    Raises:
        Unreachable: The PS shard does not answer.
        RequestRejected: The PS shard rejects this observer.
    """

    def __init__(
        self, contact: Contact, most_payload_bytes: int = _NO_PAYLOAD, halts: bool = False
    ) -> None:
        self._contact = contact
        self.session = _open(contact, most_payload_bytes, halts)
        self._deadline = time.monotonic() + contact.seconds

    def __exit__(self, *error: object) -> None:
        self.session.close(0.0)

    def wait_for(self, body: str, failing: str) -> tuple[pb.ToClient, memoryview]:
        """Return the PS shard's next message with the given body, and its payload; skip others.

        Args:
            body: Name of the awaited message's body field in the protocol.
            failing: Predicate for the error message, for example "sent no status".

        Raises:
            Unreachable: No message with the given body arrived within the time limit.
            RequestRejected: The PS shard rejects the request.
        """
        address, seconds = self._contact.address, self._contact.seconds
        try:
            while (remaining := self._deadline - time.monotonic()) > 0:
                message, payload = self.session.receive(remaining)
                if message.WhichOneof("body") == body:
                    return message, payload
                if message.WhichOneof("body") == "refusal":
                    raise RequestRejected(message.refusal)
        except StreamLost as error:
            raise Unreachable(f"{address}: {error}") from error
        raise Unreachable(f"{address} {failing} within {seconds:g} s")


def _open(contact: Contact, most_payload_bytes: int, halts: bool) -> ClientSession:
    hello = pb.Hello(
        protocol_version=messages.PROTOCOL_VERSION, role=pb.ROLE_SUPERVISOR, halts=halts
    )
    session = ClientSession(
        contact.address, hello, most_payload_bytes, credentials=contact.credentials
    )
    try:
        session.open(contact.seconds)
    except (Unreachable, StreamLost) as error:
        session.close(0.0)
        raise Unreachable(f"{contact.address}: {error}") from error
    except RequestRejected:
        session.close(0.0)
        raise
    return session
