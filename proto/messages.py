"""Converts between the types of `thinwire.ops` and the messages of the wire protocol.

For model signatures, fingerprints of settings, blocks, auxiliary values and manifests of datagrams,
the module `messages` has a function for each direction of the conversion. The functions that
convert received messages check lengths, ranges, order and enum values before they allocate memory.
The conversion of an invalid message raises Malformed and no other exception.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from thinwire.ops.downlink.types import RelayedRounds, RepeatedRound
from thinwire.ops.routing.base import AnnouncedDatagrams, Manifest
from thinwire.ops.routing.reassembler import ReassembledStep
from thinwire.ops.types import FEW_BITS, VALUE_BYTES, VALUE_DTYPES, Block, ModelSpec
from thinwire.ops.wire.blocks import IndexChooser, IndexCoding, ValueCoding, WireBlock, decode_block
from thinwire.ops.wire.index_codings import WireError
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import BytesLike, Malformed

if TYPE_CHECKING:
    from thinwire.ops.types import Float32

#: Version of the wire protocol, which a client's Hello contains.
PROTOCOL_VERSION = 2

_DTYPE_NUMBERS = {
    name: pb.ValueDtype.Value(f"VALUE_DTYPE_{name.upper()}") for name in (*VALUE_DTYPES, *FEW_BITS)
}
_DTYPE_NAMES = {number: name for name, number in _DTYPE_NUMBERS.items()}
_CODINGS = {int(coding): coding for coding in IndexCoding}
_MOST_CHANNELS = 7


def tensors_of(spec: ModelSpec) -> list[pb.Tensor]:
    """Return a model's signature for a Hello message: path, shape and dtype of each variable."""
    return [
        pb.Tensor(path=tensor.path, shape=tensor.shape, dtype=tensor.dtype)
        for tensor in spec.tensors
    ]


def settings_of(fingerprint: Iterable[tuple[str, str]]) -> list[pb.Setting]:
    """Return the training method's settings (names and values), by which a Hello is compared.

    Args:
        fingerprint: Pairs of a setting's name and its value as canonical text.
    """
    return [pb.Setting(name=name, value=value) for name, value in fingerprint]


def first_difference(
    expected: Sequence[pb.Tensor | pb.Setting], got: Sequence[pb.Tensor | pb.Setting]
) -> str | None:
    """Return the first difference between two model signatures or two fingerprints of settings.

    Returns:
        A text with the field's name and both values, or None if the arguments are equal.
    """
    for number, (ours, theirs) in enumerate(zip(expected, got, strict=False)):
        pairs = zip(_fields(ours, number), _fields(theirs, number), strict=True)
        for (name, expected_value), (_, value) in pairs:
            if expected_value != value:
                return f"{name}: expected {expected_value!r}, got {value!r}"
    if len(expected) == len(got):
        return None
    longer, side = (expected, "missing") if len(expected) > len(got) else (got, "not expected")
    extra = longer[min(len(expected), len(got))]
    name = f"variable {extra.path!r}" if isinstance(extra, pb.Tensor) else extra.name
    return f"{name} is {side}: expected {len(expected)} entries, got {len(got)}"


def _fields(entry: pb.Tensor | pb.Setting, number: int) -> list[tuple[str, Any]]:
    """Return pairs of a name and a value that `first_difference` compares."""
    if isinstance(entry, pb.Setting):
        return [(f"name of setting {number}", entry.name), (entry.name, entry.value)]
    return [
        (f"path of variable {number}", entry.path),
        (f"shape of {entry.path}", tuple(entry.shape)),
        (f"dtype of {entry.path}", entry.dtype),
    ]


class _RepeatedBlocks(Protocol):
    """The repeated Block field of a Push or a Reply message."""

    def add(self, **fields: Any) -> pb.Block:
        """Append the description of one block (coded variable slice) to the message."""


