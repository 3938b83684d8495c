"""The nouns every part of Thinwire shares: models, shards, packets, updates.

Plain frozen dataclasses. This module imports neither TensorFlow nor numpy at run time, so policy
modules that build flags and ``--help`` stay instant.
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

#: A policy's state: nested dicts of arrays, ints, floats and strings, owned by the caller.
State = dict[str, Any]


class Kind(enum.Enum):
    """What an update's values mean."""

    GRADIENT = "gradient"  # mean gradient of a mini-batch, without the learning rate
    DELTA = "delta"  # a change of weights, learning rate already in it
    VALUES = "values"  # the weights after a round that the workers did among themselves, or none


class ConfigurationError(Exception):
    """The run as configured cannot work; the message names cause and remedy. Exit code 2."""


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """One shared variable: its Keras ``variable.path``, shape and dtype (float32)."""

    path: str
    shape: tuple[int, ...]
    dtype: str = "float32"

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True)
class ModelSpec:
    """The shared variables in W_global order; flattened and concatenated they are "the model"."""

    tensors: tuple[TensorSpec, ...]

    @property
    def num_parameters(self) -> int:
        """Entries of all tensors together."""
        return self.offsets[-1]

    @functools.cached_property
    def offsets(self) -> tuple[int, ...]:
        """Position of each tensor's first entry in the flat model, plus the total at the end."""
        return (0, *itertools.accumulate(tensor.size for tensor in self.tensors))


@dataclasses.dataclass(frozen=True)
class Slice:
    """Entries ``start:stop`` of flattened tensor number ``tensor``."""

    tensor: int
    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of entries."""
        return self.stop - self.start


@dataclasses.dataclass(frozen=True)
class ShardLayout:
    """What one PS shard holds: slices, in tensor order, concatenated in one flat buffer."""

    slices: tuple[Slice, ...]

    @property
    def size(self) -> int:
        """Entries of the shard's flat buffer."""
        return self.offsets[-1]

    @functools.cached_property
    def offsets(self) -> tuple[int, ...]:
        """Position of each slice in the shard's flat buffer, plus the total at the end."""
        return (0, *itertools.accumulate(piece.size for piece in self.slices))


@dataclasses.dataclass(frozen=True)
class CodedValues:
    """Entry values as they travel.

    ``dtype`` is one of VALUE_DTYPES. ``data`` has numpy dtype float32, uint16 (the bits of a
    bfloat16), float16 or int8; value = data * scale. The scale is what int8 codes are multiples
    of; elsewhere it is 1 unless what is sent was multiplied by something after it was coded.
    """

    dtype: str
    data: NDArray[Any]  # [k]
    scale: float = 1.0

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays."""
        return self.data.nbytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChunkedValues(CodedValues):
    """Values of a few bits, with scales of their own for each chunk of entries.

    Chunks are runs of consecutive entries of a flattened tensor. ``dtype`` is one of FEW_BITS;
    ``data`` [k] uint8 holds the sign as the highest of its bits (set: negative), below it the
    number of the magnitude; `thinwire.ops.kernels.few_bits` has what magnitudes stand for.
    """

    scales: Float32  # [c, scales of a chunk] float32, exact in bfloat16, not negative
    edges: Int64  # [c + 1]: data[edges[i] : edges[i + 1]] are chunk i's, one at least
    chunk: int  # entries of a chunk, at least 1
    first: int = 0  # place of the block's first entry in its chunk

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays."""
        return self.data.nbytes + self.scales.nbytes + self.edges.nbytes

    def part(self, values: slice, start: int) -> ChunkedValues:
        """Return some consecutive values, for a block that begins at entry `start` of this one."""
        one = int(self.edges.searchsorted(values.start, "right")) - 1
        end = int(self.edges.searchsorted(values.stop, "left"))
        edges = self.edges[one : end + 1].clip(values.start, values.stop) - values.start
        return dataclasses.replace(
            self,
            data=self.data[values],
            scales=self.scales[one:end],
            edges=edges,
            first=(self.first + start) % self.chunk,
        )


#: How entry values may travel, with one scale at most -> bytes of one.
VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int8": 1}
VALUE_DTYPES = tuple(VALUE_BYTES)
#: How values of updates may travel besides, with scales for each chunk -> bits of one.
FEW_BITS = {"int4": 4, "int2": 2, "means2": 2, "sign": 1}
#: Bits of a value of either.
VALUE_BITS = {name: 8 * width for name, width in VALUE_BYTES.items()} | FEW_BITS
#: Entries of a chunk where none is given.
CHUNK_ENTRIES = 4096


def where_of(indices: Int64 | None) -> Int64 | slice:
    """Return what selects the entries at these positions from an array; None means every entry."""
    return slice(None) if indices is None else indices


