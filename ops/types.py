"""Data types that all parts of Thinwire use: models, shards, packets, updates.

The types are plain frozen dataclasses. This module imports neither TensorFlow nor numpy at run
time, so that ``--help`` and the definition of flags do not wait for these imports.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Float32 = NDArray[np.float32]
    Int32 = NDArray[np.int32]
    Int64 = NDArray[np.int64]

#: State of a policy: nested dicts of arrays, ints, floats and strings. The policy's caller stores
#: the state.
State = dict[str, Any]


class Kind(enum.Enum):
    """Meaning of the values in an update or a packet."""

    GRADIENT = "gradient"  # mean gradient of a mini-batch, without the learning rate
    DELTA = "delta"  # change of weights, in which the learning rate is applied already
    VALUES = "values"  # weights after a round that the workers summed themselves, or no values


class ConfigurationError(Exception):
    """Error: the run cannot work as configured. The message names cause and fix. Exit code 2."""


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A shared variable: its Keras ``variable.path``, shape and dtype (float32)."""

    path: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def size(self) -> int:
        """Number of entries of the variable."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """The shared variables in W_global order. "The model" is their flattened concatenation."""

    tensors: tuple[TensorSpec, ...]

    @property
    def num_parameters(self) -> int:
        """Number of entries of all the model's tensors together."""
        return self.offsets[-1]

    @functools.cached_property
    def offsets(self) -> tuple[int, ...]:
        """Position of each tensor's first entry in the flat model, and last the total size."""
        return (0, *itertools.accumulate(tensor.size for tensor in self.tensors))


@dataclasses.dataclass(frozen=True)
class Slice:
    """A slice: the entries ``start:stop`` of the flattened tensor with number ``tensor``."""

    tensor: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of entries of the slice."""
        return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class ShardLayout:
    """Layout of one PS shard's flat buffer: a concatenation of slices, in tensor order."""

    slices: tuple[Slice, ...]

    @property
    def size(self) -> int:
        """Number of entries of the shard's flat buffer."""
        return self.offsets[-1]

    @functools.cached_property
    def offsets(self) -> tuple[int, ...]:
        """Position of each slice in the shard's flat buffer, and last the total size."""
        return (0, *itertools.accumulate(piece.size for piece in self.slices))


@dataclasses.dataclass(frozen=True)
class CodedValues:
    """Coded values of a block's entries: value = data * scale.

    Attributes:
        dtype: Name of the value format, one of VALUE_DTYPES.
        data: [k] codes, with numpy dtype float32, uint16 (the bits of a bfloat16), float16 or int8.
        scale: Factor of all codes: the quantization step of int8. For all formats except int8 it is
            1, unless the values were multiplied by a number after coding.
    """

    dtype: str
    data: NDArray[Any]
    scale: float = 1.0

    @property
    def num_bytes(self) -> int:
        """Size of the coded values, in bytes."""
        return self.data.nbytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkedValues(CodedValues):
    """Coded values of a few bits, with separate scales for each chunk of entries.

    A chunk is a run of consecutive entries of a flattened tensor. ``dtype`` is one of FEW_BITS.
    ``data`` [k] uint8 holds the sign in the highest bit of the code (set: negative), and the index
    of the magnitude in the lower bits. `thinwire.ops.kernels.few_bits` defines the magnitudes.
    """

    scales: Float32  # [c, scales of a chunk] float32, exact in bfloat16, not negative
    edges: Int64  # [c + 1] chunk i has the values data[edges[i] : edges[i + 1]], at least one
    chunk: int  # number of entries of a full chunk, at least 1
    first: int = 0  # position of the block's first entry within its chunk

    @property
    def num_bytes(self) -> int:
        """Size of the codes, scales and edges, in bytes."""
        return self.data.nbytes + self.scales.nbytes + self.edges.nbytes

    def part(self, values: slice, start: int) -> ChunkedValues:
        """Return a range of consecutive values as the values of a smaller block.

        Args:
            values: Range of `data` to return.
            start: Position of the smaller block's first entry in the present block.
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


#: Value format with at most one scale per block -> bytes of one value.
VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
VALUE_DTYPES = tuple(VALUE_BYTES)
#: Value format with scales for each chunk of entries -> bits of one value.
FEW_BITS = {"int4": 4, "int2": 2, "means2": 2, "sign": 1}
#: Name of any value format -> bits of one value.
VALUE_BITS = {name: 8 * width for name, width in VALUE_BYTES.items()} | FEW_BITS
#: Default number of consecutive entries that share scales (a chunk).
CHUNK_ENTRIES = 4096


def where_of(indices: Int64 | None) -> Int64 | slice:
    """Return an array index that selects the entries at `indices`; None selects every entry."""
    return slice(None) if indices is None else indices


@dataclasses.dataclass(frozen=True)
class Block:
    """Values of one tensor in a packet; after routing, values of one or more slices.

    ``indices`` are ascending, unique positions relative to the block's first entry; ``None`` means
    every entry (dense). A sparse block may be empty.
    """

    slot: int  # tensor number in the ModelSpec; after routing, slice number in the ShardLayout
    size: int  # number of entries that the block spans
    indices: Int64 | None  # [k] int64 positions; None: dense
    values: CodedValues  # [k] values, or [size] values of a dense block
    _: dataclasses.KW_ONLY
    slots: int = 1  # number of slices that the block spans, from `slot` on; 1 before routing

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
    """A decoded push, with positions in one shard's flat buffer.

    ``indices`` are ascending and unique; ``None`` means every entry (dense).
    """

    indices: Int64 | None  # [k] int64 positions; None: dense
    values: Float32  # [k] float32 values, or [shard size] values of a dense update

    @property
    def num_bytes(self) -> int:
        """Size of the positions and values of the update, in bytes."""
        return self.values.nbytes + (0 if self.indices is None else self.indices.nbytes)


class SpareUpdate(Update):
    """A dense update that a merge may overwrite, because no other object uses its values."""


#: Class of service of unmarked traffic. It is the last class; the network serves class 0 first.
BEST_EFFORT = 7


@dataclasses.dataclass(frozen=True)
class Link:
    """Settings of one worker's emulated link; 0 switches a limit off.

    `mbps`, `delay_ms` and `loss` apply to both directions. The other settings apply to the uplink
    only, because all datagrams go up.
    """

    mbps: float = 0.0  # rate of the link in megabit per second; 0: no limit
    delay_ms: float = 0.0  # one-way delay of the link in milliseconds
    loss: float = 0.0  # probability that a 1,448-byte segment, or a datagram, is lost
    queue_kb: float = 0.0  # size of each class's queue for datagrams and background, in 1,000 bytes
    reorder: float = 0.0  # probability that a datagram arrives behind later datagrams
    duplicate: float = 0.0  # probability that a datagram arrives twice
    # Rate of emulated background traffic on the uplink, in megabit per second.
    background_mbps: float = 0.0
    background_class: int = BEST_EFFORT  # class of service of the background traffic

    @property
    def active(self) -> bool:
        """True if the link emulates a rate, delay, loss, reordering or duplication."""
        limits = (self.mbps, self.delay_ms, self.loss, self.reorder, self.duplicate)
        return any(limit > 0 for limit in limits)

    @property
    def down(self) -> Link:
        """Settings of the link's downlink alone, without settings that apply to the uplink only."""
        return Link(self.mbps, self.delay_ms, self.loss)


