"""Invalid datagrams are dropped and counted, and change nothing else."""

from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.ops.datagram_samples import (
    CHANNELS,
    KEY,
    MTU,
    SESSION,
    Rules,
    dense_part,
    dropped,
    make_step,
    new_pair,
    signed,
    sparse_part,
)
from thinwire.ops.routing import datagram_format
from thinwire.ops.routing.base import SPARSE, ValueEncoding
from thinwire.ops.routing.counters import REASONS
from thinwire.ops.routing.datagram_format import HEADER, TAG_BYTES, DatagramSession
from thinwire.ops.routing.packetizer import Packetizer
from thinwire.ops.routing.reassembler import Reassembler

SIZES = [100, 40]
STRANGER = DatagramSession(SESSION.id ^ 1, bytes(32), SESSION.worker)


def tagged(datagram, key=KEY):
    """Return it with the tag that fits its bytes."""
    body = bytes(datagram[:-TAG_BYTES])
    return body + blake2b(body, digest_size=TAG_BYTES, key=key).digest()


def changed(datagram, **fields):
    """Return it with other header fields, and the tag that fits them."""
    changed_one = bytearray(datagram)
    header = np.frombuffer(changed_one, HEADER, 1)
    for name, value in fields.items():
        header[name] = value
    return tagged(changed_one)


def with_values(datagram, first, dtype="<f4"):
    changed_one = bytearray(datagram)
    np.frombuffer(changed_one, dtype, 1, 64)[:] = first
    return tagged(changed_one)


def dense_datagram():
    """Return 12 values from the start of block 2 of slot 0, on channel 1."""
    part = dense_part(0, np.arange(100, dtype=np.float32), [2], [1])
    return signed(Packetizer(SESSION, MTU, CHANNELS).seal(1, [part]))[0]


def sparse_datagram():
    """Return positions 3, 4 and 39 of slot 1."""
    values = np.ones(3, np.float32)
    part = sparse_part(1, 40, np.array([3, 4, 39]), values, [0, 2], [1, 1])
    return signed(Packetizer(SESSION, MTU, CHANNELS).seal(1, [part]))[0]


DENSE, SPARSE_ONE = dense_datagram(), sparse_datagram()


