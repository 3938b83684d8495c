"""Contacts shard 0 of a run as an observer: reads its status, or ends the run.

An observer is a Supervisor's stream without a model: it evaluates nothing and takes nobody's place.
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

#: A status has no payload.
_NO_PAYLOAD = 0
#: Of a model that is pulled to measure the link.
_MOST_PULLED_BYTES = 1 << 28
_NODE = "supervisor-0"


@dataclasses.dataclass(frozen=True)
class Contact:
    """Where shard 0 listens, and what it is shown.

    Attributes:
        address: ``host:port``.
        credentials: Of a Supervisor of the run.
        seconds: How long to try.
    """

    address: str
    credentials: Credentials
    seconds: float


def credentials_of(given: argparse.Namespace, flags_of_run: Mapping[str, str]) -> Credentials:
    """Return an observer's credentials: of the command line, else of the run's flags.

    Raises:
        ConfigurationError: Files that cannot be read or do not fit together.
    """
    values = [getattr(given, name) for name in CREDENTIAL_FLAGS]
    if not any(values):
        values = [flags_of_run.get(name, "") for name in CREDENTIAL_FLAGS]
    paths = [path.replace("{node}", _NODE) if path else None for path in values]
    token = os.environ.get(trust.TOKEN_VARIABLE, "")
    return trust.read(trust.CredentialFiles(*paths), token, trust.PART_OF_SUPERVISOR, serves=False)


def read_status(contact: Contact) -> RunStatus:
    """Return the run's status as shard 0 has it now.

    Raises:
        Unreachable: No status in time.
        RequestRejected: The shard rejects this observer.
    """
    with _Conversation(contact) as shard:
        message, _ = shard.wait_for("report", "sent no status")
        try:
            return RunStatus.from_json(message.report.document)
        except ValueError as error:
            raise Unreachable(
                f"{contact.address} sent a status of another version: {error}"
            ) from error


@dataclasses.dataclass(frozen=True)
class EndedRun:
    """What shard 0 has answered to a request to end the run.

    Attributes:
        cause: The stop reason; a run that has ended for another reason keeps that one.
        had_model: Whether the run had begun. Workers of one that had not learn nothing: they go
            on looking for a PS.
    """

    cause: str
    had_model: bool = True


def end_run(contact: Contact, cause: str) -> EndedRun:
    """Let shard 0 end the run.

    Raises:
        Unreachable: The end was not announced in time.
        RequestRejected: The shard rejects this observer.
    """
    try:
        with _Conversation(contact, halts=True) as shard:
            shard.session.send_control(pb.ToServer(halt=pb.Halt(cause=cause)))
            message, _ = shard.wait_for("halt", "announced no end")
            return EndedRun(message.halt.cause)
    except RequestRejected as error:
        if error.reason != pb.REASON_ENDS:
            raise
        return EndedRun(cause, had_model=False)


def measure_downlink(contact: Contact) -> float | None:
    """Return the Mbit/s at which this shard's part of the model comes; None: it is too large.

    Raises:
        Unreachable: It did not come in time.
        RequestRejected: The shard rejects this observer.
    """
    if 4 * read_status(contact).num_parameters > _MOST_PULLED_BYTES:
        return None
    with _Conversation(contact, _MOST_PULLED_BYTES) as shard:
        began = time.monotonic()
        shard.session.send_control(pb.ToServer(pull=pb.Pull(observe=True)))
        _, payload = shard.wait_for("reply", "sent no model")
        return 8e-6 * len(payload) / (time.monotonic() - began)


class _Conversation(contextlib.AbstractContextManager["_Conversation"]):
    """One stream to shard 0, for one request.

    Args:
        contact: Of the shard.
        most_payload_bytes: That an answer may have.
        halts: Whether a shard without model shall end.

    Raises:
        Unreachable, RequestRejected: It does not answer, or rejects this observer.
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
        """Return the first message of a kind, and its payload; others are passed over.

        Raises:
            Unreachable: It did not come in time, and the shard is `failing`.
            RequestRejected: The shard rejects the request.
        """
        address, seconds = self._contact.address, self._contact.seconds
        try:
            while (left := self._deadline - time.monotonic()) > 0:
                message, payload = self.session.receive(left)
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
