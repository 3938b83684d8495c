"""10^5 random or mutated messages raise no exception other than Malformed."""

import random

from tests.proto.samples import samples
from tests.proto.test_messages import SIZES, through_a_message
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed, MessageAssembler, frames

NUM_MESSAGES = 100_000
LARGEST_PAYLOAD_BYTES = 4096


def seeds() -> list[bytes]:
    """Return valid frames to start from, pushes above all."""
    push, payload = through_a_message()
    push.step = 3
    inline = list(frames(pb.ToServer(push=push), [payload]))
    push.payload_bytes = len(payload)
    header = pb.ToServer(push=push).SerializeToString()
    chunks = [
        pb.ToServer(chunk=pb.Chunk(data=data)).SerializeToString()
        for data in (payload, payload[:20], payload[20:])
    ]
    others = [message.SerializeToString() for message in samples().values()]
    return [*inline * 6, *[header] * 3, *chunks * 2, *others]


def random_push(generator: random.Random) -> bytes:
    """Return a frame of a push that parses, with any numbers in its blocks."""
    push = pb.Push()
    for _ in range(generator.randrange(4)):
        push.blocks.add(
            slot=generator.choice((0, 1, 2, 3, 2**32 - 1)),
            count=generator.choice((0, 1, 8, 72, 2**32 - 1)),
            coding=generator.randrange(8),
            coding_parameter=generator.choice((0, 1, 6, 31, 64, 2**32 - 1)),
            index_bytes=generator.choice((0, 1, 4, 9, 12, 40, 2**32 - 1)),
            value_dtype=generator.randrange(5),
            scale=generator.choice((0.0, 1.0, -3.0, float("nan"))),
            value_coding=generator.choice((0, 0, 1, 2)),
            value_bytes=generator.choice((0, 0, 5, 40, 2**32 - 1)),
        )
    push.payload = generator.randbytes(generator.randrange(200))
    push.payload_bytes = len(push.payload)
    return pb.ToServer(push=push).SerializeToString()


def mutated(data: bytes, generator: random.Random) -> bytes:
    """Return a frame with a few bytes changed, cut out or put in."""
    spoilt = bytearray(data)
    for _ in range(generator.randrange(4)):
        position = generator.randrange(len(spoilt) + 1)
        match generator.randrange(4):
            case 0:
                spoilt[position : position + 1] = generator.randbytes(1)
            case 1:
                del spoilt[position : position + generator.randrange(8)]
            case 2:
                spoilt[position:position] = generator.randbytes(generator.randrange(8))
            case _ if position < len(spoilt):
                spoilt[position] ^= 1 << generator.randrange(8)
    return bytes(spoilt)


def test_only_malformed_is_raised():
    generator = random.Random(20)
    starts = seeds()
    outcomes = {"message": 0, "pending": 0, "malformed": 0, "blocks": 0}
    assembler = MessageAssembler(pb.ToServer, lambda header: LARGEST_PAYLOAD_BYTES)
    for number in range(NUM_MESSAGES):
        if number % 10 == 0:
            data = generator.randbytes(generator.randrange(100))
        elif number % 10 < 4:
            data = random_push(generator)
        else:
            data = mutated(generator.choice(starts), generator)
        try:
            assembled = assembler.feed(data)
            if assembled is None:
                outcomes["pending"] += 1
                continue
            message, payload = assembled
            outcomes["message"] += 1
            if message.WhichOneof("body") == "push":
                for block in messages.blocks_from_message(message.push.blocks, payload, SIZES):
                    assert block.size == SIZES[block.slot]
                    assert len(block.values.data) <= block.size
                    if block.indices is not None and len(block.indices):
                        assert 0 <= block.indices[0] <= block.indices[-1] < block.size
                outcomes["blocks"] += 1
        except Malformed:
            outcomes["malformed"] += 1
            assembler = MessageAssembler(pb.ToServer, lambda header: LARGEST_PAYLOAD_BYTES)
    assert sum(outcomes.values()) - outcomes["blocks"] >= NUM_MESSAGES
    assert min(outcomes.values()) > NUM_MESSAGES / 100, outcomes
