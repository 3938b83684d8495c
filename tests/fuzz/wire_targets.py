"""What a shard decodes of its clients' messages: framing, pushes, blocks, Hellos, manifests."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import numpy as np

from ops import index_codings, value_codings, wire
from ops.types import Kind, LowRankBlock, RangedBlock, ShardLayout
from ops.wire import WireError
from proto import convert, manifests
from proto import peers_pb2 as peers
from proto import thinwire_pb2 as pb
from proto.convert import Malformed
from ps import handshake, reader
from ps.journal_records import Coder, bodies
from ps.pushes import NonFinite, PushDecoder
from tests.fuzz.target import Reader, Target, joined, parsed
from tests.harness import KERNELS, SPEC, method
from tests.proto.samples import GOLDEN, samples

LARGEST_PAYLOAD_BYTES = 1 << 16
ENVELOPES = (pb.ToServer, pb.ToClient, peers.ToPeer, peers.FromPeer)
#: Entries of a block's slot; the last one is far larger than what comes.
SIZES = (0, 1, 7, 28, 255, 5000, 1 << 24)
DTYPES = ("float32", "bfloat16", "float16", "int8")


def golden(kind: str) -> list[bytes]:
    """Return the golden bytes of one envelope's messages."""
    return [path.read_bytes() for path in sorted(GOLDEN.glob(f"{kind}_*.bin"))]


# -- framing -----------------------------------------------------------------------------------


def framing(data: bytes) -> None:
    """Feed frames of one stream until one of them ends it."""
    source = Reader(data)
    envelope = source.choice(ENVELOPES)
    assembler = convert.Assembler(envelope, lambda header: LARGEST_PAYLOAD_BYTES)
    with contextlib.suppress(Malformed):
        for frame in source.pieces():
            complete = assembler.feed(frame)
            assert assembler.inside_payload == (complete is None)
            if complete is not None:
                message, payload = complete
                body = getattr(message, message.WhichOneof("body"))
                assert len(payload) == getattr(body, "payload_bytes", 0)


def _framing_seeds() -> list[bytes]:
    seeds = []
    for number, kind in enumerate(("to_server", "to_client", "to_peer", "from_peer")):
        seeds += [bytes([number]) + joined([frame]) for frame in golden(kind)]
    header = pb.ToServer(push=pb.Push(payload_bytes=6)).SerializeToString()
    chunk = pb.ToServer(chunk=pb.Chunk(data=b"abc")).SerializeToString()
    return [*seeds, b"\0" + joined([header, chunk, chunk, golden("to_server")[0]])]


# -- pushes ------------------------------------------------------------------------------------

#: What a decoder is made for: its method's name, and how many values come beside.
SHARDS = (("asgd", 0), ("adacomp", 0), ("esync", 3), ("dgs", 0))


def _decoders() -> list[tuple[PushDecoder, Coder, Kind, int]]:
    made = []
    for name, aux in SHARDS:
        chosen = method(name, compression_rate=0.25)
        (layout,) = chosen.placement.place(SPEC, 1)
        decoder = PushDecoder(layout, chosen.kind, KERNELS, aux)
        decoder.keeps_coded = True
        made.append((decoder, Coder(layout, chosen, KERNELS, aux), chosen.kind, aux))
    return made


DECODERS = _decoders()
_WIRE_KINDS = {Kind.GRADIENT: pb.UPDATE_KIND_GRADIENT, Kind.DELTA: pb.UPDATE_KIND_DELTA}
LAYOUT: ShardLayout = method("asgd").placement.place(SPEC, 1)[0]


