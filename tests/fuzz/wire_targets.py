"""Fuzz targets: a shard decodes clients' messages: framing, pushes, Hellos, manifests."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from tests.fuzz.target import Reader, Target, joined, parsed
from tests.proto.samples import GOLDEN, samples
from tests.virtual.toy import KERNELS, SPEC, method
from thinwire.ops.types import Kind, ShardLayout, Update
from thinwire.ops.wire.blocks import IndexCoding
from thinwire.proto import messages
from thinwire.proto import peers_pb2 as peers
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.bulk import BulkConnection
from thinwire.proto.framing import Malformed, MessageAssembler
from thinwire.proto.security.credentials import claims_of
from thinwire.ps.persistence.journal_format import EventCoder, bodies
from thinwire.ps.service import handshake
from thinwire.ps.wire.push_decoder import NonFinite, PushDecoder

LARGEST_PAYLOAD_BYTES = 1 << 16
ENVELOPES = (pb.ToServer, pb.ToClient, peers.ToPeer, peers.FromPeer)


def golden(kind: str) -> list[bytes]:
    """Return the golden bytes of one envelope's messages."""
    return [path.read_bytes() for path in sorted(GOLDEN.glob(f"{kind}_*.bin"))]


# -- framing -----------------------------------------------------------------------------------


def framing(data: bytes) -> None:
    """Feed frames of one stream until one of them ends it."""
    source = Reader(data)
    envelope = source.choice(ENVELOPES)
    assembler = MessageAssembler(envelope, lambda header: LARGEST_PAYLOAD_BYTES)
    with contextlib.suppress(Malformed):
        for frame in source.pieces():
            complete = assembler.feed(frame)
            assert (assembler._header is None) == (complete is not None)
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


class _Arrived:
    """A wire on which a fuzzer's bytes have arrived, in pieces that it has chosen."""

    def __init__(self, data: bytes) -> None:
        source = Reader(data)
        self._pieces = [piece for piece in source.pieces() if piece]

    def wait(self, milliseconds: float | None) -> bool:
        return True

    def receive_into(self, space: memoryview) -> int:
        if not self._pieces:
            return 0
        piece = self._pieces.pop(0)
        count = min(len(space), len(piece))
        space[:count] = piece[:count]
        if count < len(piece):
            self._pieces.insert(0, piece[count:])
        return count


def bulk(data: bytes) -> None:
    """Put the bytes of a bulk connection together, until they end or are malformed."""
    wire: Any = _Arrived(data)
    connection = BulkConnection(wire)
    assembler = MessageAssembler(pb.ToServer, lambda header: LARGEST_PAYLOAD_BYTES)
    with contextlib.suppress(Malformed):
        while (arrived := connection.receive()) is not None:
            complete = assembler.feed(arrived)
            assert (assembler._header is None) == (complete is not None)
    assert connection.num_received <= len(data)


def _bulk_seeds() -> list[bytes]:
    header = pb.ToServer(push=pb.Push(payload_bytes=6)).SerializeToString()
    stream = b"".join(
        (word | len(part)).to_bytes(4, "big") + part
        for word, part in ((0, golden("to_server")[0]), (0, header), (1 << 31, b"abcdef"))
    )
    return [joined([stream]), joined([stream[:9], stream[9:]]), joined([stream + b"\xff\xff"])]


# -- pushes ------------------------------------------------------------------------------------

#: Settings of a decoder: name of the method, and number of auxiliary values.
SHARDS = (("asgd", 0), ("adacomp", 0), ("esync", 3), ("dgs", 0))


def _decoders() -> list[tuple[PushDecoder, EventCoder, Kind, int]]:
    made = []
    for name, aux in SHARDS:
        chosen = method(name, compression_rate=0.25)
        (layout,) = chosen.place(SPEC, 1)
        decoder = PushDecoder(layout, chosen.kind, KERNELS, aux)
        decoder.keeps_coded = True
        made.append((decoder, EventCoder(layout, chosen, KERNELS, aux), chosen.kind, aux))
    return made


DECODERS = _decoders()
_WIRE_KINDS = {Kind.GRADIENT: pb.UPDATE_KIND_GRADIENT, Kind.DELTA: pb.UPDATE_KIND_DELTA}
LAYOUT: ShardLayout = method("asgd").place(SPEC, 1)[0]


def push(data: bytes) -> None:
    """Decode one push, repaired if the first bytes request it; encode and decode the push again."""
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
    assert event.head.loss is None or np.isfinite(event.head.loss)
    record = memoryview(b"".join(bytes(piece) for piece in coder.code(event, 2.5)))
    ((_, body),) = bodies(record)
    again, now = coder.decode(body)
    assert now == 2.5 and (again.change is None) == (event.change is None)
    for one, other in ((event.update, again.update), (event.change, again.change)):
        if one is not None and other is not None:
            _check_update(one, other)


def _check_update(one: Update, other: Update) -> None:
    """Check that an update fits the shard, and is the same after it was written down."""
    values, indices = one.values, one.indices
    assert np.isfinite(values).all() and values.dtype == np.float32
    if indices is None:
        assert values.size == LAYOUT.size
    else:
        assert values.size == indices.size <= LAYOUT.size
        assert (np.diff(indices) > 0).all()
        assert not indices.size or 0 <= indices[0] <= indices[-1] < LAYOUT.size
    assert other.values.tobytes() == values.tobytes()
    assert (other.indices is None) == (indices is None)
    assert indices is None or (other.indices == indices).all()


