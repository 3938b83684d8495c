"""Compares protocol versions. Checks of the protocol version: only nodes with equal protocol
versions can exchange messages.

A Hello message contains the protocol version of its sender. A receiver with another protocol
version rejects the Hello with a message that both sides log. The fields for the exchange of
versions are equal in all protocol versions: `Hello.protocol_version` is field 1, `Refusal.reason`
is field 1 and `Refusal.message` is field 2. The first message of a client is always Hello, and the
answer to another protocol version is always Refusal. Any change of the message definitions makes a
new protocol version, so nodes with equal protocol versions never send each other unknown fields.
"""

from __future__ import annotations

from google.protobuf.message import Message

from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import unknown_field_numbers
from thinwire.proto.messages import PROTOCOL_VERSION

_ADVICE = "install the same Thinwire on both, and start the older one again"


def difference(theirs: int, they: str, we: str) -> str | None:
    """Return the refusal text for a sender of another protocol version; None for equal versions.

    Args:
        theirs: Protocol version in the first message of the sender.
        they: Name of the sender in the text, for example "the client".
        we: Name of the receiver in the text, for example "this PS".
    """
    if theirs == PROTOCOL_VERSION:
        return None
    age = "newer" if theirs > PROTOCOL_VERSION else "older"
    return (
        f"protocol_version: {we} speaks {PROTOCOL_VERSION}, {they} {theirs}, which is {age}; "
        f"{_ADVICE}."
    )


def unknown_fields(message: Message, they: str) -> str | None:
    """Return the refusal text for a first message with unknown fields; None without such fields.

    Args:
        message: First message of a stream.
        they: Name of the sender in the text, for example "the client".
    """
    numbers = unknown_field_numbers(message)
    if not numbers:
        return None
    return (
        f"{they} announces protocol_version {PROTOCOL_VERSION} and sends fields that this version "
        f"does not have ({', '.join(map(str, numbers))}), so the two installations differ; "
        f"{_ADVICE}."
    )


def refusal(hello: pb.Hello) -> tuple[pb.Reason, str] | None:
    """Return (reason, message) of a PS's refusal of a Hello; None if the versions are equal."""
    why = difference(hello.protocol_version, "the client", "this PS")
    why = why or unknown_fields(hello, "the client")
    return (pb.REASON_PROTOCOL_VERSION, why) if why else None