def blocks_to_message(
    blocks: Iterable[WireBlock], repeated_field: _RepeatedBlocks
) -> list[BytesLike]:
    """Append the descriptions of coded blocks (slices of variables) to a message.

    Returns:
        The pieces of the payload for `frames`: for each block the index bytes, then the values.
    """
    pieces: list[BytesLike] = []
    for block in blocks:
        repeated_field.add(
            slot=block.slot,
            count=block.count,
            coding=int(block.coding),
            coding_parameter=block.coding_parameter,
            index_bytes=len(block.index_bytes),
            value_dtype=_DTYPE_NUMBERS[block.value_dtype],
            scale=0.0 if block.chunk and block.scale == 1 else block.scale,
            value_coding=int(block.value_coding),
            value_bytes=len(block.value_bytes) if block.value_coding else 0,
            chunk=block.chunk,
            chunk_first=block.chunk_first,
            slots=block.slots if block.slots > 1 else 0,
        )
        pieces += (block.index_bytes, block.value_bytes)
    return pieces


def dense_to_message(sizes: Sequence[int], repeated_field: _RepeatedBlocks) -> None:
    """Append the descriptions of dense float32 slots (variable slices) to a message.

    Args:
        sizes: Number of entries of each slot (variable slice).
        repeated_field: Repeated Block field of the message, to which the descriptions are appended.
    """
    for slot, size in enumerate(sizes):
        block = WireBlock(slot, size, IndexCoding.DENSE, 0, b"", "float32", 1.0, b"")
        blocks_to_message([block], repeated_field)


def blocks_from_message(
    blocks: Sequence[pb.Block], payload: memoryview, sizes: Sequence[int], ranges: bool = False
) -> list[Block]:
    """Decode the blocks (coded slices of variables) of a push or a reply.

    Args:
        blocks: Descriptions of the blocks, in the order of the payload.
        payload: Index bytes and value bytes of all blocks (coded variable slices), in the order of
            the blocks.
        sizes: Number of entries of each slot (variable slice) of the shard.
        ranges: True if a block may hold only some ranges of a variable slice, because datagrams
            carry the other ranges.

    Returns:
        One block for each description; dense values may be views of ``payload``.

    Raises:
        Malformed: The slots (variable slices) of the blocks do not ascend or are out of range, the
            lengths of the blocks do not add up to the payload, or a block's bytes cannot be
            decoded.
    """
    free = position = 0
    result = []
    for block in blocks:
        end_slot = spanned(block).stop
        if not free <= block.slot < end_slot <= len(sizes):
            raise Malformed(
                f"a message has a block of tensor slots {block.slot} to {end_slot - 1} after slot "
                f"{free - 1}; expected ascending slots below {len(sizes)}"
            )
        size = sum(sizes[block.slot : end_slot])
        free = end_slot
        _check(block, size)
        if block.coding == pb.INDEX_CODING_RANGES and not ranges:
            raise Malformed(
                f"tensor slot {block.slot}: ranges of a dense block are legal only with datagrams"
            )
        if block.slots > 1 and ranges:
            raise Malformed(
                f"the block of slot {block.slot} spans {block.slots} slots, illegal with datagrams"
            )
        end = position + _num_bytes(block)
        if end > len(payload):
            raise Malformed(
                f"slot {block.slot}: the block ends at byte {end} of {len(payload)} payload bytes"
            )
        try:
            result.append(decode_block(**vars(_coded(block, payload[position:end])), size=size))
        except WireError as error:
            raise Malformed(f"slot {block.slot}: {error}") from error
        position = end
    if position != len(payload):
        raise Malformed(f"the blocks use {position} of {len(payload)} bytes of a message's payload")
    return result


def spanned(block: pb.Block) -> range:
    """Return the slots (indices of variable slices) in a block's description, without a range
    check.
    """
    return range(block.slot, block.slot + max(1, block.slots))


def coded_blocks(blocks: Sequence[pb.Block], payload: memoryview) -> tuple[WireBlock, ...]:
    """Return received blocks in coded form, so that a relay can send them unchanged.

    Args:
        blocks: Descriptions of blocks that `blocks_from_message` has accepted.
        payload: Index bytes and value bytes of all blocks (coded variable slices), in the order of
            the blocks.
    """
    result, position = [], 0
    for block in blocks:
        end = position + _num_bytes(block)
        result.append(_coded(block, payload[position:end]))
        position = end
    return tuple(result)