@pytest.mark.parametrize(
    ("datagram", "reason"),
    [
        (b"", None),
        (b"x", "short"),
        (DENSE[:79], "short"),
        (changed(DENSE, magic=7), "magic"),
        (changed(DENSE, version=2), "version"),
        (changed(DENSE, session=1), "session"),
        (changed(DENSE, session=SESSION.id ^ (1 << 63)), "session"),
        (changed(DENSE, worker=6), "session"),
        (DENSE[:-1], "tag"),
        (DENSE + b"x", "tag"),
        (DENSE[:80], "tag"),
        (tagged(DENSE, bytes(32)), "tag"),
        (DENSE[:-1] + bytes([DENSE[-1] ^ 1]), "tag"),
        (DENSE[:70] + bytes([DENSE[70] ^ 128]) + DENSE[71:], "tag"),
        (changed(DENSE, encoding=7), "encoding"),
        (changed(DENSE, encoding=0x20), "encoding"),
        (changed(DENSE, flags=1), "encoding"),
        (changed(DENSE, channel=0), "channel"),
        (changed(DENSE, channel=CHANNELS + 1), "channel"),
        (changed(DENSE, payload_bytes=47), "bounds"),
        (changed(DENSE, count=0), "bounds"),
        (changed(DENSE, count=11), "bounds"),
        (changed(DENSE, count=0xFFFFFFFF), "bounds"),
        (changed(DENSE, encoding=int(ValueEncoding.UINT8)), "bounds"),
        (changed(DENSE, encoding=SPARSE), "bounds"),
        (changed(DENSE, slot=2), "bounds"),
        (changed(DENSE, slot=0xFFFFFFFF), "bounds"),
        (changed(DENSE, slot=1), "bounds"),
        (changed(DENSE, entries=101), "bounds"),
        (changed(DENSE, offset=96, block=6), "bounds"),
        (changed(DENSE, offset=0xFFFFFFFF), "bounds"),
        (changed(DENSE, block=1), "block"),
        (changed(DENSE, num_blocks=8), "block"),
        (changed(DENSE, offset=37), "block"),  # runs into block 3
        (with_values(DENSE, np.nan), "not_finite"),
        (with_values(DENSE, -np.inf), "not_finite"),
        (changed(DENSE, scale=np.nan), "not_finite"),
        (changed(DENSE, scale=3e38), "not_finite"),
        (with_values(SPARSE_ONE, 1, "<u2"), "gaps"),
        (changed(SPARSE_ONE, offset=4), "gaps"),  # the last is outside now
        (tagged(SPARSE_ONE[:66] + bytes(2) + SPARSE_ONE[68:]), "gaps"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_wrong_is_dropped_under_its_name(datagram, reason):
    assembler = Reassembler(SESSION, SIZES, Rules())
    assembler.feed(datagram, len(datagram), 0.0)
    assert dropped(assembler) == ({reason: 1} if reason else {})
    assert sum(assembler.counters.num_datagrams) == 0


@pytest.mark.parametrize("datagram", [DENSE, SPARSE_ONE], ids=["dense", "sparse"])
def test_what_is_right_is_not_dropped(datagram):
    assembler = Reassembler(SESSION, SIZES, Rules())
    assembler.feed(datagram, len(datagram), 0.0)
    assembler.feed(changed(datagram, sequence=9, scale=2.0), len(datagram), 0.0)
    assert not dropped(assembler)
    assert assembler.counters.num_datagrams[1] == 2


def test_the_good_ones_in_a_bad_buffer_are_taken():
    good = [changed(DENSE, sequence=number) for number in range(3)]
    bad = [changed(DENSE, magic=7), changed(DENSE, session=3), tagged(DENSE, bytes(32))]
    more = [changed(DENSE, slot=9), changed(DENSE, num_blocks=1), with_values(DENSE, np.nan)]
    mixed = [bad[0], good[0], bad[1], bad[2], good[1], *more, good[2], good[1]]
    assembler = Reassembler(SESSION, SIZES, Rules())
    assembler.feed(b"".join(mixed), len(DENSE), 0.0)
    assert dropped(assembler) == dict.fromkeys(
        ["magic", "session", "tag", "bounds", "block", "not_finite", "duplicate"], 1
    )
    assert assembler.counters.num_datagrams[1] == 4


def test_strangers_cost_no_hash(monkeypatch):
    asked = []
    monkeypatch.setattr(
        datagram_format, "authentic", lambda *given: asked.append(given) or np.zeros(0, bool)
    )
    assembler = Reassembler(STRANGER, SIZES, Rules())
    assembler.feed(20 * DENSE, len(DENSE), 0.0)
    assert dropped(assembler) == {"session": 20}
    assert not asked


@given(st.binary(max_size=400), st.integers(-3, 500))
@example(bytes(200), 0)
@example(DENSE + DENSE, 1)
@settings(max_examples=200, deadline=None)
def test_no_bytes_raise(data, size):
    assembler = Reassembler(SESSION, SIZES, Rules())
    assembler.feed(data, size, 0.0)
    assert sum(assembler.counters.num_datagrams) == 0


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_no_signed_header_raises(data):
    datagram = data.draw(st.sampled_from([DENSE, SPARSE_ONE]))
    fields = {}
    for name in data.draw(st.sets(st.sampled_from(HEADER.names[1:]), min_size=1, max_size=3)):
        dtype = HEADER[name]
        highest = 256**dtype.itemsize - 1
        value = data.draw(st.sampled_from([0, 1, 2, 12, 16, 36, highest]) | st.integers(0, highest))
        fields[name] = np.array(value, f"u{dtype.itemsize}").view(dtype)
    assembler = Reassembler(SESSION, SIZES, Rules())
    with np.errstate(all="raise"):
        for each in (datagram, changed(datagram, **fields), datagram):
            assembler.feed(each, len(each), 0.0)
    before_use = list(REASONS)[: list(REASONS).index("too_new")]
    num_refused = sum(assembler.counters.dropped[reason] for reason in before_use)
    assert num_refused + sum(assembler.counters.num_datagrams) == 3


def spoiled(rng, sample, others, count):
    """Return buffers of equal-sized datagrams: `count` of every kind, none of them right."""
    matrix = np.frombuffer(sample, np.uint8)
    rows = np.tile(matrix, (count, 1))
    noise = rng.integers(0, 256, rows.shape).astype(np.uint8)
    headed = noise.copy()
    headed[:, :64] = rows[:, :64]
    flipped = rows.copy()
    flipped[np.arange(count), rng.integers(0, matrix.size, count)] ^= (
        1 << rng.integers(0, 8, count)
    ).astype(np.uint8)
    cut = int(rng.integers(1, matrix.size))
    yield noise, matrix.size
    yield headed, matrix.size
    yield flipped, matrix.size
    yield np.ascontiguousarray(rows[:, :cut]), cut
    for other in others:
        yield np.tile(np.frombuffer(other, np.uint8), (count, 1)), len(other)


def test_a_hundred_thousand_bad_datagrams_change_nothing():
    rng = np.random.default_rng(11)
    foreign = make_step(Packetizer(STRANGER, MTU, CHANNELS), 3, SIZES)
    stranger = datagram_format.sign
    others = []
    for batch in foreign.sealed.batches[:1]:
        stranger(batch.data, batch.size, STRANGER.key)
        others.append(bytes(batch.data[: batch.size]))
    sealer, assembler = new_pair(SIZES, dgt_wait_ms=1000, dgt_max_late=1)
    steps = [make_step(sealer, number, SIZES) for number in (1, 2, 3)]
    for step in steps[:2]:
        step.deliver(assembler)
        step.finish(assembler)
    target = steps[2]
    target.finish(assembler)
    datagrams = signed(target.sealed)
    replays = [signed(steps[0].sealed)[0], signed(steps[1].sealed)[0]]
    num_fed = 0
    for number, datagram in enumerate(datagrams):
        assembler.feed(datagram, len(datagram), 0.0)
        if number == len(datagrams) - 1:
            break
        while num_fed < 100_000 * (number + 1) / (len(datagrams) - 1):
            for buffer, size in spoiled(rng, datagram, [*others, *replays, datagram], 200):
                assembler.feed(buffer.reshape(-1).data, size, 0.0)
                num_fed += len(buffer)
    assert num_fed >= 100_000
    assert sum(assembler.counters.dropped.values()) == num_fed
    assert {"short", "magic", "version", "session", "tag", "too_old", "duplicate"} == set(
        dropped(assembler)
    )
    assembled = assembler.close(0.0)
    assert assembled.arrived == assembled.announced == len(datagrams)
    np.testing.assert_array_equal(assembled.flat, np.concatenate(target.values))


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        (lambda: Packetizer(SESSION, 127, 3), "127 bytes; expected 128 to 65507"),
        (lambda: Packetizer(SESSION, 65_508, 3), "65508 bytes"),
        (lambda: Packetizer(SESSION, MTU, 0), "0 datagram channels; expected 1 to 7"),
        (lambda: Packetizer(SESSION, MTU, 8), "8 datagram channels"),
        (lambda: DatagramSession(1, bytes(31), 0), "31 bytes; expected 32"),
        (lambda: DatagramSession(-1, KEY, 0), "unsigned"),
        (lambda: DatagramSession(1, KEY, 1 << 32), "64 and 32 bits"),
        (
            lambda: Packetizer(SESSION, MTU, CHANNELS).seal(1, []).lost(b"x"),
            "0 datagrams has 1 bytes; expected 0",
        ),
    ],
)
def test_what_cannot_be_sealed_is_refused(call, complaint):
    with pytest.raises(ValueError, match=complaint):
        call()
