"""Fuzz targets: the content of one datagram, and steps assembled from datagrams."""

from __future__ import annotations

import contextlib
import functools

import numpy as np

from tests.fuzz.target import Reader, Target
from tests.ops.datagram_samples import (
    CHANNELS,
    ENTRIES,
    KEY,
    MTU,
    SESSION,
    SIZES,
    Packetizer,
    Rules,
    dense_part,
    make_step,
    ranged,
    signed,
    sparse_part,
)
from thinwire.ops.routing import datagram_format as form
from thinwire.ops.routing.base import AnnouncedDatagrams, Manifest, UnreliableBlocks, ValueEncoding
from thinwire.ops.routing.reassembler import Reassembler
from thinwire.ops.types import Block, CodedValues

_WORDS = form.HEADER_BYTES // 4
#: The step of the template datagrams; programs reach a few steps before and after this step.
_STEP = 5
#: Maximum number of operations in one program.
MOST_CALLS = 60


@functools.cache
def templates() -> tuple[bytes, ...]:
    """Return datagrams of every encoding, dense and sparse, that are right for the session."""
    values = np.linspace(-1, 1, SIZES[0], dtype=np.float32)
    parts: list[UnreliableBlocks] = []
    for encoding in ValueEncoding:
        data = values if encoding is ValueEncoding.FLOAT32 else np.arange(SIZES[0]) % 16
        coded = data.astype(form.VALUE_DTYPES[encoding])
        parts.append(dense_part(0, coded, [0, 1], [1, 2], encoding))
    indices = np.arange(0, 64, 4)
    data = np.ones(16, np.float32)
    parts.append(sparse_part(3, 64, indices, data, [0, 1, 2, 3], [1, 1, 2, 3]))
    sealer = Packetizer(SESSION, MTU, CHANNELS)
    found = [one for part in parts for one in signed(sealer.seal(_STEP, [part]))]
    return (*found, *signed(make_step(Packetizer(SESSION, MTU, CHANNELS), _STEP, SIZES).sealed))