def _mend(message: pb.Push, mends: int, kind: Kind, aux: int) -> None:
    """Correct the fields that would fail the first checks, so that the deeper checks run."""
    if mends & 1:
        message.kind = _WIRE_KINDS[kind]
    if mends & 2:
        message.step, message.samples, message.local_steps = 1, 8, 1
        message.more = False
        message.ClearField("manifest")
    if mends & 4:
        message.aux_count = aux
    if mends & 8:
        for blocks in (message.blocks, message.changes):
            for slot, block in enumerate(blocks):
                block.slot = slot
    if mends & 16:
        mend_lengths(message)
    if mends & 32:
        message.loss = 0.5


def mend_lengths(message: pb.Push | pb.Reply) -> None:
    """Set each block's byte count to its description's count, within the sent bytes."""
    expected = 4 * message.aux_count + sum(map(_mend_length, message.blocks))
    if isinstance(message, pb.Push):
        message.change_bytes = sum(map(_mend_length, message.changes))
        expected += message.change_bytes
    if expected < 4096:
        message.payload = message.payload[:expected].ljust(expected, b"\1")


def _mend_length(block: pb.Block) -> int:
    """Let a block's description name few bytes; return how many."""
    width = (4, 2, 2, 1)[block.value_dtype % 4]
    block.value_bytes = block.value_bytes % 64 if block.value_coding else 0
    block.index_bytes %= 64
    block.count %= 32
    return block.index_bytes + (block.value_bytes or block.count * width)


def _push_seeds() -> list[bytes]:
    blocks = [pb.Block(slot=slot, count=size) for slot, size in enumerate((16, 8, 4))]
    dense = pb.Push(step=1, samples=8, local_steps=1, loss=0.5, blocks=blocks)
    dense.payload = np.arange(28, dtype="<f4").tobytes()
    found = [dense.SerializeToString()]
    for coding in IndexCoding:
        block = pb.Block(slot=0, count=2, coding=int(coding), index_bytes=2, coding_parameter=2)
        found.append(pb.Push(blocks=[block], payload=bytes(range(10))).SerializeToString())
    sparse = pb.Block(slot=0, count=2, coding=pb.INDEX_CODING_UINT32, index_bytes=8)
    positions = np.array([1, 7], "<u4").tobytes() + np.float32([0.5, -1]).tobytes()
    found.append(pb.Push(blocks=[sparse], payload=positions).SerializeToString())
    both = pb.Push(blocks=blocks, changes=[sparse], change_bytes=16)
    both.payload = dense.payload + positions
    found.append(both.SerializeToString())
    found += [m.push.SerializeToString() for m in samples().values() if m_is_push(m)]
    shards = range(len(SHARDS))
    return [bytes([shard, mends]) + one for shard in shards for mends in (0, 63) for one in found]


def m_is_push(message: Any) -> bool:
    """Whether a golden message is a push."""
    return isinstance(message, pb.ToServer) and message.WhichOneof("body") == "push"


# -- introductions -----------------------------------------------------------------------------

_FINGERPRINT = method("asgd").fingerprint()
_MINE = handshake.Identity("run", 0, 1, 0, _FINGERPRINT, SPEC, [("learning_rate", "0.1")])


def hello(data: bytes) -> None:
    """Judge a Hello; read the link that it names."""
    source = Reader(data)
    mends, message = source.number(), pb.Hello()
    if not parsed(message, source.rest()):
        return
    if mends & 1:
        message.protocol_version = messages.PROTOCOL_VERSION
        message.num_shards, message.shard = 1, 0
    if mends & 2:
        message.run_id = ""
    if mends & 4:
        del message.model[:]
        message.model.extend(messages.tensors_of(SPEC))
    refusal = handshake.check_hello(message, _MINE)
    if refusal is not None:
        assert pb.Reason.Name(refusal[0]) and refusal[1]
    with contextlib.suppress(Malformed):
        handshake.checked_link(message.link)
    claims_of(message)


def _hello_seeds() -> list[bytes]:
    mine = pb.Hello(
        protocol_version=messages.PROTOCOL_VERSION,
        role=pb.ROLE_WORKER,
        id=2,
        num_shards=1,
        fingerprint=messages.settings_of(_FINGERPRINT),
        model=messages.tensors_of(SPEC),
        link=pb.EmulatedLink(mbps=100, delay_ms=2.5, loss=0.01, seed=9),
    ).SerializeToString()
    sampled = samples()["to_server_hello"].hello.SerializeToString()
    return [bytes([mends]) + one for mends in (0, 7) for one in (mine, sampled)]


def manifest(data: bytes) -> None:
    """Decode a manifest; encode and decode a valid manifest again."""
    message = pb.Manifest()
    if not parsed(message, data):
        return
    with contextlib.suppress(Malformed):
        found = messages.manifest_from_message(message)
        assert messages.manifest_from_message(messages.manifest_to_message(found)) == found


def _manifest_seeds() -> list[bytes]:
    return [samples()["to_server_push_parted"].push.manifest.SerializeToString()]


TARGETS = {
    "bulk": Target("bytes of a bulk connection to messages", bulk, _bulk_seeds),
    "framing": Target("frames of a stream to messages", framing, _framing_seeds),
    "push": Target(
        "Push messages to events, and into the journal", push, _push_seeds, message=pb.Push, head=2
    ),
    "hello": Target("Hellos: identity, model, link", hello, _hello_seeds, message=pb.Hello, head=1),
    "manifest": Target("manifests of datagrams", manifest, _manifest_seeds, message=pb.Manifest),
}