@dataclasses.dataclass(frozen=True)
class Block:
    """One tensor (or, after routing, one slice of it, or several) of a packet.

    ``indices`` are ascending, unique positions relative to the block's first entry; ``None`` means
    every entry (dense). A sparse block may be empty.
    """

    slot: int  # tensor number in the ModelSpec; after routing, slice number in the ShardLayout
    size: int  # entries the block spans
    indices: Int64 | None  # [k] int64
    values: CodedValues  # [k], or [size] when dense
    _: dataclasses.KW_ONLY
    slots: int = 1  # slices that it spans, from `slot` on; of a tensor always 1

    @property
    def num_bytes(self) -> int:
        """Memory of the positions and the values."""
        return self.values.num_bytes + (0 if self.indices is None else self.indices.nbytes)


@dataclasses.dataclass(frozen=True)
class Packet:
    """What a codec made of one step's tensors: at most one block per tensor, in order."""

    blocks: tuple[Block, ...]
    kind: Kind


@dataclasses.dataclass(frozen=True)
class Update:
    """A decoded push in the flat coordinates of one shard.

    ``indices`` ascending and unique; ``None`` means dense.
    """

    indices: Int64 | None  # [k] int64
    values: Float32  # [k] float32, or [shard size] when dense

    @property
    def num_bytes(self) -> int:
        """Memory of the arrays."""
        return self.values.nbytes + (0 if self.indices is None else self.indices.nbytes)


class SpareUpdate(Update):
    """A dense update that whoever merges it may overwrite: nobody else has its values."""


#: Class of service of what bears no mark, the last one; 0 is served first.
BEST_EFFORT = 7


@dataclasses.dataclass(frozen=True)
class Link:
    """An emulated link of one worker; 0 means without that limit.

    The first three are of both directions; the others of the uplink, as all datagrams are.
    """

    mbps: float = 0.0  # megabit per second
    delay_ms: float = 0.0  # one way
    loss: float = 0.0  # probability that a 1,448-byte segment, or a datagram, is lost
    queue_kb: float = 0.0  # of datagrams and background that wait in one class, 1,000 bytes
    reorder: float = 0.0  # probability that a datagram arrives behind later ones
    duplicate: float = 0.0  # probability that a datagram arrives twice
    background_mbps: float = 0.0  # of others' traffic
    background_class: int = BEST_EFFORT  # its class of service

    @property
    def active(self) -> bool:
        """Whether anything is emulated at all."""
        limits = (self.mbps, self.delay_ms, self.loss, self.reorder, self.duplicate)
        return any(limit > 0 for limit in limits)

    @property
    def down(self) -> Link:
        """The downlink."""
        return Link(self.mbps, self.delay_ms, self.loss)


@dataclasses.dataclass(frozen=True)
class LowRankBlock(Block):
    """A block whose entries are those of a product of two thin matrices.

    Entry i is entry ``first + i``, counted row by row, of ``left @ right.T``. ``values`` are the
    left matrix [rows * rank], row by row; ``indices`` is None.
    """

    right: CodedValues  # [columns * rank], row by row; of the same dtype as `values`
    rank: int  # at least 1
    first: int  # below `columns`: where in its first row the block begins

    @property
    def columns(self) -> int:
        """Columns of the product."""
        return self.right.data.size // self.rank


@dataclasses.dataclass(frozen=True)
class RangedBlock(Block):
    """A dense block of which only some ranges of equal length are there.

    Range i covers entries ``i * block_entries`` up to the next range or the end of the slot.
    ``values`` are those of the ranges that are present, one after the other; ``indices`` is None
    and ``size`` counts the entries of the whole slot.
    """

    block_entries: int  # at least 1: entries of a range; the last may have fewer
    present: NDArray[np.bool_]  # [ceil(size / block_entries)] bool


#: Metadata of a policy's field that only the node it is on needs: no part of the fingerprint.
OWN: Mapping[str, bool] = {"own": True}


class Policy(Protocol):
    """A frozen dataclass whose fields are hyper-parameters, and nothing else."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]


_Policy = TypeVar("_Policy", bound=Policy)


def configured(policy: type[_Policy], choices: object) -> _Policy:
    """Make a policy, giving its fields the choices of the same name; None is its own default."""
    make: Callable[..., _Policy] = policy
    names = {field.name for field in dataclasses.fields(policy)}
    given = {key: value for key, value in vars(choices).items() if value is not None}
    return make(**{key: value for key, value in given.items() if key in names})


def describe(policy: Policy) -> Mapping[str, Any]:
    """Return a policy's hyper-parameters by name, for the fingerprint and the summary.

    What it is wrapped around follows under its class's name: ``{"inner": "TopK",
    "TopK.compression_rate": 0.01, ...}``.
    """
    fields = (each for each in dataclasses.fields(policy) if not each.metadata.get("own"))
    found = {field.name: getattr(policy, field.name) for field in fields}
    inner = found.get("inner")
    if dataclasses.is_dataclass(inner) and not isinstance(inner, type):
        name = type(inner).__name__
        found["inner"] = name
        for key, value in describe(inner).items():
            found[key if "." in key else f"{name}.{key}"] = value
    return found
