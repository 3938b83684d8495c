"""Which versions of the wire understand each other: equal ones, and no others.

The Hello says which version its sender speaks, and whoever hears another refuses it, in words that
both sides log. What it takes to say that is the same in all versions: `Hello.protocol_version` is
field 1, `Refusal.reason` and `message` are fields 1 and 2, and a stream opens with these. Whatever
else changes what is sent is a new version, so within a version nobody sends unknown fields.
"""

from __future__ import annotations

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.messages import PROTOCOL_VERSION

_ADVICE = "install the same Thinwire on both, and start the older one again"


def difference(theirs: int, they: str, we: str) -> str | None:
    """Return what to say to who speaks another version; None where it is the same.

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


def strange_fields(message: Message, they: str) -> str | None:
    """Return what to say of a first message with fields that its version does not have."""
    numbers = sorted({field.field_number for field in UnknownFieldSet(message)})
    if not numbers:
        return None
    return (
        f"{they} says to speak protocol_version {PROTOCOL_VERSION}, and sends fields that it does "
        f"not have ({', '.join(map(str, numbers))}), so it is of another Thinwire; {_ADVICE}."
    )


def refusal(hello: pb.Hello) -> tuple[int, str] | None:
    """Return (reason, message) of a PS's refusal of another version; None for its own."""
    why = difference(hello.protocol_version, "the client", "this PS")
    why = why or strange_fields(hello, "the client")
    return (pb.REASON_PROTOCOL_VERSION, why) if why else None