@dataclasses.dataclass(frozen=True)
class LowRankBlock(Block):
    """A block that holds a product of two thin matrices in factored form.

    Entry i of the block is entry ``first + i``, counted row by row, of ``left @ right.T``.
    ``values`` hold the left matrix [rows * rank], row by row. ``indices`` is None.
    """

    # [columns * rank] right matrix, row by row; its dtype is the dtype of `values`.
    right: CodedValues
    rank: int  # rank of the product, at least 1
    first: int  # column of the block's first entry in its row, below `columns`

    @property
    def columns(self) -> int:
        """Number of columns of the matrix product."""
        return self.right.data.size // self.rank


@dataclasses.dataclass(frozen=True)
class RangedBlock(Block):
    """A dense block that was received in part: some ranges of equal length are missing.

    Range i covers entries ``i * block_entries`` up to the next range or the end of the slot.
    ``values`` concatenate the values of the present ranges. ``indices`` is None. ``size`` counts
    the entries of the whole slot.
    """

    block_entries: int  # number of entries of a range, at least 1; the last range may have fewer
    present: NDArray[np.bool_]  # [ceil(size / block_entries)] True for each present range


#: Metadata that marks a policy's field that only one node uses. The run's fingerprint leaves the
#: field out.
OWN: Mapping[str, bool] = {"own": True}


class Policy(Protocol):
    """Interface of all policies: a frozen dataclass whose fields are hyper-parameters."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


_Policy = TypeVar("_Policy", bound=Policy)


def configured(policy: type[_Policy], choices: object) -> _Policy:
    """Build a policy; its fields get the choices of equal names (None: the default)."""
    make: Callable[..., _Policy] = policy
    names = {field.name for field in dataclasses.fields(policy)}
    settings = {key: value for key, value in vars(choices).items() if value is not None}
    return make(**{key: value for key, value in settings.items() if key in names})


def describe(policy: Policy) -> Mapping[str, Any]:
    """Return a policy's hyper-parameters by name, for the fingerprint and the summary.

    The hyper-parameters of a wrapped policy follow under the name of its class:
    ``{"inner": "TopK", "TopK.compression_rate": 0.01, ...}``.
    """
    fields = (field for field in dataclasses.fields(policy) if not field.metadata.get("own"))
    values = {field.name: getattr(policy, field.name) for field in fields}
    inner = values.get("inner")
    if dataclasses.is_dataclass(inner) and not isinstance(inner, type):
        name = type(inner).__name__
        values["inner"] = name
        for key, value in describe(inner).items():
            values[key if "." in key else f"{name}.{key}"] = value
    return values
