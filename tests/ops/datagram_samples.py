"""Steps with some values in datagrams, built without the router."""

import dataclasses
import functools

import numpy as np

from thinwire.ops.routing.base import Manifest, UnreliableBlocks, ValueEncoding
from thinwire.ops.routing.datagram_format import DatagramSession
from thinwire.ops.routing.dgt_choices import DgtChoices
from thinwire.ops.routing.packetizer import Packetizer, SealedStep
from thinwire.ops.routing.reassembler import Reassembler
from thinwire.ops.types import Block, CodedValues, RangedBlock

KEY = bytes(range(32))
SESSION = DatagramSession(0x0123456789ABCDEF, KEY, 5)
ENTRIES = 16  # of a block
CHANNELS = 3
SIZES = [100, 16, 5, 64]  # of slots; blocks: 7 (the last short), 1, 1 (short), 4
MTU = 128  # fits 12 float32: a block is cut into 12 and 4
NOTHING = Manifest((), 0.0, 0, 0, 0, 0)


Rules = functools.partial(DgtChoices, dgt_channels=CHANNELS, dgt_block_size=4 * ENTRIES)


def num_blocks(size):
    return -(-size // ENTRIES)


def dense_part(
    slot, values, blocks, channels, encoding=ValueEncoding.FLOAT32, scales=None, lows=None
):
    count = num_blocks(len(values))
    return UnreliableBlocks(
        slot=slot,
        size=len(values),
        block_entries=ENTRIES,
        blocks=np.array(blocks, np.int64),
        channels=np.array(channels, np.uint8),
        encoding=encoding,
        indices=None,
        data=values,
        scales=np.ones(count, np.float32) if scales is None else scales,
        lows=np.zeros(count, np.float32) if lows is None else lows,
    )


def sparse_part(slot, size, indices, values, blocks, channels, **others):
    count = num_blocks(size)
    dense = dense_part(slot, np.zeros(size, np.float32), blocks, channels)
    usual = {"scales": np.ones(count, np.float32), "lows": np.zeros(count, np.float32)}
    return dataclasses.replace(dense, indices=indices, data=values, **{**usual, **others})


@dataclasses.dataclass
class SampleStep:
    """The blocks of one push and their paths: the first blocks of a slot go in datagrams."""

    values: list  # per slot [size] float32
    sealed: SealedStep
    blocks: list  # reliable ones
    manifest: Manifest
    step: int

    def deliver(self, assembler, chosen=None, now=0.0):
        """Feed datagrams one by one, all or those chosen, in the order given."""
        datagrams = signed(self.sealed)
        for number in range(len(datagrams)) if chosen is None else chosen:
            assembler.feed(datagrams[number], len(datagrams[number]), now)

    def finish(self, assembler, now=0.0):
        """Mark the step's end and close the step; return the closed step."""
        assembler.add_reliable(self.step, self.blocks, self.manifest, now)
        assembler.end_step(self.step, now)
        return assembler.close(now)

    def manifest_of(self, slot):
        """Return the end marker's content for one slot."""
        total = num_blocks(len(self.values[slot]))
        return Manifest(self.sealed.by_slot.get(slot, ()), 0.5, total, 0, 1, 0)


def signed(sealed):
    """Return the datagrams: channels ascending, then by sequence number."""
    datagrams = []
    for batch in sealed.batches:
        batch.sign(KEY)
        data, size = bytes(batch.data), batch.size
        datagrams += [data[start : start + size] for start in range(0, len(data), size)]
    return datagrams


def make_step(sealer, step, sizes, seed=0, reliable=1):
    """Return a step of dense slots: all blocks but the last `reliable` ones in datagrams."""
    rng = np.random.default_rng((seed, step))
    values = [rng.standard_normal(size).astype(np.float32) for size in sizes]
    parts, blocks = [], []
    for slot, each in enumerate(values):
        count = num_blocks(len(each))
        some = rng.permutation(max(0, count - reliable))
        if len(some):
            channels = np.sort(rng.integers(1, CHANNELS + 1, len(some)))
            parts.append(dense_part(slot, each, some, channels))
        blocks.append(ranged(slot, each, np.arange(count) >= len(some)))
    sealed = sealer.seal(step, parts)
    total = sum(num_blocks(size) for size in sizes)
    num_reliable = sum(int(block.present.sum()) for block in blocks)
    manifest = Manifest(sealed.announced, 0.0, total, 0, num_reliable, 0)
    return SampleStep(values, sealed, blocks, manifest, step)


def ranged(slot, values, present):
    """Return the block of those ranges of a dense slot that are present."""
    ranges = [values[start : start + ENTRIES] for start in range(0, len(values), ENTRIES)]
    kept = [each for each, here in zip(ranges, present, strict=True) if here]
    data = np.concatenate(kept) if kept else np.zeros(0, np.float32)
    coded = CodedValues("float32", data)
    return RangedBlock(slot, len(values), None, coded, ENTRIES, np.array(present, bool))


def sparse_block(slot, size, indices, values):
    return Block(slot, size, np.array(indices, np.int64), CodedValues("float32", values))


def new_pair(sizes, **rules):
    """Return both ends of a session."""
    return Packetizer(SESSION, MTU, CHANNELS), Reassembler(SESSION, sizes, Rules(**rules))


def dropped(assembler):
    """Return why something was dropped, and how often."""
    return {reason: count for reason, count in assembler.counters.dropped.items() if count}


def closed(assembler, step, now=0.0):
    assembler.end_step(step, now)
    return assembler.close(now)


def dense(assembled):
    return [block.values.data for block in assembled.blocks]


def assert_values(assembled, expected):
    assert [block.slot for block in assembled.blocks] == list(range(len(expected)))
    for block, values in zip(assembled.blocks, expected, strict=True):
        assert block.indices is None
        assert block.size == len(values)
        np.testing.assert_array_equal(block.values.data.view(np.uint32), values.view(np.uint32))


def with_zeros(step, arrived):
    """The reference result of a step if only some datagrams arrived."""
    expected = []
    for block in step.blocks:
        each = np.zeros(block.size, np.float32)
        present = np.repeat(block.present, ENTRIES)[: block.size]
        each[present] = step.values[block.slot][present]
        expected.append(each)
    for number in arrived:
        slot, offset, count, values = fields(signed(step.sealed)[number])
        expected[slot][offset : offset + count] = values
    return expected


def fields(datagram):
    """Slot, offset, count and float32 values of a dense datagram."""
    slot = int.from_bytes(datagram[20:24], "little")
    offset, count = (int.from_bytes(datagram[at : at + 4], "little") for at in (36, 40))
    return slot, offset, count, np.frombuffer(datagram[64:-16], "<f4")
