"""Data types that all programs of Thinwire use: models, shard layouts, packets, updates.

The data types of `thinwire.ops.types` are plain frozen dataclasses. The module `thinwire.ops.types`
imports neither TensorFlow nor numpy at run time, so that ``--help`` and the definition of flags do
not wait for these imports.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import math
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Array = NDArray[Any]
    Bool = NDArray[np.bool_]
    UInt8 = NDArray[np.uint8]
    UInt32 = NDArray[np.uint32]
    Int32 = NDArray[np.int32]
    Int64 = NDArray[np.int64]
    Float32 = NDArray[np.float32]
    Float64 = NDArray[np.float64]
    Generator = np.random.Generator
else:
    # Annotations are not evaluated, so modules can import these names without numpy.
    Array = Bool = UInt8 = UInt32 = Int32 = Int64 = Float32 = Float64 = Generator = Any

#: State of a policy: nested dicts of arrays, ints, floats and strings. The policy's caller stores
#: the state.
State = dict[str, Any]


class Kind(enum.Enum):
    """Meaning of the values in an update or a packet (coded update)."""

    # the values are the mean gradient of a mini-batch, without the learning rate
    GRADIENT = "gradient"
    # the values are a change of weights, in which the learning rate is applied already
    DELTA = "delta"
    # the values are weights after a round that the workers summed themselves, or there are none
    VALUES = "values"


class ConfigurationError(Exception):
    """Error: the training run cannot work as configured.

    The message of a ConfigurationError contains the cause and how to fix it. Exit code 2.
    """


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A shared variable: its Keras ``variable.path``, shape and dtype (float32)."""

    path: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def size(self) -> int:
        """Number of entries of the shared variable."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """The shared variables of a model, in the order of the registry W_global.

    The flat model is the concatenation of the flattened shared variables.
    """

    tensors: tuple[TensorSpec, ...]

    @property
    def num_parameters(self) -> int:
        """Number of entries of all shared variables of the model together."""
        return self.offsets[-1]

    @functools.cached_property
    def offsets(self) -> tuple[int, ...]:
        """Position of each tensor's first entry in the flat model, then the model's total size."""
        return (0, *itertools.accumulate(tensor.size for tensor in self.tensors))


@dataclasses.dataclass(frozen=True)
class Slice:
    """A variable slice: the entries ``start:stop`` of the flattened tensor number ``tensor``."""

    tensor: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of entries in the slice of a variable."""
        return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class ShardLayout:
    """Layout of one shard server's flat weights: a concatenation of slices, in tensor order."""

    slices: tuple[Slice, ...]

    @property
    def size(self) -> int:
        """Number of entries of the shard server's flat weights."""
        return self.offsets[-1]

    @functools.cached_property
    def offsets(self) -> tuple[int, ...]:
        """Position of each variable slice in the shard's flat weights, then their total size."""
        return (0, *itertools.accumulate(piece.size for piece in self.slices))


@dataclasses.dataclass(frozen=True)
class CodedValues:
    """Coded values of a block's entries, which decode to data * scale.

    Attributes:
        dtype: Name of the coded values' format, for example float32 or int8 (VALUE_DTYPES).
        data: [k] codes of the values, with numpy dtype float32, uint16 (the bits of a bfloat16),
            float16 or int8.
        scale: Factor on all codes: for int8 the quantization step; for other formats 1, unless the
            coded values were multiplied by a number after coding.
    """

    dtype: str
    data: Array
    scale: float = 1.0

    @property
    def num_bytes(self) -> int:
        """Size of the coded values of a block, in bytes."""
        return self.data.nbytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkedValues(CodedValues):
    """Values quantized to a few bits, with separate scales for each chunk of entries.

    A chunk is a range of consecutive entries of a flattened tensor. The value of ``dtype`` is a
    few-bit format, for example int4 or sign (FEW_BITS). The array ``data`` [k] uint8 has the sign
    in the highest bit of each code (set: negative), and the index of the magnitude in the lower
    bits. The module `thinwire.ops.kernels.few_bits` defines the magnitudes of few-bit values.
    """

    # [c, number of scales of a chunk] float32 scales, exact in bfloat16, not negative
    scales: Float32
    # [c + 1] edges of chunks: chunk i has the values data[edges[i] : edges[i + 1]], at least one
    edges: Int64
    chunk: int  # number of entries of a full chunk, at least 1
    first: int = 0  # position of the block's first entry within its chunk

    @property
    def num_bytes(self) -> int:
        """Size of the codes, scales and edges of the few-bit values, in bytes."""
        return self.data.nbytes + self.scales.nbytes + self.edges.nbytes

    def part(self, values: slice, start: int) -> ChunkedValues:
        """Return a range of consecutive coded values as the values of a smaller block.

        Args:
            values: Range of indices in the array `data` of the coded values to return.
            start: Position of the smaller block's first entry in the block that has all the coded
                values.
        """
        first_chunk = int(self.edges.searchsorted(values.start, "right")) - 1
        end = int(self.edges.searchsorted(values.stop, "left"))
        edges = self.edges[first_chunk : end + 1].clip(values.start, values.stop) - values.start
        return dataclasses.replace(
            self,
            data=self.data[values],
            scales=self.scales[first_chunk:end],
            edges=edges,
            first=(self.first + start) % self.chunk,
        )


