"""Coding of tensor blocks as bytes: positions near their entropy, values plain or deflated.

A block holds entries of one slot (tensor or variable slice). An `IndexChooser` encodes blocks and
remembers the smallest coding of each slot (tensor or variable slice). The decoding of blocks is
stateless and trusts no input: it checks lengths, ranges and order before it allocates memory, and
raises `WireError` for invalid bytes. A block with only some ranges of its slot (tensor or variable
slice) is coded as a uint32 (entries per range), then one bit per range, then the values of the
present ranges.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import struct

import numpy as np

from thinwire.ops.types import (
    FEW_BITS,
    VALUE_DTYPES,
    Array,
    Block,
    ChunkedValues,
    CodedValues,
    Int64,
    LowRankBlock,
    RangedBlock,
)
from thinwire.ops.wire import few_bits_coding, index_codings, value_codings
from thinwire.ops.wire.index_codings import WireError
from thinwire.ops.wire.low_rank import expanded
from thinwire.ops.wire.value_codings import ValueCoding

#: Header of a low-rank block: column of the block's first entry, number of columns, scale of the
#: right factor.
_FACTORS = struct.Struct("<IIf")
_HEADER = struct.Struct("<I")  # start of a ranged block's header: the number of entries per range


def num_ranges(size: int, block_entries: int) -> int:
    """Return the number of ranges of `block_entries` entries in a slice of `size` entries."""
    return -(-size // block_entries)


def lengths(size: int, block_entries: int) -> Int64:
    """Return the number of entries in each of n ranges of a slice, [n] int64."""
    result = np.full(num_ranges(size, block_entries), block_entries)
    if result.size:
        result[-1] = size - (result.size - 1) * block_entries
    return result


def described(block: RangedBlock) -> bytes:
    """Return the header of a ranged block: entries per range, and a bitmap of present ranges."""
    return (
        _HEADER.pack(block.block_entries) + np.packbits(block.present, bitorder="little").tobytes()
    )


def decode(slot: int, values: CodedValues, head: memoryview, size: int) -> RangedBlock:
    """Check and decode one ranged block (a block with only some ranges of a variable slice).

    Args:
        slot: Number of the block's slot (tensor or variable slice).
        values: [k] coded values of the present ranges, in order.
        head: Received header of the ranged block, as `described` returns it.
        size: Number of entries in the block's slot (tensor or variable slice).

    Raises:
        WireError: The lengths of the header, the values and the slot (tensor or variable slice) do
            not match.
    """
    if len(head) < _HEADER.size:
        raise WireError(
            f"header of a block's ranges has {len(head)} bytes, not {_HEADER.size} and a bitmap"
        )
    (block_entries,) = _HEADER.unpack(head[: _HEADER.size])
    if not block_entries:
        raise WireError("a block has ranges of no entries; expected at least 1 entry per range")
    count = num_ranges(size, block_entries)
    bits = np.frombuffer(head, np.uint8, offset=_HEADER.size)
    if bits.size != -(-count // 8):
        raise WireError(f"a block's bitmap of {bits.size} bytes does not fit its {count} ranges")
    flags = np.unpackbits(bits, bitorder="little").view(bool)
    if flags[count:].any():
        raise WireError(f"a block's bitmap of {count} ranges has bits set beyond the last range")
    present = flags[:count]
    expected = int(lengths(size, block_entries)[present].sum())
    if values.data.size != expected:
        raise WireError(
            f"block has {values.data.size} values in ranges of {expected} entries; expected as many"
        )
    return RangedBlock(slot, size, None, values, block_entries, present)


__all__ = [
    "IndexChooser",
    "IndexCoding",
    "ValueCoding",
    "WireBlock",
    "WireError",
    "decode_block",
]

_NUMPY_DTYPES = {"float32": "<f4", "bfloat16": "<u2", "float16": "<f2", "int8": "|i1"}
_OF_FEW_BITS = frozenset({ValueCoding.CODES, ValueCoding.DEFLATED_CODES})
_UINT32_RANGE = 1 << 32
#: Smallest saving for which deflate searches for repeated gaps between positions, as a fraction of
#: the block's bytes: deflating with the search takes five times as long as without it.
_WORTH_A_SEARCH = 0.02


class IndexCoding(enum.IntEnum):
    """How the positions of a block's values are coded; messages contain the enum's numbers."""

    DENSE = 0  # a DENSE block sends no positions, because it has all entries of the tensor or slice
    # a BITMAP has one bit per entry of the tensor or slice, 1 at the positions of values
    BITMAP = 1
    RICE = 2  # RICE is the Golomb-Rice code of the gaps between positions
    DEFLATED_GAPS = 3  # DEFLATED_GAPS sends one deflated byte per gap between positions
    UINT32 = 4  # UINT32 sends four bytes per position
    LOW_RANK = 6  # a LOW_RANK block sends no positions, but a header of two matrix factors
    RANGES = 7  # RANGES sends a bitmap of the ranges that the block has


_CODINGS = frozenset(int(coding) for coding in IndexCoding)
#: Codings of sparse blocks, whose index bytes are the positions of the values.
_OF_POSITIONS = _CODINGS - {IndexCoding.DENSE, IndexCoding.LOW_RANK, IndexCoding.RANGES}
#: Position codings of blocks that may span several slots (tensors or variable slices).
_OF_SEVERAL = _OF_POSITIONS | {IndexCoding.DENSE}


@dataclasses.dataclass(frozen=True)
class WireBlock:
    """One block of a tensor, coded as bytes for a message."""

    slot: int  # number of the block's first slot (tensor or variable slice)
    count: int  # number of values in the block
    coding: IndexCoding
    # coding parameter: number of low bits for RICE, rank for LOW_RANK, 0 for other codings
    coding_parameter: int
    index_bytes: bytes | memoryview
    value_dtype: str
    scale: float
    # coded values; plain values are a view of the block's array, unless LOW_RANK
    value_bytes: bytes | memoryview
    value_coding: ValueCoding = ValueCoding.PLAIN
    chunk: int = 0  # number of entries per chunk of few-bit values; 0 for other dtypes
    chunk_first: int = 0  # position of the block's first entry in that entry's chunk
    # number of consecutive slots (tensors or variable slices) that the block spans, from `slot` on
    slots: int = 1

    @property
    def num_bytes(self) -> int:
        """Number of bytes of the block's positions and values in a message."""
        return len(self.index_bytes) + len(self.value_bytes)


