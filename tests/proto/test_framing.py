"""Frames and their assembler: exact protobuf bytes, any split, every violation."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.proto.samples import samples
from thinwire.proto import framing
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import (
    INLINE_BYTES,
    MAX_MESSAGE_BYTES,
    MOST_INLINE_BYTES,
    Malformed,
    MessageAssembler,
    frame,
    frames,
)

CHUNK_DATA_BYTES = MAX_MESSAGE_BYTES - 8


def new_push() -> pb.ToServer:
    message = pb.ToServer()
    message.push.step = 7
    message.push.blocks.add(slot=1, count=5)
    return message


def new_reply() -> pb.ToClient:
    message = pb.ToClient()
    message.reply.version = 7
    message.reply.blocks.add(slot=1, count=5)
    return message


def assembler_for(message, limit=1 << 30):
    return MessageAssembler(type(message), lambda header: limit)


def noise(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(size)


@pytest.mark.parametrize("make", [new_push, new_reply])
@pytest.mark.parametrize("size", [1, 100, 127, 128, 16_383, 16_384, MOST_INLINE_BYTES])
def test_small_payload_is_inline_and_exactly_protobufs_bytes(make, size):
    payload = noise(size)
    (data,) = frames(make(), [payload[: size // 3], payload[size // 3 :]])
    parsed = type(make()).FromString(data)
    body = getattr(parsed, parsed.WhichOneof("body"))
    assert body.payload == payload
    assert body.payload_bytes == size
    assert parsed.SerializeToString() == data


@pytest.mark.parametrize("make", [new_push, new_reply])
@pytest.mark.parametrize(
    "size",
    [
        MOST_INLINE_BYTES + 1,
        CHUNK_DATA_BYTES,
        CHUNK_DATA_BYTES + 1,
        3 * CHUNK_DATA_BYTES + 100,
    ],
)
def test_large_payload_follows_in_full_chunks_of_protobufs_bytes(make, size):
    payload = noise(size)
    header, *chunks = [bytes(frame) for frame in frames(make(), [payload])]
    parsed = [type(make()).FromString(chunk) for chunk in chunks]
    assert [message.SerializeToString() for message in parsed] == chunks
    assert b"".join(message.chunk.data for message in parsed) == payload
    assert all(len(data) <= MAX_MESSAGE_BYTES for data in (header, *chunks))
    assert len(chunks) == -(-size // CHUNK_DATA_BYTES)


def test_where_chunks_are_small_less_is_inline():
    small = [
        len(list(frames(new_push(), [noise(INLINE_BYTES + more)], 16 << 10))) for more in (0, 1)
    ]
    assert small == [1, 1 + 5]


def test_an_empty_payload_is_a_header_alone():
    (data,) = frames(new_push(), [b"", b""])
    message, payload = assembler_for(new_push()).feed(data)
    assert len(payload) == 0
    assert message == new_push()


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(0, 5000),
    cuts=st.lists(st.integers(0, 5000), max_size=6),
    inline=st.integers(0, 3000),
    chunk=st.integers(1, 1500),
)
def test_any_split_comes_together_again(size, cuts, inline, chunk):
    payload = noise(size, seed=size)
    edges = [0, *sorted(min(cut, size) for cut in cuts), size]
    pieces = [payload[start:stop] for start, stop in itertools.pairwise(edges)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(framing, "INLINE_BYTES", inline)
        patch.setattr(framing, "MOST_INLINE_BYTES", 2 * inline)
        patch.setattr(framing, "MAX_CHUNK_BYTES", chunk)
        sent = list(map(bytes, frames(new_push(), pieces)))
    assembler = assembler_for(new_push())
    *early, last = [assembler.feed(data) for data in sent]
    assert early == [None] * len(early)
    assert bytes(last[1]) == payload
    assert last[0].push.step == 7
    assert assembler._header is None


def test_pieces_may_be_any_buffers():
    values = np.arange(30_000, dtype=np.float32)
    sent = frames(new_push(), [memoryview(values), bytearray(b"abc"), b"d"])
    assembler = assembler_for(new_push())
    *_, (_, payload) = [assembler.feed(bytes(data)) for data in sent]
    assert bytes(payload) == values.tobytes() + b"abcd"


#: Messages that chunks follow.
IN_CHUNKS = ("to_server_offer", "to_client_slots")
WHOLE = sorted(name for name in samples().keys() - set(IN_CHUNKS) if "chunk" not in name)


@pytest.mark.parametrize("name", WHOLE)
def test_all_other_messages_pass_as_they_are(name):
    message = samples()[name]
    got, payload = assembler_for(message).feed(frame(message))
    assert got == message
    expected = getattr(message, message.WhichOneof("body"))
    assert bytes(payload) == getattr(expected, "payload", b"")


def test_chunks_of_another_encoder_are_understood():
    header, _ = frames(new_push(), [noise(MOST_INLINE_BYTES + 3)])
    payload = noise(MOST_INLINE_BYTES + 3)
    # Chunk.data twice: protobuf keeps the last one.
    inner = b"\x0a\x01x" + pb.Chunk(data=payload).SerializeToString()
    outer = b"\x22" + framing._varint(len(inner)) + inner
    assembler = assembler_for(new_push())
    assert assembler.feed(header) is None
    _, got = assembler.feed(outer)
    assert bytes(got) == payload


def _chunk(data: bytes) -> bytes:
    return pb.ToServer(chunk=pb.Chunk(data=data)).SerializeToString()


def new_offer() -> pb.ToServer:
    return pb.ToServer(offer=pb.Offer(document="{}"))


def new_slots() -> pb.ToClient:
    return pb.ToClient(slots=pb.Slots(document="{}"))


@pytest.mark.parametrize("make", [new_offer, new_slots])
@pytest.mark.parametrize("size", [0, 1, 100, CHUNK_DATA_BYTES, 2 * CHUNK_DATA_BYTES + 1])
def test_offers_and_slots_bring_their_payload_in_chunks_only(make, size):
    payload, assembler = noise(size), assembler_for(make())
    made = list(frames(make(), [payload[: size // 3], payload[size // 3 :]]))
    sent = list(map(bytes, made))
    assert list(map(len, sent)) == list(map(len, made))
    assert len(sent) == 1 + -(-size // CHUNK_DATA_BYTES)
    received = [assembler.feed(data) for data in sent]
    assert received[:-1] == [None] * (len(sent) - 1)
    message, came = received[-1]
    assert getattr(message, message.WhichOneof("body")).payload_bytes == size
    assert bytes(came) == payload


@pytest.mark.parametrize("make", [new_offer, new_slots])
def test_a_chunked_payload_beyond_the_limit_is_refused_before_anything_is_allocated(make):
    header = next(frames(make(), [bytes(101)]))
    with pytest.raises(Malformed, match="at most 100"):
        assembler_for(make(), limit=100).feed(header)


def _push(payload_bytes: int, payload: bytes = b"") -> bytes:
    return pb.ToServer(
        push=pb.Push(payload_bytes=payload_bytes, payload=payload)
    ).SerializeToString()


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        ([_chunk(b"x")], "without a header"),
        ([_push(3), _chunk(b"abcd")], "where 3 are missing"),
        ([_push(3), _chunk(b"")], "chunk of 0 bytes"),
        ([_push(3), _push(3)], "in the middle of"),
        (
            [_push(3), pb.ToServer(heartbeat=pb.Heartbeat()).SerializeToString()],
            "middle",
        ),
        ([_push(3, b"ab")], "payload_bytes is 3"),
        ([_push(0, b"ab")], "payload_bytes is 0"),
        ([_push(101)], "at most 100"),
        ([b""], "no known message"),
        ([b"\x0a\xff\xff"], "does not parse"),
        ([b"\x7a\x00"], "no known message"),
        ([b"\x22\x03\x0a\x01"], "does not parse"),
        ([b"\x22" + b"\xff" * 12], "does not parse"),
        ([bytes(MAX_MESSAGE_BYTES + 1)], "at most 1048576"),
    ],
)
def test_violations_are_malformed(sent, words):
    assembler = MessageAssembler(pb.ToServer, lambda header: 100)
    with pytest.raises(Malformed, match=words):
        for data in sent:
            assembler.feed(data)


def test_the_limit_may_refuse_before_anything_is_allocated():
    def refuse(header: pb.ToServer) -> int:
        raise Malformed(f"no payload for step {header.push.step}")

    header, *_ = frames(new_push(), [noise(MOST_INLINE_BYTES + 1)])
    with pytest.raises(Malformed, match="step 7"):
        MessageAssembler(pb.ToServer, refuse).feed(header)


def test_what_does_not_fit_is_an_error_of_the_sender():
    with pytest.raises(ValueError, match="report"):
        frame(pb.ToServer(report=pb.Report(document="x" * MAX_MESSAGE_BYTES)))
    with pytest.raises(ValueError, match="push, reply, part, holding, offer and slots"):
        frames(pb.ToServer(leave=pb.Leave()), [b"x"])


def test_a_payload_within_its_header_has_the_same_limit():
    assembler = MessageAssembler(pb.ToServer, lambda header: 100)
    assert assembler.feed(_push(100, bytes(100)))[1] == bytes(100)
    with pytest.raises(Malformed, match="at most 100"):
        assembler.feed(_push(101, bytes(101)))
