"""Decodes a worker's Push message into a checked update of the PS shard's weights."""

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
from thinwire.proto import messages, push_head
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed
from thinwire.ps.core import events
from thinwire.ps.wire.claims import ClaimBounds

if TYPE_CHECKING:
    from thinwire.ops.types import Float32


class NonFinite(Exception):
    """Error: a worker's push, or the loss in it, is NaN or infinite."""


@dataclasses.dataclass(frozen=True)
class DecodedPush:
    """The decoded contents of one Push message, checked except that values may be NaN or infinite.

    Attributes:
        blocks: Decoded blocks (parts) of the update, with indices into the shard's weights.
        aux: [n] float32 values that shard 0 averages over workers; None if the push has none.
        num_bytes: Size of the push's coded blocks with their payload, in bytes.
        plain: View of the push's payload as an update, if the payload holds all values of the shard
            as float32; else None.
        change: Change that the script made to the weights outside its optimizer; None if the script
            made no change.
        coded: The push's coded blocks as received, if the decoder stores coded blocks; else ().
    """

    blocks: list[Block]
    aux: Float32 | None
    num_bytes: int
    plain: Update | None
    change: Update | None = None
    coded: tuple[WireBlock, ...] = ()


class PushDecoder:
    """Decodes the Push messages that workers send to one PS shard.

    Attributes:
        keeps_coded: True if a push event contains the message that it was decoded from, because the
            journal writes that message.
        spares_updates: True if merging may overwrite a dense update, because no journal needs push
            events or their messages.
        aux_count: Number of values (`aux`) in each push that shard 0 averages over the workers.
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
        """Store the properties of the shard and the run with which every push must agree.

        Args:
            layout: Layout of the shard: the slices of the model that the shard holds.
            kind: Kind of the run's updates: gradients, weight deltas, or whole weights.
            kernels: Implementation of the array operations.
            aux_count: Number of values (`aux`) in each push that shard 0 averages over the workers.
            bounds: Bounds of the numbers that workers may report; None: bounds that fit every run.
            groups: For each optimizer of the script, the numbers of the slices of variables that it
                updates. Empty: one optimizer updates all slices. None: the slices of the optimizers
                are not known and not checked.
            keeps_blocks: True if push events contain the coded blocks of updates, so that the shard
                can relay the blocks to other workers.
        """
        self.keeps_coded = self.spares_updates = False
        self._groups = None if groups is None else [frozenset(slots) for slots in groups]
        self._bounds = bounds or ClaimBounds()
        self.aux_count = aux_count
        self._layout, self._kind, self._kernels = layout, kind, kernels
        self._keeps_blocks = keeps_blocks
        self._sizes = [piece.size for piece in layout.slices]

    def decode(self, worker: int, push: pb.Push, payload: memoryview) -> events.Push:
        """Check and decode one worker's push.

        Raises:
            Malformed: The push does not fit the run or the shard, or one of its numbers is out of
                bounds.
            NonFinite: A value of the push, or the loss in it, is NaN or infinite.
        """
        if push.more or push.HasField("manifest"):
            raise Malformed(f"push of step {push.step} is partial; expected a whole update")
        contents = self.read(push, payload)
        coded = None
        if self.keeps_coded:
            # The tuple `coded` contains the payload separately from the message.
            push.ClearField("payload")
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
        """Return the `Push` event of the shard's state machine for a push that arrived in one
        message.

        Args:
            worker: Id of the worker that pushes.
            push: Push message that the worker has sent.
            contents: Decoded contents of the push message, which `read` returned.
            num_bytes: Size of the push's coded blocks, in bytes.
            coded: Push message and payload, if the event is to keep the received bytes; else None.

        Raises:
            NonFinite: A value of the push, or the loss in it, is NaN or infinite.
        """
        update = contents.plain or self.flatten(contents.blocks)
        keeps = self._keeps_blocks and contents.plain is None
        blocks = contents.coded if keeps else None
        arguments = contents.aux, num_bytes, contents.change, blocks, coded
        return self.event(worker, push, update, *arguments)

    def read(self, push: pb.Push, payload: memoryview, parts: bool = False) -> DecodedPush:
        """Check and decode one Push message; do not check that its values are finite.

        Args:
            push: Push message of the wire protocol that a worker has sent.
            payload: Payload bytes that arrived with the message.
            parts: True if the push message may hold only some blocks of an update.

        Raises:
            Malformed: The push message does not fit the run or the shard, or one of its numbers is
                out of bounds.
        """
        if push_head.kind_from_message(push) is not self._kind:
            raise Malformed(
                f"the push has updates of kind {push.kind}, but the updates of this run are of "
                f"kind {self._kind.value}"
            )
        self._bounds.check_push(push)
        self._check_group(push)
        expected = 0 if push.more else self.aux_count
        payload, aux = messages.carve_aux(payload, push.aux_count, (expected,))
        payload, change = self._carve_change(push, payload)
        blocks = messages.blocks_from_message(push.blocks, payload, self._sizes, parts)
        plain = None
        if self._is_plain(push.blocks):
            # The array `values` is a view of the push's payload, not a copy.
            values = np.frombuffer(payload, "<f4")
            is_spare = self.spares_updates and values.flags.writeable
            plain = (SpareUpdate if is_spare else Update)(None, values)
        # An update that is the whole shard is not relayed to other workers.
        keeps = self._keeps_blocks and plain is None
        coded = messages.coded_blocks(push.blocks, payload) if keeps else ()
        return DecodedPush(blocks, aux, len(payload), plain, change, coded)

    def _carve_change(self, push: pb.Push, payload: memoryview) -> tuple[memoryview, Update | None]:
        """Split the script's changes of the weights off the end of a push's payload.

        Raises:
            Malformed: The script's changes of weights do not fit the shard, or come before the
                push's last message.
        """
        if not push.changes and not push.change_bytes:
            return payload, None
        start = len(payload) - push.change_bytes
        if start < 0 or push.more:
            raise Malformed(
                f"the push has {push.change_bytes} bytes of weight changes in a payload of "
                f"{len(payload)} bytes; expected no more than the payload, and no changes before "
                "the last message of a push"
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
        """Return a whole update as a Push event, whose fields have the names of the arguments.

        Raises:
            NonFinite: A value of the update, or its loss, is NaN or infinite.
        """
        largest, loss_is_finite = 0.0, math.isfinite(push.loss)
        for values, what in (
            (update.values, "the update or its loss"),
            (aux, "an averaged value (aux)"),
            (None if change is None else change.values, "a weight that the script set"),
        ):
            largest = max(largest, _peak(values))
            if not (loss_is_finite and math.isfinite(largest)):
                raise NonFinite(f"step {push.step}: {what} is not finite")
        return events.Push(
            worker=worker,
            incarnation=push.incarnation,
            epoch=push.epoch,
            head=push_head.head_from_message(push),
            origin=push_head.origin_from_message(push),
            update=update,
            aux=aux,
            num_bytes=num_bytes,
            change=change,
            blocks=blocks,
            coded=coded,
            peak=largest,
        )

    def _check_group(self, push: pb.Push) -> None:
        """Check that a push holds only slices of variables that its optimizer updates.

        Raises:
            Malformed: The push's optimizer does not exist, or does not update one of the slices.
        """
        if self._groups is None:
            return
        most = max(1, len(self._groups))
        if push.optimizer >= most:
            raise Malformed(f"the push is for optimizer {push.optimizer}: expected 0 to {most - 1}")
        if not self._groups:
            return
        for block in push.blocks:
            if not self._groups[push.optimizer].issuperset(messages.spanned(block)):
                raise Malformed(
                    f"the push has a block for tensor slot {block.slot}, which optimizer "
                    f"{push.optimizer} does not update; expected only slots of this optimizer"
                )

    def _is_plain(self, described: Sequence[pb.Block]) -> bool:
        """Return whether a push's payload is all weights of the shard as plain float32 values."""
        return len(described) == len(self._sizes) and all(
            block.coding == pb.INDEX_CODING_DENSE
            and block.value_dtype == pb.VALUE_DTYPE_FLOAT32
            and block.scale in (0, 1)
            for block in described
        )

    def flatten(self, blocks: Sequence[Block]) -> Update:
        """Join decoded blocks into one update: dense if that is cheaper than sparse."""
        return flatten(blocks, self._layout, self._kernels)


def _peak(values: Float32 | None) -> float:
    """Return the largest magnitude of an array; 0 for None, infinity if a value is not finite."""
    return 0.0 if values is None else max(map(peak, pieces(values)), default=0.0)