class IndexChooser:
    """Encodes each variable slice's blocks with their smallest coding; regularly tries all codings.

    Attributes:
        interval: Number of blocks of one slot (tensor or variable slice) from one trial of all
            codings to the next trial.
        state: Plain ints for each slot (tensor or variable slice), or for the slots that a block
            spans: ``"<slot>.coding"`` (an IndexCoding), ``"<slot>.searches"`` (1: deflate searches
            for repeated gaps), ``"<slot>.values"`` (a ValueCoding) and ``"<slot>.blocks"`` (number
            of blocks since the last trial). A chooser that gets this state from a checkpoint
            produces the same bytes.
    """

    def __init__(self, interval: int = 50, state: dict[str, int] | None = None) -> None:
        """Start with an empty state, or with a copy of the state of an earlier IndexChooser."""
        self.interval = interval
        self.state = dict(state or {})

    def encode(self, block: Block | WireBlock) -> WireBlock:
        """Return the block coded as bytes, without a copy of dense values.

        `encode` returns a `WireBlock`, which is coded already, unchanged.
        """
        if isinstance(block, WireBlock):
            return block
        if isinstance(block, LowRankBlock):
            return _factors_as_bytes(block)
        values = block.values
        data = np.ascontiguousarray(values.data)
        coding, parameter, index_bytes = self._code(block)
        chunk = first = 0
        value_bytes: bytes | memoryview
        if isinstance(values, ChunkedValues):
            chunk, first = values.chunk, values.first
            value_coding, value_bytes = few_bits_coding.encode_codes(values)
        else:
            value_coding, value_bytes = self._code_values(_name(block), coding, data)
        return WireBlock(
            slot=block.slot,
            count=data.size,
            coding=coding,
            coding_parameter=parameter,
            index_bytes=index_bytes,
            value_dtype=values.dtype,
            scale=values.scale,
            value_bytes=value_bytes,
            value_coding=value_coding,
            chunk=chunk,
            chunk_first=first,
            slots=block.slots,
        )

    def _code_values(
        self, name: str, coding: IndexCoding, data: Array
    ) -> tuple[ValueCoding, bytes | memoryview]:
        """Return the coding of a block's values, and the values coded as bytes.

        Call `_code` for the block before `_code_values`: it counts the block, and at a count of 1
        all codings are tried.
        """
        plain = data.data.cast("B") if data.size else memoryview(b"")
        few = data.size < value_codings.LEAST_VALUES or data.itemsize == 1
        if few or coding not in _OF_POSITIONS:
            return ValueCoding.PLAIN, plain
        remembered, is_trial = f"{name}.values", self.state[f"{name}.blocks"] == 1
        if not is_trial and not self.state.get(remembered):
            return ValueCoding.PLAIN, plain
        coded = value_codings.encode_exponents(data)
        pays = len(coded) <= value_codings.WORTH_WHILE * len(plain)
        if is_trial:
            self.state[remembered] = int(pays)
        return (ValueCoding.EXPONENTS, coded) if pays else (ValueCoding.PLAIN, plain)

    def _code(self, block: Block) -> tuple[IndexCoding, int, bytes]:
        indices = block.indices
        if isinstance(block, RangedBlock):
            return IndexCoding.RANGES, 0, described(block)
        if indices is None or indices.size == block.size:
            return IndexCoding.DENSE, 0, b""
        if not indices.size:
            return IndexCoding.UINT32, 0, b""
        name = _name(block)
        remembered, searches, seen = f"{name}.coding", f"{name}.searches", f"{name}.blocks"
        blocks_since_trial = self.state.get(seen, self.interval)
        if blocks_since_trial >= self.interval:
            coding, pays = _smallest(indices, block.size, block.values.data.nbytes)
            self.state |= {remembered: int(coding), searches: int(pays), seen: 1}
        else:
            self.state[seen] = blocks_since_trial + 1
        coding, pays = IndexCoding(self.state[remembered]), bool(self.state.get(searches, 1))
        return _encode_as(coding, indices, block.size, pays)


