"""The nouns of the way down: who asks a shard for what, and what it is handed."""

from __future__ import annotations

import dataclasses
import enum
from typing import TYPE_CHECKING, Any, Literal

from thinwire.ops.types import Block, Update

if TYPE_CHECKING:
    from thinwire.ops.types import Float32


class Operation(enum.Enum):
    """How a reply changes what the worker has; values equal the wire's."""

    NONE = 0
    FULL = 1
    SET = 2
    ADD = 3
    SET_REST = 4  # of what is left when the worker has added its own push


@dataclasses.dataclass(frozen=True)
class ModelRequest:
    """A question that a shard answers with its model."""

    worker: int
    step: int  # of the push that it follows; 0 of a pull
    base_version: int | None  # what the worker has; None: nothing that this shard knows
    push_bytes: int = 0  # of that push, coded


@dataclasses.dataclass(frozen=True)
class ShardView:
    """What a down codec may know of the shard."""

    theta: Float32  # [n], read-only
    version: int  # T: updates applied so far
    kernels: Any  # ops.kernels.Kernels
    offsets: tuple[int, ...]  # where each slice begins in theta, and n at the end


@dataclasses.dataclass(frozen=True)
class ModelReply:
    """What a worker is sent.

    Attributes:
        operation: What to do with the update.
        update: In the shard's coordinates; or blocks already cut (slot = slice number) and coded.
        version: Of the shard, that the worker has afterwards.
        way: What kind of reply it is, for the books: the whole model; all that changed; or the
            largest part of what the worker lacks.
        is_resync: The whole model although the worker's own was known.
    """

    operation: Operation
    update: Update | tuple[Block, ...]
    version: int
    way: Literal["full", "delta", "sparse"]
    is_resync: bool = False