def push(data: bytes) -> None:
    """Decode one push, mended where the first bytes say so; write it down and read it again."""
    source = Reader(data)
    decoder, coder, kind, aux = source.choice(DECODERS)
    mends, message = source.number(), pb.Push()
    if not parsed(message, source.rest()):
        return
    _mend(message, mends, kind, aux)
    payload = memoryview(message.payload)
    try:
        event = decoder.decode(1, message, payload)
    except (Malformed, NonFinite):
        return
    values, indices = event.update.values, event.update.indices
    assert np.isfinite(values).all() and np.isfinite(event.loss)
    assert values.dtype == np.float32
    if indices is None:
        assert values.size == LAYOUT.size
    else:
        assert values.size == indices.size <= LAYOUT.size
        assert (np.diff(indices) > 0).all()
        assert not indices.size or 0 <= indices[0] <= indices[-1] < LAYOUT.size
    record = memoryview(b"".join(bytes(piece) for piece in coder.code(event, 2.5)))
    ((_, body),) = bodies(record)
    again, now = coder.decode(body)
    assert now == 2.5 and again.update.values.tobytes() == values.tobytes()
    assert (again.update.indices is None) == (indices is None)
    assert indices is None or (again.update.indices == indices).all()


def _mend(message: pb.Push, mends: int, kind: Kind, aux: int) -> None:
    """Make what stands in the way of the deeper checks right."""
    if mends & 1:
        message.kind = _WIRE_KINDS[kind]
    if mends & 2:
        message.step, message.samples, message.local_steps = 1, 8, 1
        message.more = False
        message.ClearField("manifest")
    if mends & 4:
        message.aux_count = aux
    if mends & 8:
        for slot, block in enumerate(message.blocks):
            block.slot = slot
    if mends & 16:
        mend_lengths(message)
    if mends & 32:
        message.loss = 0.5


def mend_lengths(message: pb.Push | pb.Reply) -> None:
    """Let each block's bytes be as many as its description says, and no more than come."""
    expected = 4 * message.aux_count
    for block in message.blocks:
        width = (4, 2, 2, 1)[block.value_dtype % 4]
        block.value_bytes = block.value_bytes % 64 if block.value_coding else 0
        block.index_bytes %= 64
        block.count %= 32
        expected += block.index_bytes + (block.value_bytes or block.count * width)
    if expected < 4096:
        message.payload = message.payload[:expected].ljust(expected, b"\1")


def _push_seeds() -> list[bytes]:
    blocks = [pb.Block(slot=slot, count=size) for slot, size in enumerate((16, 8, 4))]
    dense = pb.Push(step=1, samples=8, local_steps=1, loss=0.5, blocks=blocks)
    dense.payload = np.arange(28, dtype="<f4").tobytes()
    found = [dense.SerializeToString()]
    for coding in wire.IndexCoding:
        block = pb.Block(slot=0, count=2, coding=int(coding), index_bytes=2, coding_parameter=2)
        found.append(pb.Push(blocks=[block], payload=bytes(range(10))).SerializeToString())
    sparse = pb.Block(slot=0, count=2, coding=pb.INDEX_CODING_UINT32, index_bytes=8)
    positions = np.array([1, 7], "<u4").tobytes() + np.float32([0.5, -1]).tobytes()
    found.append(pb.Push(blocks=[sparse], payload=positions).SerializeToString())
    found += [m.push.SerializeToString() for m in samples().values() if m_is_push(m)]
    shards = range(len(SHARDS))
    return [bytes([shard, mends]) + one for shard in shards for mends in (0, 63) for one in found]


def m_is_push(message: Any) -> bool:
    """Whether a golden message is a push."""
    return isinstance(message, pb.ToServer) and message.WhichOneof("body") == "push"


# -- blocks ------------------------------------------------------------------------------------


