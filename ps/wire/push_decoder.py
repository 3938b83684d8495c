"""From a Push message to a checked update in shard coordinates."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from thinwire.ops.buffers import pieces
from thinwire.ops.kernels import Kernels
from thinwire.ops.kernels.numpy_ops import peak
from thinwire.ops.sharding.flat_updates import flatten
from thinwire.ops.types import Block, Kind, ShardLayout, SpareUpdate, Update
from thinwire.ops.wire.blocks import WireBlock
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed
from thinwire.ps.core import events
from thinwire.ps.wire.claims import ClaimBounds

if TYPE_CHECKING:
    from thinwire.ops.types import Float32

_KINDS = {
    pb.UPDATE_KIND_GRADIENT: Kind.GRADIENT,
    pb.UPDATE_KIND_DELTA: Kind.DELTA,
    pb.UPDATE_KIND_VALUES: Kind.VALUES,
}


class NonFinite(Exception):
    """The update holds NaN or infinity."""


@dataclasses.dataclass(frozen=True)
class DecodedPush:
    """What one Push message holds, checked but for finiteness."""

    blocks: list[Block]
    aux: Float32 | None
    num_bytes: int  # of the blocks, coded
    plain: Update | None  # the blocks, where they are the whole shard as it lies in memory
    change: Update | None = None  # of the weights, by the script itself
    coded: tuple[WireBlock, ...] = ()  # the blocks as they came, where they are kept


class PushDecoder:
    """Decodes pushes for one shard.

    Attributes:
        keeps_coded: Whether events keep the messages that they were made of.
        spares_updates: Whether dense updates may be overwritten when they are merged: nobody keeps
            events, or their messages.
        aux_count: How many values come beside each push.
    """

    def __init__(
        self,
        layout: ShardLayout,
        kind: Kind,
        kernels: Kernels,
        aux_count: int = 0,
        bounds: ClaimBounds | None = None,
        groups: Sequence[Collection[int]] | None = (),
        keeps_blocks: bool = False,
    ) -> None:
        """Remember what every push must fit.

        Args:
            layout: Of the shard.
            kind: Of the run's updates.
            kernels: The array work.
            aux_count: How many values come beside each push.
            bounds: Of what workers may claim; None: of what workers of any run may.
            groups: Slices that each optimizer of the script steps; empty: one steps all; None:
                not known, and not checked.
            keeps_blocks: Whether events keep the blocks of updates, which may be relayed.
        """
        self.keeps_coded = self.spares_updates = False
        self._groups = None if groups is None else [frozenset(slots) for slots in groups]
        self._bounds = bounds or ClaimBounds()
        self.aux_count = aux_count
        self._layout, self._kind, self._kernels = layout, kind, kernels
        self._keeps_blocks = keeps_blocks
        self._sizes = [piece.size for piece in layout.slices]

    def decode(self, worker: int, push: pb.Push, payload: memoryview) -> events.Push:
        """Check and decode one push.

        Raises:
            Malformed: Anything but finiteness is wrong.
            NonFinite: A value or the loss is NaN or infinite.
        """
        if push.more or push.HasField("manifest"):
            raise Malformed(f"step {push.step}: a part of an update, in a run without")
        contents = self.read(push, payload)
        coded = None
        if self.keeps_coded:
            push.ClearField("payload")  # it is in the other argument as well
            coded = push, (payload,)
        return self.whole_event(worker, push, contents, contents.num_bytes, coded)

    def whole_event(
        self,
        worker: int,
        push: pb.Push,
        contents: DecodedPush,
        num_bytes: int,
        coded: tuple[Any, Sequence[Any]] | None = None,
    ) -> events.Push:
        """Return the event of a push that came in one message.

        Args:
            worker: Whose it is.
            push: The message.
            contents: What `read` has returned of it.
            num_bytes: Of its blocks, coded.
            coded: The message with its payload, where it is kept.

        Raises:
            NonFinite: A value or the loss is NaN or infinite.
        """
        update = contents.plain or self.flatten(contents.blocks)
        keeps = self._keeps_blocks and contents.plain is None
        blocks = contents.coded if keeps else None
        given = contents.aux, num_bytes, contents.change, blocks, coded
        return self.event(worker, push, update, *given)

    def read(self, push: pb.Push, payload: memoryview, parts: bool = False) -> DecodedPush:
        """Check and decode one message, but for finiteness.

        Args:
            push: The message.
            payload: What came with it.
            parts: Whether it may hold a part of an update.

        Raises:
            Malformed: Anything is wrong.
        """
        if _KINDS.get(push.kind) is not self._kind:
            raise Malformed(
                f"kind: updates of this run are of kind {self._kind.value}, the push is of "
                f"{push.kind}"
            )
        self._bounds.check_push(push)
        self._check_group(push)
        expected = 0 if push.more else self.aux_count
        payload, aux = messages.carve_aux(payload, push.aux_count, (expected,))
        payload, change = self._carve_change(push, payload)
        blocks = messages.blocks_from_message(push.blocks, payload, self._sizes, parts)
        plain = None
        if self._is_plain(push.blocks):
            values = np.frombuffer(payload, "<f4")  # as it lies there: no copy
            is_spare = self.spares_updates and values.flags.writeable
            plain = (SpareUpdate if is_spare else Update)(None, values)
        keeps = self._keeps_blocks and plain is None  # whole ones are never relayed
        coded = messages.coded_blocks(push.blocks, payload) if keeps else ()
        return DecodedPush(blocks, aux, len(payload), plain, change, coded)

    def _carve_change(self, push: pb.Push, payload: memoryview) -> tuple[memoryview, Update | None]:
        """Take what the script has changed of the weights itself off a payload's end.

        Raises:
            Malformed: It does not fit the shard, or the push continues.
        """
        if not push.changes and not push.change_bytes:
            return payload, None
        start = len(payload) - push.change_bytes
        if start < 0 or push.more:
            raise Malformed(
                f"{push.change_bytes} bytes of changes in a payload of {len(payload)}; expected "
                "no more than that, and none before the last message of an update"
            )
        blocks = messages.blocks_from_message(push.changes, payload[start:], self._sizes)
        return payload[:start], self.flatten(blocks)

    def event(
        self,
        worker: int,
        push: pb.Push,
        update: Update,
        aux: Float32 | None,
        num_bytes: int,
        change: Update | None = None,
        blocks: tuple[WireBlock, ...] | None = None,
        coded: tuple[Any, Sequence[Any]] | None = None,
    ) -> events.Push:
        """Return a whole update as an event; the arguments are those of its fields.

        Raises:
            NonFinite: A value or the loss is NaN or infinite.
        """
        largest = 0.0
        for values, what in (
            (update.values, "the update or its loss"),
            (aux, "what is averaged beside the update"),
            (None if change is None else change.values, "what the script has set"),
        ):
            largest = max(largest, _peak(values))
            if not (math.isfinite(largest) and math.isfinite(push.loss)):
                raise NonFinite(f"step {push.step}: {what} is not finite")
        return events.Push(
            worker=worker,
            incarnation=push.incarnation,
            step=push.step,
            base_version=push.base_version,
            lag=push.lag,
            generation=push.generation,
            epoch=push.epoch,
            update=update,
            samples=push.samples,
            local_steps=push.local_steps,
            loss=push.loss if push.HasField("loss") else None,
            aux=aux,
            base_checksum=push.base_checksum if push.HasField("base_checksum") else None,
            num_bytes=num_bytes,
            learning_rate=push.learning_rate if push.sets_rate else None,
            loss_scale=push.loss_scale,
            overflow=push.overflow,
            optimizer=push.optimizer,
            repeats_batch=push.repeats_batch,
            batch_parts=push.batch_parts,
            change=change,
            blocks=blocks,
            coded=coded,
            peak=largest,
        )

    def _check_group(self, push: pb.Push) -> None:
        """Check that a push holds only what its optimizer steps.

        Raises:
            Malformed: There is no such optimizer, or it steps other slices.
        """
        if self._groups is None:
            return
        most = max(1, len(self._groups))
        if push.optimizer >= most:
            raise Malformed(f"optimizer {push.optimizer}: expected 0 to {most - 1}")
        if not self._groups:
            return
        for block in push.blocks:
            if not self._groups[push.optimizer].issuperset(messages.spanned(block)):
                raise Malformed(
                    f"slot {block.slot} is not stepped by optimizer {push.optimizer}; expected "
                    "one of its own"
                )

    def _is_plain(self, described: Sequence[pb.Block]) -> bool:
        """Return whether the payload of these (legal) blocks is the whole shard, in float32."""
        return len(described) == len(self._sizes) and all(
            block.coding == pb.INDEX_CODING_DENSE
            and block.value_dtype == pb.VALUE_DTYPE_FLOAT32
            and block.scale in (0, 1)
            for block in described
        )

    def flatten(self, blocks: Sequence[Block]) -> Update:
        """Join blocks in shard coordinates, dense where that is cheaper."""
        return flatten(blocks, self._layout, self._kernels)


def _peak(values: Float32 | None) -> float:
    """Return the largest magnitude, 0 of nothing, and infinity of what is not finite."""
    return 0.0 if values is None else max(map(peak, pieces(values)), default=0.0)
