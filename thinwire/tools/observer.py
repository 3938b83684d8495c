"""Contacts shard 0 of a run as an observer: reads its status, or ends the run.

An observer is a Supervisor's stream without a model: it evaluates nothing and takes nobody's place.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import time
from collections.abc import Mapping

from thinwire.ops.run.credentials import Credentials
from thinwire.ops.telemetry.run_status import RunStatus
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.grpc import StreamLost, Unreachable
from thinwire.proto.grpc.session import ClientSession, RequestRejected
from thinwire.proto.security import credentials as trust
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
    session, deadline = _open(contact), time.monotonic() + contact.seconds
    try:
        while (left := deadline - time.monotonic()) > 0:
            message, _ = session.receive(left)
            if message.WhichOneof("body") == "report":
                return RunStatus.from_json(message.report.document)
    except StreamLost as error:
        raise Unreachable(f"{contact.address}: {error}") from error
    except ValueError as error:
        raise Unreachable(f"{contact.address} sent a status of another version: {error}") from error
    finally:
        session.close(0.0)
    raise Unreachable(f"{contact.address} sent no status within {contact.seconds:g} s")


def end_run(contact: Contact, cause: str) -> str:
    """Let shard 0 end the run, and return the stop reason that it announces.

    A run that has ended for another reason keeps that one.

    Raises:
        Unreachable: The end was not announced in time.
        RequestRejected: The shard rejects this observer.
    """
    session, deadline = _open(contact), time.monotonic() + contact.seconds
    try:
        session.send_control(pb.ToServer(halt=pb.Halt(cause=cause)))
        while (left := deadline - time.monotonic()) > 0:
            message, _ = session.receive(left)
            if message.WhichOneof("body") == "halt":
                return message.halt.cause
    except StreamLost as error:
        raise Unreachable(f"{contact.address}: {error}") from error
    finally:
        session.close(0.0)
    raise Unreachable(f"{contact.address} announced no end within {contact.seconds:g} s")


def measure_downlink(contact: Contact) -> float | None:
    """Return the Mbit/s at which this shard's part of the model comes; None: it is too large.

    Raises:
        Unreachable: It did not come in time.
        RequestRejected: The shard rejects this observer.
    """
    if 4 * read_status(contact).num_parameters > _MOST_PULLED_BYTES:
        return None
    session, deadline = _open(contact, _MOST_PULLED_BYTES), time.monotonic() + contact.seconds
    began = time.monotonic()
    try:
        session.send_control(pb.ToServer(pull=pb.Pull(observe=True)))
        while (left := deadline - time.monotonic()) > 0:
            message, payload = session.receive(left)
            if message.WhichOneof("body") == "reply":
                return 8e-6 * len(payload) / (time.monotonic() - began)
    except StreamLost as error:
        raise Unreachable(f"{contact.address}: {error}") from error
    finally:
        session.close(0.0)
    raise Unreachable(f"{contact.address} sent no model within {contact.seconds:g} s")


def _open(contact: Contact, most_payload_bytes: int = _NO_PAYLOAD) -> ClientSession:
    hello = pb.Hello(protocol_version=messages.PROTOCOL_VERSION, role=pb.ROLE_SUPERVISOR)
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