def _coded(block: pb.Block, data: memoryview) -> WireBlock:
    """Return a block in coded form, from its description and its bytes in a payload."""
    return WireBlock(
        slot=block.slot,
        count=block.count,
        coding=_CODINGS[block.coding],
        coding_parameter=block.coding_parameter,
        index_bytes=data[: block.index_bytes],
        value_dtype=_DTYPE_NAMES[block.value_dtype],
        scale=block.scale,
        value_bytes=data[block.index_bytes :],
        value_coding=cast("ValueCoding", block.value_coding),  # `decode_block` checks the number
        chunk=block.chunk,
        chunk_first=block.chunk_first,
        slots=len(spanned(block)),
    )


def rounds_to_message(
    rounds: RelayedRounds, reply: pb.Reply, chooser: IndexChooser
) -> list[BytesLike]:
    """Append relayed rounds (workers' updates of finished rounds) to a reply; code uncoded blocks.

    Args:
        rounds: Finished rounds for one worker. The worker's own updates are sent without blocks,
            because the worker has their values.
        reply: Reply message to the worker, to which the rounds are appended.
        chooser: Object that chooses the coding of each block's indices and encodes the block.

    Returns:
        The pieces of the reply's payload, in order.
    """
    pieces: list[BytesLike] = []
    for relayed in rounds.rounds:
        described = reply.rounds.add(rate=relayed.rate)
        for place, update in enumerate(relayed.updates, start=1):
            is_own = rounds.is_own(update)
            blocks = () if is_own else update.blocks
            pieces += blocks_to_message(map(chooser.encode, blocks), reply.blocks)
            described.num_blocks.append(len(blocks))
            described.own = place if is_own else described.own
    return pieces


def rounds_from_message(
    reply: pb.Reply, payload: memoryview, sizes: Sequence[int]
) -> tuple[RepeatedRound, ...]:
    """Decode a reply's relayed rounds: the workers' updates of each finished round.

    Args:
        reply: Reply with the descriptions of the rounds and of their updates' blocks.
        payload: Index bytes and value bytes of all blocks (coded variable slices), in the order of
            the blocks.
        sizes: Number of entries of each slot (variable slice) of the shard.

    Raises:
        Malformed: The reply has no round or a round without an update, the worker's own update
            appears twice or in a reply to a pull, the counts differ from the number of blocks, or a
            block is invalid.
    """
    counts = [list(relayed.num_blocks) for relayed in reply.rounds]
    total = sum(map(sum, counts))
    if not counts or not all(counts) or total != len(reply.blocks):
        raise Malformed(
            f"the {len(counts)} rounds of a reply announce {total} blocks, but it has "
            f"{len(reply.blocks)}; expected equal numbers and at least one update in each round"
        )
    # A worker adds its own update from its own copy of the last push. An own update in a reply to
    # a pull, or a second own update, would add that push to the weights twice.
    if sum(relayed.own > 0 for relayed in reply.rounds) > (reply.step > 0):
        raise Malformed(f"the reply for step {reply.step} has too many own updates of the worker")
    result, first, start = [], 0, 0
    for described, numbers in zip(reply.rounds, counts, strict=True):
        if not math.isfinite(described.rate):
            raise Malformed(f"a round has learning rate {described.rate}; expected a finite number")
        if described.own > len(numbers) or (described.own and numbers[described.own - 1]):
            raise Malformed(
                f"a reply names own update {described.own} of a round with the block counts "
                f"{numbers}; expected the number of an update without blocks"
            )
        updates: list[tuple[Block, ...] | None] = []
        for count in numbers:
            blocks = reply.blocks[first : first + count]
            stop = start + sum(map(_num_bytes, blocks))
            updates.append(tuple(blocks_from_message(blocks, payload[start:stop], sizes)))
            first, start = first + count, stop
        if described.own:
            updates[described.own - 1] = None
        result.append(RepeatedRound(tuple(updates), described.rate))
    if start != len(payload):
        raise Malformed(f"the rounds of a reply use {start} of {len(payload)} bytes of its payload")
    return tuple(result)


def _num_bytes(block: pb.Block) -> int:
    """Return the size in bytes of a block in a payload; values of an unknown dtype count as 0."""
    if block.value_coding:
        return block.index_bytes + block.value_bytes
    width = VALUE_BYTES.get(_DTYPE_NAMES.get(block.value_dtype, ""), 0)
    return block.index_bytes + block.count * width