def _name(block: Block) -> str:
    """Return the prefix of a block's keys in the state of an IndexChooser."""
    return f"{block.slot}" if block.slots == 1 else f"{block.slot}+{block.slots}"


def _factors_as_bytes(block: LowRankBlock) -> WireBlock:
    """Return a low-rank block as bytes: a header, the left factor, then the right factor."""
    data = np.concatenate([block.values.data, block.right.data])
    return WireBlock(
        slot=block.slot,
        count=data.size,
        coding=IndexCoding.LOW_RANK,
        coding_parameter=block.rank,
        index_bytes=_FACTORS.pack(block.first, block.columns, block.right.scale),
        value_dtype=block.values.dtype,
        scale=block.values.scale,
        value_bytes=data.data.cast("B"),
    )


def _smallest(indices: Int64, size: int, value_bytes: int) -> tuple[IndexCoding, bool]:
    """Return the smallest coding of given positions, and if deflate searches for repeated gaps.

    The number of bytes of each coding of positions is computed without coding, except for deflated
    gaps, which must be measured.
    """
    searches = False
    sizes = {
        IndexCoding.RICE: index_codings.best_rice(indices)[1],
        IndexCoding.BITMAP: -(-size // 8),
    }
    if size <= _UINT32_RANGE:
        sizes[IndexCoding.UINT32] = 4 * indices.size
        deflated = index_codings.estimated_deflated_bytes(indices, searches=False)
        searched = index_codings.estimated_deflated_bytes(indices, searches=True)
        best = min(deflated, *sizes.values())
        searches = best - searched >= _WORTH_A_SEARCH * (value_bytes + best)
        sizes[IndexCoding.DEFLATED_GAPS] = searched if searches else deflated
    return min(sizes, key=sizes.__getitem__), searches


def _encode_as(
    coding: IndexCoding, indices: Int64, size: int, searches: bool
) -> tuple[IndexCoding, int, bytes]:
    """Code positions in a given coding; return (coding, its best parameter, coded positions)."""
    parameter = 0
    if coding is IndexCoding.RICE:
        parameter, data = index_codings.encode_best_rice(indices)
    elif coding is IndexCoding.BITMAP:
        data = index_codings.encode_bitmap(indices, size)
    elif coding is IndexCoding.DEFLATED_GAPS:
        data = index_codings.encode_deflated_gaps(indices, searches)
    else:
        data = index_codings.encode_uint32(indices)
    return coding, parameter, data


def _decode_factors(
    slot: int, coded: CodedValues, rank: int, described: memoryview, size: int
) -> Block:
    """Return the product of a low-rank block's two factors as a dense float32 block.

    The caller checks that the factors have no more values than the slot (tensor or variable slice)
    has entries. By checking the factors' number of values, the caller of `_decode_factors` limits
    the number of columns, and so the allocated memory.

    Args:
        slot: Number of the block's slot (tensor or variable slice).
        coded: Coded values of the left factor, then of the right factor.
        rank: Number of columns of each of the two factors.
        described: Received header of the factors, packed by `_FACTORS`.
        size: Number of entries in the block's slot (tensor or variable slice).

    Raises:
        WireError: The header of the factors contradicts the number of values or of entries.
    """
    if len(described) != _FACTORS.size:
        raise WireError(f"low-rank header has {len(described)} bytes; expected {_FACTORS.size}")
    first, columns, scale = _FACTORS.unpack(described)
    if rank < 1 or not first < columns:
        raise WireError(f"low-rank block of rank {rank} begins at column {first} of {columns}")
    rows, count = -(-(first + size) // columns), coded.data.size
    if count != rank * (rows + columns):
        raise WireError(
            f"low-rank block: {count} values of rank {rank} for {rows} rows and {columns} columns"
        )
    if not 0 < scale < math.inf:
        raise WireError(f"low-rank right factor's scale {scale}; expected a finite number above 0")
    left = dataclasses.replace(coded, data=coded.data[: rows * rank])
    right = CodedValues(coded.dtype, coded.data[rows * rank :], scale)
    return expanded(LowRankBlock(slot, size, None, left, right, rank, first))


def decode_block(
    slot: int,
    count: int,
    coding: int,
    coding_parameter: int,
    index_bytes: memoryview,
    value_dtype: str,
    scale: float,
    value_bytes: memoryview,
    size: int,
    value_coding: int = ValueCoding.PLAIN,
    chunk: int = 0,
    chunk_first: int = 0,
    slots: int = 1,
) -> Block:
    """Check and decode one received block (coded values of a tensor or variable slice).

    Args:
        slot: Number of the block's first slot (tensor or variable slice).
        count: Number of coded values in the received block.
        coding: How the positions of values are coded, an IndexCoding.
        coding_parameter: Number of low bits for the coding RICE, rank for LOW_RANK, 0 for other
            codings.
        index_bytes: Coded positions of values; with LOW_RANK or RANGES the header of the factors or
            ranges.
        value_dtype: Dtype of the values, for example float32, int8 or sign (VALUE_DTYPES and
            FEW_BITS in thinwire.ops.types).
        scale: Factor on the values. 0 means that the sender set no factor: the factor is 1, but for
            int8 a missing factor is an error.
        value_bytes: Coded values of the block, little-endian.
        size: Number of entries in the block's slot (tensor or variable slice), or in all slots that
            the block spans.
        value_coding: How the values are coded, a ValueCoding: EXPONENTS only with positions; CODES
            or DEFLATED_CODES with the dtypes of FEW_BITS and no other dtype.
        chunk: Number of entries per chunk (entries that share scales) with a few-bit dtype
            (FEW_BITS); 0 with other dtypes.
        chunk_first: Position of the block's first entry in that entry's chunk with a few-bit dtype
            (FEW_BITS); 0 with other dtypes.
        slots: Number of slots (tensors or variable slices) that the block spans; above 1 only with
            positions or DENSE.

    Returns:
        The block. A LOW_RANK block is multiplied out to dense float32. Plain values are a view of
        `value_bytes` if it is aligned. The values are not checked for NaN and infinity;
        `thinwire.ops.kernels.numpy_ops.all_finite` does this.

    Raises:
        WireError: The arguments of `decode_block` contradict each other, or the received bytes do
            not decode.
    """
    if slots > 1 and (value_dtype in FEW_BITS or coding not in _OF_SEVERAL):
        raise WireError(f"block (index coding {coding}, {value_dtype}) spans {slots} slots, not 1")
    if value_dtype in FEW_BITS:
        _check_few_bits(count, coding, value_dtype, value_coding, size)
        scale = _checked_scale(scale, value_dtype)
        indices = _decode_indices(coding, coding_parameter, index_bytes, count, size)
        chunks = indices, size, chunk, chunk_first
        edges = few_bits_coding.checked_edges(*chunks, len(value_bytes))
        codes, scales = few_bits_coding.decode_codes(value_bytes, value_dtype, edges, value_coding)
        values_of_chunks = ChunkedValues(
            value_dtype, codes, scale, scales=scales, edges=edges, chunk=chunk, first=chunk_first
        )
        return Block(slot, size, indices, values_of_chunks)
    if value_dtype not in VALUE_DTYPES:
        known = ", ".join((*VALUE_DTYPES, *FEW_BITS))
        raise WireError(f"a block's value dtype is {value_dtype!r}; expected one of {known}")
    if chunk or chunk_first:
        raise WireError(f"block of {value_dtype} values in chunks of {chunk}; expected no chunks")
    dtype = np.dtype(_NUMPY_DTYPES[value_dtype])
    if value_coding != ValueCoding.PLAIN:
        if value_coding != ValueCoding.EXPONENTS or coding not in _OF_POSITIONS or count > size:
            raise WireError(
                f"block has value coding {value_coding} of {count} values, index coding {coding}, "
                f"for {size} entries; expected value coding 0, or 1 with positions"
            )
        value_bytes = value_codings.decode_exponents(value_bytes, count, dtype.itemsize)
    if not 0 <= count <= size or len(value_bytes) != count * dtype.itemsize:
        raise WireError(
            f"a received block has {count} values of {value_dtype} in {len(value_bytes)} bytes "
            f"for {size} entries, which do not match"
        )
    scale = _checked_scale(scale, value_dtype)
    values = np.frombuffer(value_bytes, dtype) if count else np.empty(0, dtype)
    if not values.flags.aligned:
        values = values.copy()
    coded = CodedValues(value_dtype, values, scale)
    if coding == IndexCoding.LOW_RANK:
        return _decode_factors(slot, coded, coding_parameter, index_bytes, size)
    if coding == IndexCoding.RANGES:
        if coding_parameter:
            raise WireError(f"index coding {coding} has no parameter; block has {coding_parameter}")
        return decode(slot, coded, index_bytes, size)
    indices = _decode_indices(coding, coding_parameter, index_bytes, count, size)
    return Block(slot, size, indices, coded, slots=slots)


def _check_few_bits(
    count: int, coding: int, value_dtype: str, value_coding: int, size: int
) -> None:
    """Raise an error for a coding of values or positions that few-bit values cannot have."""
    if value_coding not in _OF_FEW_BITS or coding not in _OF_SEVERAL:
        raise WireError(
            f"a received block has {value_dtype} values with value coding {value_coding} and "
            f"index coding {coding}; expected value coding 2 or 3, with positions or a dense block"
        )
    if not 0 <= count <= size:
        raise WireError(f"a block has {count} values of {value_dtype} for {size} entries")


def _checked_scale(scale: float, value_dtype: str) -> float:
    """Return the factor of a block's values: 1 if the sender set none (0), an error for int8."""
    if scale == 0 and value_dtype != "int8":
        return 1.0
    if not 0 < scale < math.inf:
        raise WireError(f"a block has scale {scale}; expected a finite number above 0")
    return scale


def _decode_indices(
    coding: int, parameter: int, data: memoryview, count: int, size: int
) -> Int64 | None:
    """Return a block's ascending, unique positions below `size`; None for a DENSE block."""
    if coding == IndexCoding.DENSE:
        if count != size or len(data) or parameter:
            raise WireError(f"dense block of {count} values, {len(data)} index bytes, size {size}")
        return None
    if coding not in _CODINGS:
        raise WireError(f"block's index coding {coding} is unknown; expected 0 to {max(_CODINGS)}")
    if not count:
        if len(data):
            raise WireError(f"a block has {len(data)} index bytes for no values; expected none")
        return np.empty(0, np.int64)
    if coding == IndexCoding.RICE:
        indices = index_codings.decode_rice(data, count, size, parameter)
    elif parameter:
        raise WireError(f"a block's index coding {coding} has no parameter; got {parameter}")
    elif coding == IndexCoding.BITMAP:
        indices = index_codings.decode_bitmap(data, count, size)
    elif coding == IndexCoding.DEFLATED_GAPS:
        indices = index_codings.decode_deflated_gaps(data, count)
    else:
        indices = index_codings.decode_uint32(data, count)
    if indices[-1] >= size or (indices[1:] <= indices[:-1]).any():
        raise WireError(f"a block's positions are not ascending and unique below {size}")
    return indices
