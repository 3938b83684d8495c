"""Compares protocol versions: only equal ones are compatible.

The Hello carries its sender's version. A receiver of another version rejects it with a message that
both sides log. The fields that this takes are the same in all versions: `Hello.protocol_version` is
field 1, `Refusal.reason` and `message` are fields 1 and 2, and a stream opens with these. Any other
change of the messages makes a new version, so within a version nobody sends unknown fields.
"""

from __future__ import annotations

from google.protobuf.message import Message

from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import unknown_field_numbers
from thinwire.proto.messages import PROTOCOL_VERSION

_ADVICE = "install the same Thinwire on both, and start the older one again"


def difference(theirs: int, they: str, we: str) -> str | None:
    """Return the refusal's text for a sender of another version; None where it is the same.

    Args:
        theirs: The version in their first message.
        they: Who they are, for example "the client".
        we: Who we are, for example "this PS".
    """
    if theirs == PROTOCOL_VERSION:
        return None
    age = "newer" if theirs > PROTOCOL_VERSION else "older"
    return (
        f"protocol_version: {we} speaks {PROTOCOL_VERSION}, {they} {theirs}, which is {age}; "
        f"{_ADVICE}."
    )


def unknown_fields(message: Message, they: str) -> str | None:
    """Return the refusal's text for a first message with fields that its version does not have."""
    numbers = unknown_field_numbers(message)
    if not numbers:
        return None
    return (
        f"{they} announces protocol_version {PROTOCOL_VERSION} and sends fields that this version "
        f"does not have ({', '.join(map(str, numbers))}), so it is another Thinwire; {_ADVICE}."
    )


def refusal(hello: pb.Hello) -> tuple[pb.Reason, str] | None:
    """Return (reason, message) of a PS's refusal of another version; None for its own."""
    why = difference(hello.protocol_version, "the client", "this PS")
    why = why or unknown_fields(hello, "the client")
    return (pb.REASON_PROTOCOL_VERSION, why) if why else None