#: Value format with at most one scale per block -> number of bytes of one value.
VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
VALUE_DTYPES = tuple(VALUE_BYTES)
#: Few-bit value format, with scales for each chunk of entries -> number of bits of one value.
FEW_BITS = {"int4": 4, "int2": 2, "means2": 2, "sign": 1}
#: Name of any value format -> number of bits of one value.
VALUE_BITS = {name: 8 * width for name, width in VALUE_BYTES.items()} | FEW_BITS
#: Default number of consecutive entries that share scales (a chunk) in few-bit quantization.
CHUNK_ENTRIES = 4096


def where_of(indices: Int64 | None) -> Int64 | slice:
    """Return an array index that selects the entries at `indices`; None selects every entry."""
    return slice(None) if indices is None else indices


@dataclasses.dataclass(frozen=True)
class Block:
    """Coded values of one tensor, or, after a division by shard, of one or more variable slices.

    The ``indices`` of a block (coded values) are ascending, unique positions relative to the
    block's first entry; ``None`` means every entry (dense). A block (coded values) with sparse
    values may be empty.
    """

    # number of the tensor in the ModelSpec; after division among shards, slice number in the
    # ShardLayout
    slot: int
    size: int  # number of entries of the tensor or slices that the block spans
    indices: Int64 | None  # [k] int64 positions of the block's values; None: dense block
    values: CodedValues  # [k] coded values, or [size] values of a dense block
    _: dataclasses.KW_ONLY
    # number of variable slices that the block spans, from number `slot` on; 1 before division among
    # shards
    slots: int = 1

    @property
    def num_bytes(self) -> int:
        """Size of the block's positions and values, in bytes."""
        return self.values.num_bytes + (0 if self.indices is None else self.indices.nbytes)


@dataclasses.dataclass(frozen=True)
class Packet:
    """Coded update of one worker's step: at most one block per tensor, in tensor order."""

    blocks: tuple[Block, ...]
    kind: Kind


@dataclasses.dataclass(frozen=True)
class Update:
    """A decoded update of weights, with positions in one shard server's flat weights.

    The ``indices`` of an update are ascending and unique; ``None`` means every entry (dense).
    """

    # [k] int64 positions of the update's values in the flat weights; None: dense update
    indices: Int64 | None
    # [k] float32 values, or [number of weights of the shard server] values of a dense update
    values: Float32

    @property
    def num_bytes(self) -> int:
        """Size of the positions and values of the update, in bytes."""
        return self.values.nbytes + (0 if self.indices is None else self.indices.nbytes)

    def dense(self, size: int) -> Float32:
        """Return the update as [size] values, with zeros where a sparse update has no value."""
        import numpy as np

        if self.indices is None:
            return self.values
        values = np.zeros(size, np.float32)
        values[self.indices] = self.values
        return values


class SpareUpdate(Update):
    """A dense update that a merge may overwrite, because no other object uses its values."""


#: Network class of service of unmarked traffic. It is the last class; the network serves class 0
#: first.
BEST_EFFORT = 7


@dataclasses.dataclass(frozen=True)
class Link:
    """Settings of one worker's emulated network link; 0 turns a limit off.

    The settings `mbps`, `delay_ms` and `loss` of an emulated link apply to both directions. The
    settings of an emulated link except rate, delay and loss apply only to the link from worker to
    shard server, because only workers send datagrams.
    """

    mbps: float = 0.0  # rate of the emulated link in megabit per second; 0: no limit
    delay_ms: float = 0.0  # one-way delay of the emulated link in milliseconds
    loss: float = 0.0  # probability that the emulated link loses a 1,448-byte segment or a datagram
    # size of each class's queue for datagrams and background traffic, in 1,000 bytes
    queue_kb: float = 0.0
    # probability that the emulated link delivers a datagram behind later datagrams
    reorder: float = 0.0
    duplicate: float = 0.0  # probability that the emulated link delivers a datagram twice
    # Rate of emulated background traffic on the uplink, in megabit per second.
    background_mbps: float = 0.0
    background_class: int = BEST_EFFORT  # network class of service of the background traffic

    @property
    def active(self) -> bool:
        """True if the link emulates a rate, delay, loss, reordering or duplication."""
        limits = (self.mbps, self.delay_ms, self.loss, self.reorder, self.duplicate)
        return any(limit > 0 for limit in limits)

    @property
    def down(self) -> Link:
        """Settings of the link from shard server to worker: rate, delay and loss."""
        return Link(self.mbps, self.delay_ms, self.loss)


@dataclasses.dataclass(frozen=True)
class LowRankBlock(Block):
    """A block that holds a product of two thin matrices in factored form.

    Entry i of a low-rank block is entry ``first + i``, counted row by row, of ``left @ right.T``.
    The ``values`` of a low-rank block are the left matrix [rows * rank], row by row. ``indices`` is
    None.
    """

    # [columns * rank] right matrix of the product, row by row; its dtype is the dtype of `values`.
    right: CodedValues
    rank: int  # rank of the matrix product, at least 1
    first: int  # column of the block's first entry in its row of the product, below `columns`

    @property
    def columns(self) -> int:
        """Number of columns of the matrix that the low-rank block holds in factored form."""
        return self.right.data.size // self.rank


@dataclasses.dataclass(frozen=True)
class RangedBlock(Block):
    """A dense block that was received in part: some ranges of equal length are missing.

    Range i of a ranged block covers the entries from ``i * block_entries`` to the start of the next
    range or the end of the variable slice. The ``values`` of a ranged block are the concatenated
    values of the ranges that have arrived. ``indices`` is None. The ``size`` of a ranged block
    counts the entries of the whole variable slice.
    """

    # number of entries of a range of the block, at least 1; the last range may have fewer
    block_entries: int
    present: Bool  # [ceil(size / block_entries)] True for each range that has arrived