def carve_aux(
    payload: memoryview, count: int, expected: Iterable[int]
) -> tuple[memoryview, Float32 | None]:
    """Split the auxiliary values (`aux`, averaged over workers) from the end of a payload.

    Args:
        payload: Payload of a push or a reply.
        count: Number of auxiliary values: ``aux_count`` of the message.
        expected: Numbers of auxiliary values that the receiver allows.

    Returns:
        (payload of the blocks, auxiliary values). The values are a copy, [count] float32, or None
        if `count` is 0.

    Raises:
        Malformed: The number of auxiliary values is not legal, or the payload has fewer bytes than
            these values.
    """
    if count not in expected:
        legal = " or ".join(str(number) for number in sorted(expected))
        raise Malformed(f"a message has {count} auxiliary values; expected {legal}")
    start = len(payload) - 4 * count
    if start < 0:
        raise Malformed(f"{count} auxiliary values exceed a payload of {len(payload)} bytes")
    if count == 0:
        return payload, None
    return payload[:start], np.frombuffer(bytes(payload[start:]), "<f4").astype(np.float32)


def _check(block: pb.Block, size: int) -> None:
    """Check a block's description against the size of its variables."""
    name = _DTYPE_NAMES.get(block.value_dtype)
    if name is None or block.coding not in _CODINGS:
        raise Malformed(
            f"block of slot {block.slot}: unknown dtype {block.value_dtype}, coding {block.coding}"
        )
    dense = _CODINGS[block.coding] == IndexCoding.DENSE
    if block.count > size or (dense and (block.count != size or block.index_bytes)):
        raise Malformed(
            f"tensor slot {block.slot}: a block of {block.count} values and {block.index_bytes} "
            f"index bytes does not match {size} entries, coding {_CODINGS[block.coding].name}"
        )
    if not block.value_coding and (block.value_bytes or name in FEW_BITS):
        raise Malformed(
            f"the block of tensor slot {block.slot} is malformed: value_bytes is "
            f"{block.value_bytes} for plain {name} values; expected 0, and a dtype of whole bytes"
        )
    if not math.isfinite(block.scale):
        raise Malformed(f"tensor slot {block.slot}: scale {block.scale}; expected a finite number")


def manifest_to_message(manifest: Manifest) -> pb.Manifest:
    """Return a manifest (list of a step's datagrams) as the message that a Push contains."""
    return pb.Manifest(
        channels=[
            pb.Announced(channel=channel.channel, first=channel.first, count=channel.count)
            for channel in manifest.channels
        ],
        k=manifest.k,
        num_blocks=manifest.num_blocks,
        num_skipped=manifest.num_skipped,
        num_reliable=manifest.num_reliable,
        num_dropped=manifest.num_dropped,
    )


def manifest_from_message(message: pb.Manifest) -> Manifest:
    """Check and return a Push's manifest (the list of the step's datagrams).

    Raises:
        Malformed: The UDP channels of the manifest do not ascend within 1..7, or k (the fraction of
            blocks that gRPC carries) is not in 0..1.
    """
    previous = 0
    for announced in message.channels:
        if not previous < announced.channel <= _MOST_CHANNELS:
            raise Malformed(
                f"a manifest has datagrams of channel {announced.channel} announced after channel "
                f"{previous}; expected ascending channels from 1 to 7"
            )
        previous = announced.channel
    if not 0 <= message.k <= 1:  # NaN is rejected too, because NaN fails every comparison.
        raise Malformed(f"k = {message.k} in a manifest of datagrams; expected a fraction, 0 to 1")
    return Manifest(
        tuple(
            AnnouncedDatagrams(channel.channel, channel.first, channel.count)
            for channel in message.channels
        ),
        message.k,
        message.num_blocks,
        message.num_skipped,
        message.num_reliable,
        message.num_dropped,
    )


def outcome_to_message(assembled: ReassembledStep, came_late: int) -> pb.DatagramOutcome:
    """Return the outcome of one step's datagrams as the message that a Reply contains.

    Args:
        assembled: Counts of received and missing datagrams and blocks of the step.
        came_late: Number of datagrams of earlier steps that have arrived since the worker's last
            push.
    """
    return pb.DatagramOutcome(
        announced=assembled.announced,
        arrived=assembled.arrived,
        late=assembled.num_late,
        came_late=came_late,
        fresh=assembled.fresh,
        filled=assembled.fill,
        bitmap=assembled.bitmap or b"",
    )
