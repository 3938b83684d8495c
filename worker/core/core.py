"""One worker's computation: turns gradients into pushes, and shards' replies into weights.

The class `WorkerCore` runs the worker's side of a training method (pacer, codec, router and
others), without IO, threads or clock. The method `begin` starts an exchange and `finish` ends it.
Between `begin` and `finish`, the caller (the exchange loop, the Simulator or a test) sends and
receives. The class `UpdatePacker` turns a change of weights into packets: it runs the codec, splits
the result over the shards, and runs the router.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from thinwire.ops.aggregation.aggregates import Mean
from thinwire.ops.codecs.base import EncodeContext, NonFiniteUpdate, TouchedRows
from thinwire.ops.codecs.error_feedback import residuals_of
from thinwire.ops.codecs.packets import on_host
from thinwire.ops.collectives import THROUGH_PS
from thinwire.ops.downlink import replicas
from thinwire.ops.downlink.types import Operation, RepeatedRound
from thinwire.ops.kernels.numpy_ops import KERNELS, aligned, all_finite
from thinwire.ops.methods.method import Method
from thinwire.ops.optimizers.schedule import RateInRound
from thinwire.ops.push_head import PushOrigin
from thinwire.ops.routing.base import LostEntries, RouteContext, Routed
from thinwire.ops.sharding.flat_updates import SlicesInModel, blocks_of, flatten, joined
from thinwire.ops.sharding.split import part_of_spec, shard_positions, split_packet
from thinwire.ops.types import (
    Block,
    CodedValues,
    Kind,
    ModelSpec,
    Packet,
    ShardLayout,
    State,
    where_of,
)
from thinwire.ops.wire.low_rank import expanded
from thinwire.worker.core.local_model import ScriptOwned, WorkerArrays, local_model
from thinwire.worker.core.messages import NO_FIGURES, PushRequest, ScriptFigures, ShardReply

if TYPE_CHECKING:
    from thinwire.ops.kernels.base import Kernels
    from thinwire.ops.types import Float32, Int64
    from thinwire.worker.core.local_round import LocalRound
    from thinwire.worker.core.mirror import DeviceMirror


#: Largest fraction of a tensor's rows that a push sends as single rows. If more rows change, the
#: push sends the whole tensor.
_MOST_ROWS = 0.75
#: Largest fraction of a tensor's entries, changed by a script's own code, that a push sends with
#: their positions. If more entries change, the push sends the whole tensor's change without
#: positions.
_MOST_POSITIONS = 0.9


class UpdatePacker:
    """Codec and router of one worker, with their state, for example residuals (unsent entries).

    Attributes:
        sent: For each shard, the blocks of values that the last exchange sent to the shard.

    Args:
        spec: Paths, shapes and dtypes of the shared model's variables.
        layouts: For each shard, the slices of the model's variables that it stores.
        method: Training method (policies and settings) of the run.
        kernels: Set of array functions (`thinwire.ops.kernels`), for arrays in host memory or in
            device memory.
        seed: Seed of the random generators of codec and router: the run's seed and the worker's
            number.
        groups: For each optimizer of a script, the numbers of the tensors that the optimizer
            updates. The codec encodes each group separately. Empty if one optimizer updates all
            tensors.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layouts: tuple[ShardLayout, ...],
        method: Method,
        kernels: Kernels,
        seed: Sequence[int],
        groups: Sequence[Sequence[int]] = (),
    ) -> None:
        self._method, self._kernels, self._layouts = method, kernels, layouts
        self._spec = spec
        self._offsets = spec.offsets
        self._seed, self._number = seed[0], seed[-1]
        self._rng = np.random.default_rng(seed)
        # Messages in datagrams, and sums among workers, cannot carry the positions of single rows.
        self._sends_rows = not method.router.channels and method.collective == THROUGH_PS
        self._groups = [tuple(group) for group in groups] or [tuple(range(len(spec.tensors)))]
        self._codec_states = self._initial_states()
        self._router_state = method.router.init(layouts)
        # The last packet as the codec returned it, whose slots (variable numbers) count within the
        # optimizer's group `_last_group`, as the codec's `undelivered` expects. The method `encode`
        # returns a packet with slots that count within the whole model.
        self._last_packet: Packet | None = None
        self._last_group = 0
        self.sent: list[tuple[Block, ...]] = []

    def encode(
        self,
        values: Float32,
        step: int,
        learning_rate: float,
        epoch: float,
        touched: Mapping[int, Int64] | None = None,
        group: int = 0,
        keep: float | None = None,
    ) -> Packet:
        """Encode a change of the model's weights, or of the tensors that one optimizer updates.

        Args:
            values: [num_parameters] float32 gradient or change of weights: a numpy array, or an
                array on the device of the kernels.
            step: Number of the worker's exchange with the shards, counted from 1.
            learning_rate: Learning rate of the training step whose gradient or change is encoded.
            epoch: Training epoch as a fraction: number of examples that all workers have consumed,
                divided by the size of the training set.
            touched: Maps a tensor's number to ascending indices of the rows where the gradient may
                be nonzero. A tensor that is missing may be nonzero anywhere.
            group: Number of the script's optimizer that updates the encoded tensors, from 0.
            keep: Fraction of the gradient's entries to send; None for the fraction in the codec's
                settings.

        Raises:
            thinwire.ops.codecs.base.NonFiniteUpdate: The array `values` holds NaN or infinity. The
                packer's state is unchanged.
        """
        numbers = self._groups[group]
        tensors = [values[self._offsets[n] : self._offsets[n + 1]] for n in numbers]
        rows = self._few_rows(touched or {})
        context = EncodeContext(
            step=step,
            learning_rate=learning_rate,
            rng=self._rng,
            kernels=self._kernels,
            epoch=epoch,
            touched={slot: rows[n] for slot, n in enumerate(numbers) if n in rows},
            leaves_dense=self._method.router.uses_datagrams,
            finite=self._kernels.first_not_finite([values]) is None,  # one call for all tensors
            keep=keep,
        )
        packet, self._codec_states[group] = self._method.codec.encode(
            tensors, self._codec_states[group], context
        )
        if packet.kind is not self._method.kind:
            packet = dataclasses.replace(packet, kind=self._method.kind)
        self._last_packet, self._last_group = packet, group
        if len(numbers) == len(self._spec.tensors):
            return packet
        blocks = (dataclasses.replace(block, slot=numbers[block.slot]) for block in packet.blocks)
        return Packet(tuple(blocks), packet.kind)

    def rest(self, step: int, epoch: float) -> Packet:
        """Return the codec's whole residual (all unsent changes of weights) as the next packet."""
        nothing = np.zeros(self._spec.num_parameters, np.float32)
        return self.encode(nothing, step, 1.0, epoch, keep=1.0)

    def unsent(self) -> Float32:
        """Return the unsent changes in the error feedback's residual, [num_parameters] float32."""
        residuals: dict[int, Float32] = {}
        for numbers, state in zip(self._groups, self._codec_states, strict=True):
            residuals |= zip(numbers, residuals_of(self._method.codec, state), strict=True)
        return self._kernels.joined([residuals[number] for number in range(len(residuals))])

    def _few_rows(self, touched: Mapping[int, Int64]) -> dict[int, TouchedRows]:
        """Return the touched rows of each tensor that takes fewer bytes by rows than as a whole."""
        few = {}
        for number, rows in touched.items() if self._sends_rows else ():
            size, length = self._spec.tensors[number].size, self._spec.tensors[number].shape[0]
            if rows.size <= _MOST_ROWS * length:
                few[number] = TouchedRows(rows, size // length)
        return few

    def empty(self) -> Packet:
        """Return a packet without blocks, after which `undelivered` changes no residuals."""
        self._last_packet = None
        return Packet((), self._method.kind)

    def route(self, packet: Packet, step: int, loss: float | None) -> list[Routed]:
        """Split a packet over the shards, and each shard's blocks by class of service.

        Args:
            packet: Packet of coded changes that the exchange sends to the shards.
            step: Number of the worker's exchange with the shards, counted from 1.
            loss: Mean loss of the mini-batches in the packet; None if the loss is unknown.
        """
        self.sent = split_packet(packet, self._layouts)
        router = self._method.router
        if router.joins_slots and len(self._groups) == 1:
            self.sent = [joined(*part) for part in zip(self.sent, self._layouts, strict=True)]
        context = RouteContext(step, loss, self._seed, self._number, self._kernels)
        self._router_state = router.begin(self._router_state, context)
        routed = []
        for shard, blocks in enumerate(self.sent):
            part, self._router_state = router.cut(shard, blocks, self._router_state, context)
            routed.append(part)
        return routed

    def divide_change(self, change: Float32 | None) -> list[tuple[Block, ...]]:
        """Return a script's change of weights [num_parameters] as one tuple of blocks per shard.

        `divide_change` returns an empty tuple if `change` is None: the script has changed no
        weights.
        """
        if change is None:
            return []
        blocks = []
        for slot, (start, stop) in enumerate(itertools.pairwise(self._offsets)):
            values = change[start:stop]
            indices = np.flatnonzero(values)
            if not indices.size:
                continue
            if indices.size < _MOST_POSITIONS * values.size:
                coded = CodedValues("float32", values[indices])
                blocks.append(Block(slot, values.size, indices, coded))
            else:
                blocks.append(Block(slot, values.size, None, CodedValues("float32", values)))
        return split_packet(Packet(tuple(blocks), self._method.kind), self._layouts)

    def record_loss(self, shard: int, lost: Sequence[LostEntries]) -> None:
        """Record which entries of the last push to a shard were lost on the network."""
        self._router_state = self._method.router.undelivered(shard, lost, self._router_state)

    def undelivered(self) -> None:
        """Add the last packet's values, which shards rejected, to the residuals (unsent values)."""
        if self._last_packet is None:
            return
        codec, router, group = self._method.codec, self._method.router, self._last_group
        state = codec.undelivered(self._last_packet, self._codec_states[group])
        self._codec_states[group] = state
        for shard in range(len(self._layouts)):
            self._router_state = router.undelivered(shard, None, self._router_state)

    def forget(self, shards: Iterable[int]) -> None:
        """Drop all residuals (unsent entries): shards rejected the last packet as too large."""
        self._codec_states = self._initial_states()
        for shard in shards:
            self.record_loss(shard, ())

    def save(self) -> State:
        """Return the packer's state, which a later process of this worker restores."""
        first, *further = [self._kernels.as_saved(state) for state in self._codec_states]
        return {
            "codec": first,
            "more_codecs": {str(number): state for number, state in enumerate(further, 1)},
            "router": self._kernels.as_saved(self._router_state),
            "rng": json.dumps(self._rng.bit_generator.state),
        }

    def restore(self, state: State, fits: bool) -> None:
        """Restore a state of the packer that `save` returned.

        Args:
            state: State of the packer that `save` returned, in this or an earlier process.
            fits: True if the shards applied exactly the pushes up to the step at which the state
                was saved. If False, the saved residuals are dropped.
        """
        self._rng.bit_generator.state = json.loads(state["rng"])
        if fits:
            saved = {"0": state["codec"], **state["more_codecs"]}
            self._codec_states = [
                self._kernels.as_kept(saved[str(number)], present)
                for number, present in enumerate(self._codec_states)
            ]
            self._router_state = state["router"]

    def _initial_states(self) -> list[State]:
        parts = (part_of_spec(self._spec, numbers) for numbers in self._groups)
        return [self._method.codec.init(part, self._kernels) for part in parts]


class WorkerCore:
    """One worker's training engine: the worker's side of the method's pacer, codec and router.

    Attributes:
        base: [num_parameters] float32 weights as received from the shards, in host memory.
        local: Weights at which to compute the next gradient, and what happens between two
            exchanges.
        statistics: [m] float32 moving statistics (of batch normalization) that shard 0 averages
            over the workers.
        aux_size: Number of statistics and optimizer values that shard 0 averages over the workers.
        step: Number of exchanges with the shards that this worker has started.
        learning_rate: Newest learning rate of the run's schedule, from shard 0.
        loss_scale: Factor by which the loss is multiplied for the next gradient; 0 without loss
            scaling.
        samples_of_run: Number of examples that all workers of the run have consumed.
        schedule_counts: For each optimizer, the step count at which its learning-rate schedule is
            evaluated.
        stopped: True if shard 0 has sent that the training is over.
        stop_reason: Reason why shard 0 stopped the training, as a text for people.
        versions: For each shard, the version of its weights in `base`.
        generations: For each shard, the number of restarts of the shard before it sent its weights
            in `base`; -1 before the first reply.
    """

    def __init__(
        self,
        spec: ModelSpec,
        layouts: tuple[ShardLayout, ...],
        method: Method,
        kernels: Kernels,
        seed: Sequence[int],
        statistics: Float32 | None = None,
        num_examples: int = 0,
        groups: Sequence[Sequence[int]] = (),
        rate_in_round: RateInRound | None = None,
        keeps_on_device: bool = False,
    ) -> None:
        """Create the engine with weights of zero, which the first replies of the shards replace.

        Args:
            spec: Paths, shapes and dtypes of the shared model's variables.
            layouts: For each shard, the slices of the model's variables that it stores.
            method: Training method (policies and settings) of the run.
            kernels: Set of array functions (`thinwire.ops.kernels`), for arrays in host memory or
                in device memory.
            seed: Seed of the random generators of codec and router: the run's seed and this
                worker's number.
            statistics: [m] float32 moving statistics (of batch normalization) that shard 0 averages
                over the workers.
            num_examples: Number of examples of the whole training set, from which codecs compute
                the epoch. With 0, codecs always work as in the first epoch.
            groups: For each optimizer of a script, the numbers of the tensors that the optimizer
                updates. Empty if one optimizer updates all tensors.
            rate_in_round: Learning-rate schedule for the local steps within a round; None to use
                the learning rate that shard 0 sent last.
            keeps_on_device: True to store `weights` on the device, if the kernels have one.
        """
        self._rate_in_round = rate_in_round if method.takes_local_steps else None
        self.spec, self.layouts, self.method, self.kernels = spec, layouts, method, kernels
        self.base = aligned(spec.num_parameters)
        on_host = method.steps_on_workers or method.collective != THROUGH_PS
        is_there = keeps_on_device and kernels.has_device and not on_host
        self._mirror = self._new_mirror() if is_there else None
        newest = self.base if self._mirror is None else self._mirror.array
        self.local = local_model(
            WorkerArrays(
                method, spec, kernels, self.base, newest, self._new_weights, self._add_sent
            )
        )
        self.loss_scale = 0.0
        self.statistics = np.zeros(0, np.float32) if statistics is None else statistics.copy()
        self._num_examples = num_examples
        self.aux_size = len(self.statistics) + method.num_averaged(spec.num_parameters)
        self.step = 0
        self.learning_rate = 0.0
        self.samples_of_run = 0
        self.schedule_counts: tuple[int, ...] = ()
        self.stopped = False
        self.stop_reason = ""
        self.versions = [0] * len(layouts)
        self.generations = [-1] * len(layouts)
        self._packer = UpdatePacker(spec, layouts, method, kernels, seed, groups)
        self._slices = [SlicesInModel(spec, layout) for layout in layouts]
        # Numbers of the shards that have not answered the newest push yet.
        self._unanswered: set[int] = set()

    @property
    def on_device(self) -> bool:
        """True if gradients may stay in memory of the device that computes them.

        The property `on_device` is False for local steps without a copy of the weights on the
        device, and for steps of a script's own optimizer: both change weights on the host.
        """
        on_host = self.method.takes_local_steps and self._mirror is None
        return self.kernels.has_device and not (on_host or self.method.steps_on_workers)

    def _new_mirror(self) -> DeviceMirror:
        from thinwire.worker.core.mirror import DeviceMirror

        return DeviceMirror(self.base, self.kernels)

    def _new_weights(self) -> Float32:
        """Return weights of zero [num_parameters] on the host or device that computes steps."""
        size = self.spec.num_parameters
        return aligned(size) if self._mirror is None else self.kernels.zeros([size])[0]

    @property
    def weights(self) -> Float32:
        """Weights [num_parameters] float32 at which to compute the next gradient; not a copy.

        The weights are an array of the kernels' framework if they are stored on the device. The
        weights are on the host if workers sum updates among themselves, or if a script's own
        optimizer updates them.
        """
        return self.local.weights

    @property
    def own(self) -> ScriptOwned | None:
        """The local model if the script's own optimizer steps, with its unsent changes."""
        return self.local if isinstance(self.local, ScriptOwned) else None

    @property
    def round(self) -> LocalRound:
        """Counts of the mini-batches since the last exchange, and the local optimizer."""
        return self.local.round

    def begin(
        self,
        values: Float32,
        samples: int,
        loss: float | None,
        statistics: Float32 | None = None,
        computed_at: Sequence[int] | None = None,
        figures: ScriptFigures = NO_FIGURES,
    ) -> PushRequest | None:
        """Process one mini-batch; return the exchange to send, or None if the step was local.

        Args:
            values: [num_parameters] float32 mean gradient at `weights`. If the method
                `steps_on_workers`, the weights after the script's step, which started at `weights`.
                If `on_device` is true, `values` may be an array on the device of the kernels.
            samples: Number of training examples in the mini-batch. A local step without examples
                changes no weights. If a round has no examples, its exchange has no update.
            loss: Mean loss over the mini-batch; None if unknown.
            statistics: [m] moving statistics after the mini-batch; None if shard 0 does not average
                statistics.
            computed_at: For each shard, the version of the weights that the gradient was computed
                at. None if the gradient was computed at the present `versions`.
            figures: Settings of the mini-batch (learning rate, loss scale) from a script and its
                optimizer.

        Raises:
            thinwire.ops.codecs.base.NonFiniteUpdate: The values, the loss or the statistics hold
                NaN or infinity. The engine is unchanged: `weights` and `statistics` keep their last
                finite values.
        """
        if figures.change is not None and not all_finite(figures.change):
            raise NonFiniteUpdate(
                "the script has set weights to NaN or infinity; expected finite weights"
            )
        if figures.head.overflow:
            return self._begin_overflow(samples, loss, statistics, computed_at, figures)
        if self.local.takes_local_steps and not samples:
            self.round.record(0, None, figures.head.batch_parts)
            return self.end_round() if self.method.pacer.push_now(self.round.num_steps) else None
        finite = statistics is None or np.isfinite(statistics).all()
        if not (finite and (loss is None or np.isfinite(loss))):
            # Replace the values by NaN, so that the check of `values` fails too. The local model
            # and the codec check `values` before they change any state, so that an error leaves the
            # engine unchanged.
            values = np.full(self.spec.num_parameters, np.nan, np.float32)
        set_rate = figures.head.learning_rate
        rate = self.step_rate() if set_rate is None else set_rate
        self.local.take(values, rate, loss, statistics)
        packet = None
        if self.ends_round:
            packet = self._encode(*self.local.to_push(values, rate), figures)
        if statistics is not None:
            self.statistics[:] = statistics
        self.round.record(samples, loss, figures.head.batch_parts)
        if packet is None:
            return None
        request = self._request(packet, computed_at, figures)
        self.local.pushed(range(len(self.layouts)))
        return request

    @property
    def ends_round(self) -> bool:
        """True if, by this worker's count, the next mini-batch is the last of its round."""
        return self.method.pacer.push_now(self.round.num_steps + 1)

    def step_rate(self) -> float:
        """Return the learning rate of the run's schedule for this worker's next step."""
        if self._rate_in_round is None:
            return self.learning_rate
        round_ = self.round
        return self._rate_in_round.rate(
            self.versions[0], self.samples_of_run, round_.num_steps, round_.samples
        )

    def _begin_overflow(
        self,
        samples: int,
        loss: float | None,
        statistics: Float32 | None,
        computed_at: Sequence[int] | None,
        figures: ScriptFigures,
    ) -> PushRequest:
        """Return an exchange without an update, for a mini-batch with overflowed gradients.

        After an overflow, the worker pushes an empty update, so that other workers need not wait
        for the worker.
        """
        if self.method.kind is Kind.DELTA:
            raise ValueError(
                "an overflow of the loss scale was reported in a run whose workers send changes "
                "of weights; expected the script's optimizer to skip the step"
            )
        if statistics is not None and np.isfinite(statistics).all():
            self.statistics[:] = statistics
        finite_loss = loss if loss is not None and np.isfinite(loss) else None
        self.round.record(samples, finite_loss, figures.head.batch_parts)
        return self._request(self._packer.empty(), computed_at, figures)

    def end_round(self) -> PushRequest:
        """Return an exchange that pushes the change of weights by this round's local steps."""
        if self.round.is_empty:
            return self._request(self._packer.empty())
        return self._request(self._encode(*self.local.to_push(self.weights, self.learning_rate)))

    def begin_empty(self) -> PushRequest:
        """Return an exchange without an update, for a round in which this worker has no rows."""
        self.round.record(0, None)
        return self._request(self._packer.empty())

    def end_training(self) -> PushRequest | None:
        """Return an exchange with all unsent changes of weights, or None if all are sent.

        The exchange at the end of training exists only for changes of weights without momentum.
        Without momentum, the sum of a worker's changes of weights is the result of the training, so
        unsent changes are valid at any later time. With momentum, the residual would hold more than
        the unsent changes of weights. The analysis of error feedback by its virtual iterate
        (Karimireddy et al., ICML 2019) explains why unsent changes are valid.
        """
        if self.own is None or not self.method.codec.sends_fraction:
            return None
        packet = self._packer.rest(self.step + 1, self._epoch)
        if not any(block.values.data.any() for block in packet.blocks):
            return None
        self.round.record(0, None)
        return self._request(packet)

    def _request(
        self,
        packet: Packet,
        computed_at: Sequence[int] | None = None,
        figures: ScriptFigures = NO_FIGURES,
    ) -> PushRequest:
        self.step += 1
        loss = self.round.loss
        routed = self._packer.route(packet, self.step, loss)
        self._unanswered = set(range(len(self.layouts)))
        head = dataclasses.replace(
            figures.head,
            step=self.step,
            samples=self.round.samples,
            local_steps=0 if self.round.is_empty else self.round.num_steps,
            loss=loss,
            batch_parts=self.round.batch_parts,
            schedule_rate=self.learning_rate,
        )
        return PushRequest(
            head=head,
            origins=self._origins(computed_at),
            kind=packet.kind,
            shards=self._packer.sent,
            aux=self._aux() if self.aux_size else None,
            routed=routed,
            changes=self._packer.divide_change(figures.change),
        )

    def _origins(self, computed_at: Sequence[int] | None) -> list[PushOrigin]:
        """Return, for each shard, the model that this worker holds.

        Args:
            computed_at: For each shard, the version that the update was computed at; None for the
                present versions.
        """
        then = self.versions if computed_at is None else computed_at
        rows = zip(self.versions, self.generations, then, self._checksums(), strict=True)
        # A restarted shard may continue from a checkpoint with a smaller version. The number of
        # versions by which a gradient is late is then 0 instead of negative.
        return [
            PushOrigin(version, generation, max(0, version - before), checksum)
            for version, generation, before, checksum in rows
        ]

    def _checksums(self) -> Sequence[int | None]:
        """Return the base weights' checksum for each shard; None if no checksums are due."""
        if not self.method.down_codec.keeps_replicas or self.step % replicas.CHECKSUM_INTERVAL:
            return [None] * len(self.layouts)
        places = (shard_positions(self.spec, layout) for layout in self.layouts)
        return [replicas.checksum(self.base[at] for at in shard) for shard in places]

    def _aux(self) -> Float32:
        if not self.method.num_averaged(self.spec.num_parameters):
            return self.statistics.copy()
        return np.concatenate([self.statistics, self.round.pack()])

    def finish(self, replies: Sequence[ShardReply]) -> Float32:
        """Apply all shards' replies to a push to the weights; return the weights to train on."""
        for shard, reply in enumerate(replies):
            self.receive(shard, reply)
        self.local.catch_up()
        return self.restart_from_base()

    def settle(self, replies: Sequence[ShardReply | None]) -> Float32:
        """Apply shards' replies to a push that may be rejected; return the weights to train on.

        Args:
            replies: For each shard, its reply, or None if the shard rejected the push as not
                finite.
        """
        for shard, reply in enumerate(replies):
            if reply is not None:
                self.receive(shard, reply)
        self.handle_refusals(replies)
        return self.restart_from_base()

    def receive(self, shard: int, reply: ShardReply) -> None:
        """Apply one shard's reply to the base weights."""
        # A shard's reply with SET_REST holds only entries that differ from the base weights plus
        # this worker's push. So add the push first, and let the reply's blocks overwrite the result
        # afterwards.
        if reply.operation is Operation.SET_REST:
            self._add_sent(self.base, shard)
        for relayed in reply.rounds:
            self._repeat(shard, relayed)
        self._change(self.base, shard, reply.blocks, int(reply.operation is Operation.ADD))
        # The set `_unanswered` makes the call happen once per push: the reply to a later pull does
        # not answer the push again.
        if shard in self._unanswered:
            self.local.answered(shard)
            self._unanswered.discard(shard)
        if reply.lost is not None:
            self._packer.record_loss(shard, reply.lost)
        self.versions[shard], self.generations[shard] = reply.version, reply.generation
        if shard == 0:
            self.learning_rate, self.samples_of_run = reply.learning_rate, reply.samples
            self.schedule_counts = reply.schedule_counts
            self.loss_scale = reply.loss_scale
            self.stopped = self.stopped or reply.stop
            self.stop_reason = self.stop_reason or reply.stop_reason
            if reply.aux is not None:
                self._adopt_means(reply.aux)

    def _add_sent(self, weights: Float32, shard: int, sign: int = 1) -> None:
        """Add (sign 1) or subtract (-1) the last push to a shard in weights [num_parameters]."""
        self._change(weights, shard, self._sent_to(shard), sign)

    def _sent_to(self, shard: int) -> list[Block]:
        """Return the blocks of the last push to a shard, with the values that the shard decodes."""
        return [on_host(expanded(block)) for block in self._packer.sent[shard]]

    def _repeat(self, shard: int, round_: RepeatedRound) -> None:
        """Apply the updates of all workers in a round to the base weights, as the shard did."""
        # The base weights must equal the shard's weights bit for bit. Float addition is not
        # associative, so the updates are merged with the shard's functions and in the shard's
        # order.
        layout = self.layouts[shard]
        updates = [
            flatten(self._sent_to(shard) if blocks is None else blocks, layout, KERNELS)
            for blocks in round_.updates
        ]
        merged = Mean().merge(updates, layout.size)
        for target, block in self._changing(self.base, shard, blocks_of(merged, layout)):
            KERNELS.apply(target, block.indices, block.values.data, round_.rate)

    def _changing(
        self, weights: Float32, shard: int, blocks: Iterable[Block]
    ) -> Iterator[tuple[Float32, Block]]:
        """Yield each block of a shard with the view of the weights [num_parameters] to change."""
        for place, block in self._slices[shard].places(blocks):
            # Record every change of the base weights, because `DeviceMirror.catch_up` copies only
            # recorded entries to the device.
            if self._mirror is not None and weights is self.base:
                self._mirror.note(place.start, block.size, block.indices)
            yield weights[place], block

    def _change(self, weights: Float32, shard: int, blocks: Iterable[Block], sign: int) -> None:
        """Add (sign 1), subtract (-1) or set (0) a shard's blocks in weights [num_parameters]."""
        for target, block in self._changing(weights, shard, blocks):
            values = self.kernels.dequantise(block.values)
            change = np.add if sign > 0 else np.subtract
            if not sign:
                target[where_of(block.indices)] = values
            elif block.indices is None:
                change(target, values, out=target)
            else:
                change.at(target, block.indices, values)

    def _adopt_means(self, means: Float32) -> None:
        """Replace statistics and local optimizer values by their means over the workers."""
        num_statistics = len(self.statistics)
        self.statistics[:] = means[:num_statistics]
        if len(means) > num_statistics:
            self.round.unpack(means[num_statistics:])

    def restart_from_base(self) -> Float32:
        """Start the next round of local steps at the shards' weights; return its weights."""
        # Update the copy of the weights on the device first, because a round starts at this copy.
        if self._mirror is not None:
            self._mirror.catch_up()
        self.local.restart(self._packer.unsent)
        return self.weights

    def resume_round(self) -> Float32:
        """Continue the restored local steps if the shards have the same versions as when saved.

        Returns:
            Weights to train on, [num_parameters] float32.
        """
        statistics = self.round.resume(self.versions)
        if statistics is not None:
            self.statistics[:] = statistics
        return self.weights

    def handle_refusals(self, replies: Sequence[ShardReply | None]) -> None:
        """Correct the residuals (unsent entries) after shards rejected the last push.

        Args:
            replies: For each shard, its reply, or None if the shard rejected the push as not
                finite.
        """
        outliers = [shard for shard, reply in enumerate(replies) if reply and reply.refused]
        if outliers:
            self._forget(outliers)
        elif replies[0] is None:
            self.undelivered()

    def _forget(self, shards: Iterable[int]) -> None:
        """Drop residuals and velocities after shards rejected the last push as too large.

        The residuals and velocities hold the rejected values, which later pushes would send again
        in parts.
        """
        self._packer.forget(shards)
        self.local.forget()

    def undelivered(self) -> None:
        """Add the last push's values, which shards rejected, to the residuals (unsent values)."""
        self._packer.undelivered()
        self._unanswered.clear()

    def save(self) -> State:
        """Return the engine's state, including the local steps that no push has sent yet."""
        return {
            **self.round.save(self.versions, self.statistics),
            "step": self.step,
            **self._packer.save(),
            **self.local.save(self._unanswered),
        }

    def restore(self, state: State, last_applied_step: int) -> bool:
        """Restore a state of the engine that `save` returned.

        Args:
            state: State of the engine that `save` returned, in this or an earlier process.
            last_applied_step: Number of this worker's last exchange that the shards applied.

        Returns:
            True if the codec's state was restored; False if the saved residuals were dropped.
        """
        # The saved residual (unsent entries) belongs to the saved step. If the shards applied a
        # later push, the residual would send entries a second time. If the shards did not apply the
        # saved step, the entries of that step would be missing.
        fits = bool(state["step"] == last_applied_step)
        self._packer.restore(state, fits)
        self.round.restore(state, fits)
        if fits:
            self.local.restore(state)
        self.step = last_applied_step
        return fits

    def _encode(self, values: Float32, rate: float, figures: ScriptFigures = NO_FIGURES) -> Packet:
        step = self.step + 1
        return self._packer.encode(
            values, step, rate, self._epoch, figures.touched, figures.head.optimizer
        )

    @property
    def _epoch(self) -> float:
        return self.samples_of_run / self._num_examples if self._num_examples else 0.0