def block(data: bytes) -> None:
    """Decode one block; what decodes is coded again and must be the same."""
    source = Reader(data)
    size, dtype = source.choice(SIZES), source.choice(DTYPES)
    coding, count = source.number() % 10, source.interesting()
    parameter, value_coding = source.interesting() % 2**32, source.number() % 3
    scale, index = source.choice((1.0, 0.0, 0.5, 3e38, -1.0, float("nan"))), source.piece()
    values = source.rest()
    with contextlib.suppress(WireError):
        found = wire.decode_block(
            0, count, coding, parameter, memoryview(index), dtype, scale,
            memoryview(values), size, value_coding,
        )  # fmt: skip
        assert found.size == size and found.values.data.size <= max(size, 1)
        if isinstance(found, LowRankBlock | RangedBlock):
            return
        if found.indices is not None and found.indices.size:
            assert found.indices[0] >= 0 and found.indices[-1] < size
            assert (np.diff(found.indices) > 0).all()
        _code_again(found)


def _code_again(found: Any) -> None:
    coded = wire.IndexChooser().encode(found)
    again = wire.decode_block(
        0, coded.count, coded.coding, coded.coding_parameter, memoryview(coded.index_bytes),
        coded.value_dtype, coded.scale, memoryview(coded.value_bytes), found.size,
        coded.value_coding,
    )  # fmt: skip
    assert again.values.data.tobytes() == found.values.data.tobytes()
    full = found.indices is None or found.indices.size == found.size
    assert full or (again.indices == found.indices).all()


def _block_seeds() -> list[bytes]:
    indices = np.array([1, 5, 6, 20], np.int64)
    coded = {
        1: index_codings.encode_bitmap(indices, 28),
        2: index_codings.encode_rice(indices, 1),
        3: index_codings.encode_deflated_gaps(indices),
        4: index_codings.encode_uint32(indices),
        5: index_codings.encode_elias_fano(indices, 2),
        7: b"\4\0\0\0\x11",
    }
    low_bits = {2: 1, 5: 2}
    seeds = [bytes([3, 0, 0, 28, 0, 0, 0, 0, 0]) + np.ones(28, "<f4").tobytes()]
    for dtype, (coding, index) in itertools.product(range(4), coded.items()):
        head = bytes([3, dtype, coding, 4, low_bits.get(coding, 0), 0, 0])
        seeds.append(head + joined([index]) + bytes(4 * (4, 2, 2, 1)[dtype]))
    exponents = value_codings.encode_exponents(np.float32([1, -2, 3, 4]))
    seeds.append(bytes([3, 0, 4, 4, 0, 1, 0]) + joined([coded[4]]) + exponents)
    factors = b"\0\0\0\0\7\0\0\0\0\0\x80\x3f"
    seeds.append(bytes([3, 0, 6, 11, 1, 0, 0]) + joined([factors]) + bytes(44))
    return seeds


