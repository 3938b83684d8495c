"""Different wire versions: both sides reject them by name and never misread a message."""

import contextlib

import pytest

from tests.certificates import TOKEN
from tests.proto.samples import GOLDEN, samples
from tests.ps.streams import Shard, Stream, frame
from thinwire.cli import node
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto import versions
from thinwire.proto.grpc import StreamLost, Unreachable
from thinwire.proto.grpc.common import SERVICE
from thinwire.proto.grpc.server import GrpcServer
from thinwire.proto.grpc.session import ClientSession, RequestRejected
from thinwire.proto.messages import PROTOCOL_VERSION
from thinwire.proto.security.connection_guard import ConnectionGuard
from thinwire.runtime.run.credentials import Credentials
from thinwire.runtime.run.settings import EXIT_REFUSED

WAIT_SECONDS = 20.0
#: Field 1020 with one byte, as it stands inside of a message: no version has this field.
UNKNOWN = b"\xe2\x3f\x01z"


def inside(number, message):
    """Return an envelope with a body, both as bytes."""
    return bytes([number << 3 | 2, len(message)]) + message


def said_to(shard, *frames):
    return Stream(shard.server, frames).read()


@pytest.mark.parametrize(("theirs", "age"), [(PROTOCOL_VERSION + 6, "newer"), (0, "older")])
def test_another_version_is_refused_by_name_whatever_else_its_hello_says(theirs, age, caplog):
    shard = Shard()
    shard.server.guard = ConnectionGuard(Credentials(token=TOKEN))  # proofs may be others there
    hello = bytes([0x08, theirs]) + UNKNOWN
    with caplog.at_level("WARNING", logger="absl"):
        stream = said_to(shard, inside(1, hello), frame(pull=pb.Pull()))
    refusal, _ = stream.last("refusal")
    assert refusal.reason == pb.REASON_PROTOCOL_VERSION
    assert f"this PS speaks {PROTOCOL_VERSION}, the client {theirs}, which is {age}" in (
        refusal.message
    )
    assert "install the same Thinwire" in refusal.message
    assert refusal.message in caplog.text
    assert len(stream.received) == 1
    assert shard.server.guard.refused == {"hello": 1}


def test_unknown_fields_of_the_same_version_are_not_overlooked():
    shard = Shard()
    hello = shard.hello().SerializeToString() + UNKNOWN
    length = len(hello)
    data = b"\x0a" + bytes([length & 0x7F | 0x80, length >> 7]) + hello
    stream = said_to(shard, data)
    refusal, _ = stream.last("refusal")
    assert refusal.reason == pb.REASON_PROTOCOL_VERSION
    assert "does not have (1020)" in refusal.message
    assert not shard.server.connections.workers


def test_an_unknown_message_ends_the_stream_with_a_reason():
    unknown = UNKNOWN  # as an envelope: a body of number 1020
    for before in ([], [frame(hello=Shard().hello())]):
        shard = Shard()
        stream = said_to(shard, *before, unknown, frame(pull=pb.Pull()))
        refusal, _ = stream.last("refusal")
        assert refusal.reason == pb.REASON_MALFORMED
        assert "no known message (its fields are [1020])" in refusal.message
        assert shard.server.guard.refused == {"malformed": 1}
        assert stream.last("reply") == (None, None)


def test_an_unknown_part_is_refused():
    shard = Shard()
    refusal, _ = said_to(shard, frame(hello=shard.hello(role=99))).last("refusal")
    assert "role: unknown value 99" in refusal.message


# -- the other side ----------------------------------------------------------------------------


@contextlib.contextmanager
def opened_at(*frames, service=SERVICE):
    """Yield a session with a server that answers a Hello with these frames."""

    def handler(stream):
        for _ in stream.incoming():
            stream.send(frames)

    server = GrpcServer("127.0.0.1", 0, handler, service=service)
    hello = pb.Hello(protocol_version=PROTOCOL_VERSION)
    session = ClientSession(f"127.0.0.1:{server.port}", hello, 1 << 20)
    try:
        yield session
    finally:
        session.close(0.0)
        server.stop()


def test_a_client_hears_what_an_older_ps_says_and_ends():
    words = "protocol_version: this PS speaks 1, the client 2, which is newer"
    refusal = pb.ToClient(refusal=pb.Refusal(reason=pb.REASON_PROTOCOL_VERSION, message=words))
    with (
        opened_at(refusal.SerializeToString()) as session,
        pytest.raises(RequestRejected) as caught,
    ):
        session.open(WAIT_SECONDS)
    assert str(caught.value) == words
    assert node._exit_code(caught.value) == EXIT_REFUSED


def test_a_welcome_with_unknown_fields_is_not_believed():
    with opened_at(inside(1, UNKNOWN)) as session, pytest.raises(RequestRejected, match="1020"):
        session.open(WAIT_SECONDS)


def test_an_unknown_message_of_a_ps_is_not_passed_over():
    with opened_at(UNKNOWN) as session, pytest.raises(StreamLost, match="another Thinwire"):
        session.open(WAIT_SECONDS)


def test_another_package_of_messages_is_told_apart_from_a_ps_that_is_away():
    with (
        opened_at(service="thinwire.v2.ParameterServer") as session,
        pytest.raises(Unreachable, match=f"no service {SERVICE}"),
    ):
        session.open(WAIT_SECONDS)


# -- parts that are equal in all versions ------------------------------------------------------


def test_what_it_takes_to_refuse_stays_readable_for_ever():
    assert pb.ToServer.FromString(b"\x0a\x02\x08\x07").hello.protocol_version == 7
    refusal = pb.ToClient(refusal=pb.Refusal(reason=pb.REASON_PROTOCOL_VERSION, message="no"))
    assert refusal.SerializeToString() == b"\x12\x06\x08\x01\x12\x02no"
    assert (SERVICE, pb.DESCRIPTOR.package) == ("thinwire.v1.ParameterServer", "thinwire.v1")


def test_the_golden_bytes_are_of_this_version_and_hold_nothing_unknown():
    hello = pb.ToServer.FromString((GOLDEN / "to_server_hello.bin").read_bytes()).hello
    assert hello.protocol_version == PROTOCOL_VERSION
    assert versions.refusal(hello) is None
    for name, message in samples().items():
        read = type(message).FromString((GOLDEN / f"{name}.bin").read_bytes())
        body = getattr(read, read.WhichOneof("body"))
        assert versions.unknown_fields(body, "it") is None
