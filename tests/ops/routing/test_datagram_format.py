"""The datagram's byte format, and how values are cut into datagrams."""

import struct
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.datagram_samples import (
    CHANNELS,
    ENTRIES,
    KEY,
    MTU,
    SESSION,
    dense_part,
    num_blocks,
    signed,
    sparse_part,
)
from thinwire.ops.kernels.numpy_ops import dequantise, quantise
from thinwire.ops.routing.base import AnnouncedDatagrams, ValueEncoding
from thinwire.ops.routing.counters import ReassemblyCounters
from thinwire.ops.routing.datagram_format import (
    FRAME_BYTES,
    HEADER,
    most_values,
    pack_nibbles,
    payload_bytes,
    unpack_nibbles,
)
from thinwire.ops.routing.packetizer import Packetizer
from thinwire.ops.routing.parser import DatagramParser
from thinwire.ops.types import CodedValues

LEVEL_DTYPES = {
    ValueEncoding.UINT16: np.uint16,
    ValueEncoding.UINT8: np.uint8,
    ValueEncoding.UINT4: np.uint8,
}
VALUE_DTYPES = {
    ValueEncoding.FLOAT32: "float32",
    ValueEncoding.BFLOAT16: "bfloat16",
    ValueEncoding.FLOAT16: "float16",
    ValueEncoding.INT8: "int8",
}
DENSE = (
    "44475431 01 00 02 00 efcdab8967452301 05000000 03000000 01000000 02000000 03000000 20000000"
    "03000000 23000000 0000803f 00000000 00000000 0c000000"
    "0000803f 000000c0 0000003f"
    "dc49215ab0aef6762756a1167ee74006"
)
SPARSE = (
    "44475431 01 13 01 00 efcdab8967452301 05000000 00000000 02000000 00000000 03000000 02000000"
    "03000000 28000000 00000040 000080bf 00000000 08000000"
    "0000 0f00 0e00 1f05"
    "e085599e8da66af79a7eb49fe1a148b6"
)


def sealer(mtu=MTU):
    return Packetizer(SESSION, mtu, CHANNELS)


def test_golden_dense():
    values = np.zeros(35, np.float32)
    values[32:] = 1.0, -2.0, 0.5
    (datagram,) = signed(sealer().seal((1 << 32) + 1, [dense_part(3, values, [2], [2])]))
    assert datagram.hex() == DENSE.replace(" ", "")


def test_golden_sparse():
    part = sparse_part(
        0,
        40,
        np.array([2, 17, 31]),
        np.array([15, 1, 5], np.uint8),
        [0, 1],
        [1, 1],
        encoding=ValueEncoding.UINT4,
        scales=np.full(3, 2, np.float32),
        lows=np.full(3, -1, np.float32),
    )
    (datagram,) = signed(sealer().seal(2, [part]))
    assert datagram.hex() == SPARSE.replace(" ", "")


def test_the_header_lies_as_documented():
    layout = "<4sBBBBQIIIIIIIIffII"
    assert struct.calcsize(layout) == HEADER.itemsize == 64
    fields = struct.unpack(layout, bytes.fromhex(DENSE)[:64])
    names = np.frombuffer(bytes.fromhex(DENSE), HEADER, 1)[0]
    assert fields[0] == b"DGT1"
    assert fields[1:] == tuple(names.tolist())[1:]
    assert [HEADER.fields[name][1] for name in ("step", "num_blocks", "scale")] == [24, 32, 48]


def test_the_tag_is_keyed_blake2b_over_all_before_it():
    datagram = bytes.fromhex(DENSE)
    assert blake2b(datagram[:-16], digest_size=16, key=KEY).digest() == datagram[-16:]


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("encoding", ValueEncoding)
def test_as_many_values_as_fit(encoding, sparse):
    for limit in range(16, 200):
        count = most_values(encoding, sparse, limit)
        assert payload_bytes(encoding, sparse, count) <= limit
        assert payload_bytes(encoding, sparse, count + 1) > limit


def test_a_full_datagram_holds_348_floats():
    assert most_values(ValueEncoding.FLOAT32, False, 1472 - FRAME_BYTES) == 348