def datagram(data: bytes) -> None:
    """Feed one buffer to a new session, with a new tag if the first byte requests one."""
    source = Reader(data)
    mends, count, size = source.number(), 1 + source.number() % 4, source.number(2)
    body = bytearray(source.rest())
    if mends & 1 and len(body) >= form.FRAME_BYTES:
        size = max(form.FRAME_BYTES, len(body) // count)
        _mend(body, size, mends)
    assembler = Reassembler(SESSION, SIZES, Rules())
    assembler.feed(memoryview(bytes(body)), size, 0.0)
    if size:
        _check_counters(assembler, -(-len(body) // size))


def _mend(body: bytearray, size: int, mends: int) -> None:
    """Correct header and tag, so that the input reaches the code behind these checks."""
    for start in range(0, len(body) - size + 1, size):
        header = np.frombuffer(body, form.HEADER, 1, start)
        header["magic"], header["version"] = form.MAGIC, form.VERSION
        header["session"], header["worker"] = SESSION.id, SESSION.worker
        if mends & 2:
            header["payload_bytes"], header["flags"] = size - form.FRAME_BYTES, 0
        if mends & 4:
            header["slot"] %= len(SIZES)
            header["entries"] = [SIZES[int(slot)] for slot in header["slot"]]
            header["num_blocks"] = -(-header["entries"] // ENTRIES)
            header["block"] = header["offset"] // ENTRIES
        form.sign(memoryview(body)[start : start + size], size, KEY)


def _check_counters(assembler: Reassembler, num_fed: int) -> None:
    """Every datagram is counted: as one that fits, or by the reason why it was dropped."""
    counters = assembler.counters
    early = ("short", "magic", "version", "session", "tag", "encoding", "channel", "bounds")
    unfit = sum(counters.dropped[reason] for reason in (*early, "block", "gaps", "not_finite"))
    assert unfit + sum(counters.num_datagrams) == num_fed, counters


def _datagram_seeds() -> list[bytes]:
    seeds = [b"\7\0\0\0" + one for one in templates()]
    first = templates()[0]
    pair = len(first).to_bytes(2, "little") + first + first[:-3]
    return [
        *seeds,
        b"\0\0" + pair,
        b"\1\1" + pair,
        b"\0\0" + (80).to_bytes(2, "little") + bytes(90),
    ]


# -- steps put together --------------------------------------------------------------------------

_RULES = (
    Rules(),
    Rules(dgt_wait_ms=1000.0),
    Rules(dgt_reception="drop", dgt_error_feedback=True, dgt_max_late=1),
    Rules(dgt_late_decay=0.5, dgt_max_late=2, dgt_wait_ms=5.0),
)


class _Steps:
    """An assembler and the operations of a program on the assembler."""

    def __init__(self, source: Reader) -> None:
        self.source = source
        self.assembler = Reassembler(SESSION, SIZES, source.choice(_RULES))
        self.now, self.num_fed = 0.0, 0

    def run(self) -> None:
        """Run the operations that the bytes encode."""
        verbs = (
            self._feed,
            self._feed,
            self._feed,
            self._mark,
            self._mark,
            self._end,
            self._close,
            self._wait,
            self._again,
        )
        for _ in range(MOST_CALLS):
            if not self.source:
                break
            self.source.choice(verbs)()
            deadline = self.assembler.next_deadline()
            assert deadline is None or np.isfinite(deadline)
        _check_counters(self.assembler, self.num_fed)

    def _step(self) -> int:
        return _STEP - 3 + self.source.number() % 8

    def _feed(self) -> None:
        source = self.source
        one = bytearray(source.choice(templates()))
        step, spoilt = self._step(), source.number()
        header = np.frombuffer(one, form.HEADER, 1)
        header["step"] = step
        if spoilt & 1:
            header["sequence"] = source.interesting() % 2**32
        if spoilt & 2:
            header["channel"] = 1 + source.number() % (CHANNELS + 1)
        if spoilt & 4:
            words = np.frombuffer(one, "<u4", _WORDS)
            words[source.number() % _WORDS] = source.interesting() % 2**32
        if spoilt & 8:
            header["worker"] = SESSION.worker
        form.sign(memoryview(one), len(one), KEY)
        if spoilt & 16:
            one[source.number() % len(one)] ^= 1 + source.number() % 255
        self.assembler.feed(memoryview(one), len(one), self.now)
        self.num_fed += 1

    def _mark(self) -> None:
        source, slot = self.source, self.source.number() % (len(SIZES) + 1)
        step, announced = self._step(), []
        for channel in range(1, 1 + source.number() % (CHANNELS + 2)):
            first = source.interesting() % 2**32
            announced.append(AnnouncedDatagrams(channel, first, source.interesting() % 200))
        manifest = Manifest(tuple(announced), 0.5, 8, source.number(), source.number(), 0)
        slots = range(len(SIZES)) if slot == len(SIZES) else (slot,)
        blocks = [self._block(each) for each in slots]
        with contextlib.suppress(ValueError):
            self.assembler.add_reliable(step, blocks, manifest, self.now)

    def _block(self, slot: int) -> Block:
        size, kind = SIZES[slot], self.source.number() % 4
        values = np.ones(size, np.float32)
        if kind == 0:
            return ranged(slot, values, np.arange(-(-size // ENTRIES)) % 2 == 0)
        if kind == 1:
            indices = np.arange(0, size, 3)
            return Block(slot, size, indices, CodedValues("float32", values[indices]))
        size += kind == 3 and self.source.number() % 2  # a slot of another model
        return Block(slot, size, None, CodedValues("float32", np.ones(size, np.float32)))

    def _end(self) -> None:
        with contextlib.suppress(ValueError):
            self.assembler.end_step(self._step(), self.now)

    def _close(self) -> None:
        while (assembled := self.assembler.close(self.now)) is not None:
            assert 0 <= assembled.fresh <= 1 and 0 <= assembled.fill <= 1
            for block in assembled.blocks:
                assert block.size == SIZES[block.slot]
                if block.indices is None:
                    assert block.values.data.size == block.size
                else:
                    assert (np.diff(block.indices) > 0).all()
                    assert block.indices[0] >= 0 and block.indices[-1] < block.size

    def _wait(self) -> None:
        self.now += self.source.number() / 100

    def _again(self) -> None:
        step = self._step()
        self.assembler.find_closed(step)
        if self.source.number() % 4 == 0:
            self.assembler.on_refused(step)


def assembler(data: bytes) -> None:
    """Datagrams, end markers and time in any order."""
    _Steps(Reader(data)).run()


def _assembler_seeds() -> list[bytes]:
    whole = b"".join(bytes([0, number, 3, 0]) for number in range(len(templates())))
    mark = bytes([3, len(SIZES), 3, 3, 0, 4, 0, 4, 0, 4, 0, 1, 2, 2, 2, 2])
    close = bytes([5, 3, 6])
    return [b"\0" + whole + mark + close, b"\2" + mark + whole + close, b"\1" + mark + close * 3]


TARGETS = {
    "datagram": Target("received buffers", datagram, _datagram_seeds, longest=1024),
    "assembler": Target("steps put together, any order", assembler, _assembler_seeds, longest=1024),
}