def positions(data: bytes) -> None:
    """Code positions in every way; each must come back."""
    source = Reader(data)
    gaps = np.frombuffer(source.rest()[: 2 * (len(data) // 2)].ljust(2, b"\0"), "<u2")
    gaps = gaps[: gaps.size].astype(np.int64)
    scale = 1 << (int(gaps[0]) % 17)
    indices = np.cumsum(gaps * scale + 1) - 1
    size, count = int(indices[-1]) + 1 + int(gaps[-1]), indices.size
    pairs: list[tuple[bytes, Any]] = [
        (index_codings.encode_uint32(indices), index_codings.decode_uint32),
        (index_codings.encode_deflated_gaps(indices), index_codings.decode_deflated_gaps),
    ]
    if size > 1 << 32:
        pairs = []
    for coded, decode in pairs:
        np.testing.assert_array_equal(decode(memoryview(coded), count), indices)
    for name in ("rice", "elias_fano"):
        low, expected = getattr(index_codings, f"best_{name}")(indices)
        if expected > 1 << 20:
            continue
        coded = getattr(index_codings, f"encode_{name}")(indices, low)
        assert len(coded) == expected
        decode = getattr(index_codings, f"decode_{name}")
        np.testing.assert_array_equal(decode(memoryview(coded), count, size, low), indices)
    if size < 1 << 20:
        coded = index_codings.encode_bitmap(indices, size)
        found = index_codings.decode_bitmap(memoryview(coded), count, size)
        np.testing.assert_array_equal(found, indices)


def exponents(data: bytes) -> None:
    """Decode deflated exponents of any description."""
    source = Reader(data)
    width, count, exact = source.choice((2, 4, 1, 3, 8)), source.interesting(), source.number() % 2
    coded = source.rest()
    with contextlib.suppress(WireError):
        plain = value_codings.decode_exponents(memoryview(coded), count, width)
        assert len(plain) == count * width
    if exact and len(coded) >= 4:
        values = np.frombuffer(coded[: len(coded) // 4 * 4], "<f4")
        again = value_codings.encode_exponents(values)
        plain = value_codings.decode_exponents(memoryview(again), values.size, 4)
        assert bytes(plain) == values.tobytes()


def _exponent_seeds() -> list[bytes]:
    values = np.float32([1, -2, 3, 4])
    coded = value_codings.encode_exponents(values)
    half = value_codings.encode_exponents(values.astype(np.float16))
    return [b"\1\4\0" + coded, b"\0\4\0" + half, b"\1\4\1" + values.tobytes()]


# -- introductions -----------------------------------------------------------------------------

_FINGERPRINT = method("asgd").fingerprint()
_MINE = handshake.identity("run", 0, 1, 0, _FINGERPRINT, SPEC, [("learning_rate", "0.1")])


def hello(data: bytes) -> None:
    """Judge a Hello; read the model and the link that it names."""
    source = Reader(data)
    mends, message = source.number(), pb.Hello()
    if not parsed(message, source.rest()):
        return
    if mends & 1:
        message.protocol_version, message.num_shards, message.shard = 1, 1, 0
    if mends & 2:
        message.run_id = ""
    if mends & 4:
        del message.model[:]
        message.model.extend(convert.tensors_of(SPEC))
    refusal = handshake.judge(message, _MINE)
    if refusal is not None:
        assert pb.Reason.Name(refusal[0]) and refusal[1]
    with contextlib.suppress(Malformed):
        convert.spec_of(message.model)
    with contextlib.suppress(Malformed):
        reader._checked_link(message.link)
    reader.words_of(message)


def _hello_seeds() -> list[bytes]:
    mine = pb.Hello(
        protocol_version=1, role=pb.ROLE_WORKER, id=2, num_shards=1,
        fingerprint=convert.settings_of(_FINGERPRINT), model=convert.tensors_of(SPEC),
        link=pb.EmulatedLink(mbps=100, delay_ms=2.5, loss=0.01, seed=9),
    ).SerializeToString()  # fmt: skip
    sampled = samples()["to_server_hello"].hello.SerializeToString()
    return [bytes([mends]) + one for mends in (0, 7) for one in (mine, sampled)]


def manifest(data: bytes) -> None:
    """Read a manifest; what is legal is written and read again."""
    message = pb.Manifest()
    if not parsed(message, data):
        return
    with contextlib.suppress(Malformed):
        found = manifests.from_message(message)
        assert manifests.from_message(manifests.to_message(found)) == found


def _manifest_seeds() -> list[bytes]:
    return [samples()["to_server_push_parted"].push.manifest.SerializeToString()]


TARGETS = {
    "framing": Target("frames of a stream to messages", framing, _framing_seeds),
    "push": Target(
        "Push messages to events, and into the journal", push, _push_seeds, message=pb.Push, head=2
    ),
    "block": Target("coded blocks: positions and values", block, _block_seeds),
    "positions": Target(
        "positions through every coding", positions, lambda: [b"\1\0\2\0\xff\xff", bytes(40)]
    ),
    "exponents": Target("deflated exponents", exponents, _exponent_seeds),
    "hello": Target("Hellos: identity, model, link", hello, _hello_seeds, message=pb.Hello, head=1),
    "manifest": Target("manifests of datagrams", manifest, _manifest_seeds, message=pb.Manifest),
}