@pytest.mark.parametrize("count", range(1, 66))
def test_nibbles_survive_packing(count):
    levels = np.random.default_rng(count).integers(0, 16, (3, count)).astype(np.uint8)
    packed = pack_nibbles(levels)
    assert packed.shape == (3, (count + 1) // 2)
    np.testing.assert_array_equal(unpack_nibbles(packed, count), levels)


@st.composite
def parts(draw):
    """A slot with any coding; some of its blocks, in any order, on ascending channels."""
    encoding = draw(st.sampled_from(ValueEncoding))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 30)))
    size = draw(st.integers(1, 300))
    count = num_blocks(size)
    blocks = rng.permutation(count)[: draw(st.integers(0, count))]
    channels = np.sort(rng.integers(1, CHANNELS + 1, len(blocks)))
    is_sparse = draw(st.booleans())
    num_values = draw(st.integers(0, size)) if is_sparse else size
    indices = np.sort(rng.permutation(size)[:num_values])
    scales, lows = np.ones(count, np.float32), np.zeros(count, np.float32)
    if encoding in LEVEL_DTYPES:
        bits = {ValueEncoding.UINT16: 16, ValueEncoding.UINT8: 8, ValueEncoding.UINT4: 4}[encoding]
        data = rng.integers(0, 1 << bits, num_values).astype(LEVEL_DTYPES[encoding])
        scales, lows = rng.random(count, np.float32), rng.standard_normal(count).astype(np.float32)
    else:
        coded = quantise(rng.standard_normal(num_values).astype(np.float32), VALUE_DTYPES[encoding])
        data, scales = coded.data, np.full(count, coded.scale, np.float32)
    slot = draw(st.integers(0, 2))
    if is_sparse:
        others = {"encoding": encoding, "scales": scales, "lows": lows}
        return sparse_part(slot, size, indices, data, blocks, channels, **others)
    return dense_part(slot, data, blocks, channels, encoding, scales, lows)


def meaning(part):
    """Decode the values [k] of a part, one by one."""
    positions = np.arange(part.size) if part.indices is None else part.indices
    scales, lows = part.scales[positions // ENTRIES], part.lows[positions // ENTRIES]
    if part.encoding in LEVEL_DTYPES:
        levels = part.data.astype(np.float32) + np.float32(0.5)
        return positions, levels * scales + lows
    dtype = VALUE_DTYPES[part.encoding]
    scale = float(scales[0]) if len(scales) else 1.0
    return positions, dequantise(CodedValues(dtype, part.data, scale))


@given(parts(), st.integers(128, 400))
@settings(max_examples=150, deadline=None)
def test_each_value_travels_once_and_comes_back(part, mtu):
    sealed = sealer(mtu).seal(9, [part])
    ledger = ReassemblyCounters.zero(CHANNELS)
    sizes = [part.size if slot == part.slot else 7 for slot in range(3)]
    parser = DatagramParser(SESSION, sizes, ENTRIES, CHANNELS, ledger)
    block_channel = dict(zip(part.blocks.tolist(), part.channels.tolist(), strict=True))
    found = {}
    for batch in sealed.batches:
        assert batch.size <= mtu
        assert len(batch.data) == batch.size * batch.count <= 65_507
        assert batch.count <= 64
        batch.sign(KEY)
        for arrivals in parser.parse(batch.data, batch.size):
            assert (arrivals.step, arrivals.channel) == (9, batch.channel)
            rows = arrivals.positions
            if rows is None:
                rows = arrivals.offsets[:, None] + np.arange(arrivals.values.shape[1])
                assert ((rows[:, 0] // ENTRIES) == (rows[:, -1] // ENTRIES)).all()
            for position, value in zip(rows.ravel(), arrivals.values.ravel(), strict=True):
                assert position not in found
                assert block_channel[position // ENTRIES] == batch.channel
                found[int(position)] = value
    positions, values = meaning(part)
    travels = np.isin(positions // ENTRIES, part.blocks)
    assert not any(ledger.dropped.values())
    assert sorted(found) == positions[travels].tolist()
    np.testing.assert_array_equal(
        np.array([found[position] for position in sorted(found)], np.float32), values[travels]
    )


def _second_step(given_parts):
    """Return the parts of different slots, the parts of a second step, and its headers."""
    given_parts = sorted({part.slot: part for part in given_parts}.values(), key=lambda p: p.slot)
    maker = sealer()
    maker.seal(1, given_parts)  # sequence numbers continue from this point
    sealed = maker.seal(2, given_parts)
    headers = [np.frombuffer(datagram, HEADER, 1)[0] for datagram in signed(sealed)]
    return given_parts, sealed, headers


@given(st.lists(parts(), max_size=3))
@settings(max_examples=60, deadline=None)
def test_announced_is_what_is_sent(given_parts):
    _, sealed, headers = _second_step(given_parts)
    for each in sealed.announced:
        numbers = [int(h["sequence"]) for h in headers if h["channel"] == each.channel]
        assert numbers == list(range(each.first, each.first + each.count))
        assert each.first == each.count  # as many as in step 1
    assert sum(each.count for each in sealed.announced) == len(headers)
    for slot, announced in sealed.by_slot.items():
        for each in announced:
            numbers = [
                int(h["sequence"])
                for h in headers
                if h["channel"] == each.channel and h["slot"] == slot
            ]
            assert numbers == list(range(each.first, each.first + each.count))


@given(st.lists(parts(), max_size=3), st.integers(0, 1 << 30))
@settings(max_examples=60, deadline=None)
def test_the_bitmap_tells_what_is_lost(given_parts, seed):
    given_parts, sealed, headers = _second_step(given_parts)
    arrived = np.random.default_rng(seed).random(len(headers)) < 0.5
    expected = {}
    for here, header in zip(arrived, headers, strict=True):
        part = next(part for part in given_parts if part.slot == header["slot"])
        start, count = int(header["offset"]), int(header["count"])
        if part.indices is None:
            entries = range(start, start + count)
        else:
            own = part.channels[np.argsort(part.blocks)] if len(part.blocks) else part.channels
            of_block = dict(zip(np.sort(part.blocks).tolist(), own.tolist(), strict=True))
            entries = [
                int(i)
                for i in part.indices
                if i >= start and of_block.get(i // ENTRIES) == header["channel"]
            ][:count]
        if not here:
            expected.setdefault(part.slot, set()).update(entries)
    bitmap = np.packbits(arrived, bitorder="little").tobytes()
    lost = {}
    for each in sealed.lost(bitmap):
        if each.ranges is None:
            assert (np.diff(each.positions) > 0).all()
            lost[each.slot] = set(each.positions.tolist())
        else:
            lost[each.slot] = {i for start, stop in each.ranges for i in range(start, stop)}
    assert lost == expected


def test_entries_too_far_apart_for_a_gap_travel_apart():
    indices = np.array([0, 65_535, 131_071])
    part = sparse_part(0, 131_072, indices, np.ones(3, np.float32), indices // ENTRIES, [1, 1, 1])
    headers = [np.frombuffer(each, HEADER, 1)[0] for each in signed(sealer().seal(1, [part]))]
    assert sorted((int(h["offset"]), int(h["count"])) for h in headers) == [(0, 2), (131_071, 1)]


def test_sequence_numbers_wrap():
    maker = sealer()
    maker._next[1] = (1 << 32) - 1
    sealed = maker.seal(1, [dense_part(0, np.ones(16, np.float32), [0], [1])])
    assert sealed.announced == (AnnouncedDatagrams(1, (1 << 32) - 1, 2),)
    numbers = [int(np.frombuffer(each, HEADER, 1)[0]["sequence"]) for each in signed(sealed)]
    assert numbers == [(1 << 32) - 1, 0]
    assert maker.seal(2, [dense_part(0, np.ones(16, np.float32), [0], [1])]).announced[0].first == 1


def test_batches_follow_the_rank_about():
    count = 400
    values = np.arange(count * ENTRIES, dtype=np.float32)
    rank = np.random.default_rng(1).permutation(count)
    sealed = sealer().seal(1, [dense_part(0, values, rank, np.ones(count))])
    place = {int(block): number for number, block in enumerate(rank)}
    sent = [place[int(np.frombuffer(each, HEADER, 1)[0]["block"])] for each in signed(sealed)]
    assert sorted(sent) == sorted(2 * list(range(count)))
    assert max(abs(position / 2 - number) for position, number in enumerate(sent)) <= 64


def test_nothing_to_seal():
    sealed = sealer().seal(1, [])
    assert (sealed.batches, sealed.announced, sealed.lost(b"")) == ((), (), [])


def test_a_session_does_not_print_its_key():
    assert "key" not in repr(SESSION)
