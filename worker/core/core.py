"""One worker without IO, threads or clock: gradients in, packets out; replies in, weights out.

`WorkerCore` is the worker's side of the six policies. `begin` and `finish` are separate calls, so
that the exchange loop, the Simulator and the tests drive the same object. `UpdatePacker` is its
part that turns a change of weights into packets: codec, split over the shards, router.
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
from thinwire.ops.codecs.error_feedback import residuals_of, wrappers_of
from thinwire.ops.codecs.packets import on_host
from thinwire.ops.collectives import THROUGH_PS
from thinwire.ops.downlink import replicas
from thinwire.ops.downlink.types import Operation, RepeatedRound
from thinwire.ops.kernels.numpy_ops import KERNELS, aligned, all_finite
from thinwire.ops.methods.method import Method
from thinwire.ops.optimizers.schedule import RateInRound
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
from thinwire.worker.core.local_round import LocalRound
from thinwire.worker.core.messages import NO_FIGURES, PushRequest, ScriptFigures, ShardReply
from thinwire.worker.core.own_changes import OwnChanges

if TYPE_CHECKING:
    from thinwire.ops.kernels.base import Kernels
    from thinwire.ops.types import Float32, Int64
    from thinwire.worker.core.mirror import DeviceMirror


#: Touched rows of a tensor / its rows, up to which these alone are sent.
_MOST_ROWS = 0.75
#: Changed entries of a tensor / its entries, up to which their positions are sent with them.
_MOST_POSITIONS = 0.9


class UpdatePacker:
    """Codec and router of one worker, with their state: residuals of what was not sent.

    Attributes:
        sent: The blocks that the codec made for the last exchange, per shard.

    Args:
        spec: The shared model.
        layouts: Of every shard.
        method: The composition.
        kernels: Of the host or the device.
        seed: The run's seed and the worker's number: entropy of its random generator.
        groups: Numbers of the tensors that each optimizer of a script steps, which are coded by
            themselves; empty: one steps all.
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
        # Datagrams and the workers' own sums have no place for positions.
        self._sends_rows = not method.router.channels and method.collective == THROUGH_PS
        self._groups = [tuple(group) for group in groups] or [tuple(range(len(spec.tensors)))]
        self._codec_states = self._initial_states()
        self._router_state = method.router.init(layouts)
        self._last_packet: Packet | None = None  # slots count the tensors of its group
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
        """Code a change of the model, or of the tensors that one optimizer steps.

        Args:
            values: [num_parameters] float32 gradient or change of weights; an array, or an
                `thinwire.ops.kernels.device.DeviceArray`.
            step: Of the exchange.
            learning_rate: In use now.
            epoch: Examples the whole run has consumed / examples of the training set.
            touched: Tensor's number -> ascending rows that are not 0; left out: any may be.
            group: Number of the optimizer.
            keep: Fraction of the entries to send; None: the codec's own.

        Raises:
            thinwire.ops.codecs.base.NonFiniteUpdate: NaN or infinity in them; nothing has changed.
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
            touched={own: rows[n] for own, n in enumerate(numbers) if n in rows},
            leaves_dense=self._method.router.takes_device_arrays,
            finite=self._kernels.first_not_finite([values]) is None,  # in one call
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
        blocks = (dataclasses.replace(each, slot=numbers[each.slot]) for each in packet.blocks)
        return Packet(tuple(blocks), packet.kind)

    def rest(self, step: int, epoch: float) -> Packet:
        """Code all that the codec has kept back of changes of weights, as the next packet."""
        nothing = np.zeros(self._spec.num_parameters, np.float32)
        return self.encode(nothing, step, 1.0, epoch, keep=1.0)

    def unsent(self) -> Float32:
        """Return what error feedback has kept back, [num_parameters]."""
        kept: dict[int, Float32] = {}
        for numbers, state in zip(self._groups, self._codec_states, strict=True):
            kept |= zip(numbers, residuals_of(self._method.codec, state), strict=True)
        return self._kernels.joined([kept[number] for number in range(len(kept))])

    def _few_rows(self, touched: Mapping[int, Int64]) -> dict[int, TouchedRows]:
        """Return the touched rows of tensors that are smaller on the wire without the others."""
        found = {}
        for number, rows in touched.items() if self._sends_rows else ():
            size, length = self._spec.tensors[number].size, self._spec.tensors[number].shape[0]
            if rows.size <= _MOST_ROWS * length:
                found[number] = TouchedRows(rows, size // length)
        return found

    def empty(self) -> Packet:
        """Return the packet of an update that overflowed; there is nothing to take back of it."""
        self._last_packet = None
        return Packet((), self._method.kind)

    def route(self, packet: Packet, step: int, loss: float | None) -> list[Routed]:
        """Split a packet over the shards, and each shard's part by class of service."""
        self.sent = split_packet(packet, self._layouts)
        router = self._method.router
        if router.joins_slots and len(self._groups) == 1:
            self.sent = [joined(*each) for each in zip(self.sent, self._layouts, strict=True)]
        context = RouteContext(step, loss, self._seed, self._number, self._kernels)
        self._router_state = router.begin(self._router_state, context)
        routed = []
        for shard, blocks in enumerate(self.sent):
            part, self._router_state = router.cut(shard, blocks, self._router_state, context)
            routed.append(part)
        return routed

    def divide_change(self, change: Float32 | None) -> list[tuple[Block, ...]]:
        """Return a change of weights [num_parameters] as blocks of each shard; None: none."""
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
        """Record the entries of the last push to a shard that are known to be lost."""
        self._router_state = self._method.router.undelivered(shard, lost, self._router_state)

    def undelivered(self) -> None:
        """Take the last packet, which was rejected, back into the residuals."""
        if self._last_packet is None:
            return
        codec, router, group = self._method.codec, self._method.router, self._last_group
        state = codec.undelivered(self._last_packet, self._codec_states[group])
        self._codec_states[group] = state
        for shard in range(len(self._layouts)):
            self._router_state = router.undelivered(shard, None, self._router_state)

    def forget(self, shards: Iterable[int]) -> None:
        """Drop the residuals: shards rejected the last packet as too large."""
        self._codec_states = self._initial_states()
        for shard in shards:
            self.record_loss(shard, ())

    def save(self) -> State:
        """Return the state that survives this process."""
        first, *others = [self._kernels.as_saved(state) for state in self._codec_states]
        return {
            "codec": first,
            "more_codecs": {str(number): state for number, state in enumerate(others, 1)},
            "router": self._kernels.as_saved(self._router_state),
            "rng": json.dumps(self._rng.bit_generator.state),
        }

    def restore(self, state: State, fits: bool) -> None:
        """Restore what `save` returned; residuals only if the state `fits` the shards' model."""
        self._rng.bit_generator.state = json.loads(state["rng"])
        if fits:
            saved = {"0": state["codec"], **state.get("more_codecs", {})}
            self._codec_states = [
                self._kernels.as_kept(saved[str(number)], own)
                for number, own in enumerate(self._codec_states)
            ]
            self._router_state = state["router"]

    def _initial_states(self) -> list[State]:
        parts = (part_of_spec(self._spec, numbers) for numbers in self._groups)
        return [self._method.codec.init(part, self._kernels) for part in parts]


class WorkerCore:
    """The worker's side of the six policies."""

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
        """Start without a model, which the first replies bring.

        Args:
            spec: The shared model.
            layouts: Of every shard.
            method: The composition.
            kernels: Of the host or the device.
            seed: The run's seed and this worker's number: entropy of its random generator.
            statistics: [m] float32 moving statistics that are averaged over the workers.
            num_examples: Of the whole training set, by which codecs count epochs; 0: they stay
                in the first.
            groups: Numbers of the tensors that each optimizer of a script steps; empty: one steps
                all.
            rate_in_round: Of local steps; None: the rate that the shards have sent last.
            keeps_on_device: Whether `weights` are of the device where TensorFlow's kernels are.
        """
        self._rate_in_round = rate_in_round if method.takes_local_steps else None
        self.spec, self.layouts, self.method, self.kernels = spec, layouts, method, kernels
        self.base = aligned(spec.num_parameters)  # the model as received from the shards
        # Its like where steps are computed: on the device, or the base itself.
        on_host = method.steps_on_workers or method.collective != THROUGH_PS
        is_there = keeps_on_device and kernels.name == "tf" and not on_host
        self._mirror = self._new_mirror() if is_there else None
        self._newest = newest = self.base if self._mirror is None else self._mirror.array
        steps_itself = method.steps_on_workers and not method.takes_local_steps
        # With a momentum more is sent than a step's own change, and only the codec shows what.
        has_momentum = any(codec.keeps_momentum for codec in wrappers_of(method.codec))
        self.own = OwnChanges(self.base) if steps_itself and not has_momentum else None
        self._runs_ahead = method.overlap and steps_itself and has_momentum
        # After the local steps, or ahead of the base by what was sent; else the base itself.
        has_own = method.takes_local_steps or self._runs_ahead
        self._weights = self._new_weights() if has_own else newest
        # Where local steps begin.
        self._start = self._new_weights() if method.ahead else newest
        self.loss_scale = 0.0  # the factor of the loss for the next gradient; 0: none
        self.statistics = np.zeros(0, np.float32) if statistics is None else statistics.copy()
        stepped = self._weights if method.takes_local_steps else newest
        self.round = LocalRound(method.local, newest, self._start, stepped, spec, kernels)
        self._num_examples = num_examples
        self.aux_size = len(self.statistics) + method.num_averaged(spec.num_parameters)
        self.step = 0  # exchanges begun
        self.learning_rate = 0.0
        self.samples_of_run = 0
        self.schedule_counts: tuple[int, ...] = ()  # what each optimizer's schedule is read at
        self.stopped = False
        self.stop_reason = ""
        self.versions = [0] * len(layouts)
        self.generations = [-1] * len(layouts)
        self._packer = UpdatePacker(spec, layouts, method, kernels, seed, groups)
        self._slices = [SlicesInModel(spec, layout) for layout in layouts]
        self._unanswered: set[int] = set()  # shards that have not answered the newest push

    @property
    def on_device(self) -> bool:
        """Whether gradients may stay where TensorFlow computes them.

        Where workers sum among themselves, local steps are of the host, whose model they change.
        """
        on_host = self.method.takes_local_steps and self._mirror is None
        return self.kernels.name == "tf" and not (on_host or self.method.steps_on_workers)

    def _new_mirror(self) -> DeviceMirror:
        from thinwire.worker.core.mirror import DeviceMirror

        return DeviceMirror(self.base)

    def _new_weights(self) -> Float32:
        """Return zeros [num_parameters] where steps are computed."""
        size = self.spec.num_parameters
        return aligned(size) if self._mirror is None else self.kernels.zeros([size])[0]

    @property
    def weights(self) -> Float32:
        """The weights to compute the next gradient at: [num_parameters] float32, not a copy.

        A `thinwire.ops.kernels.device.DeviceArray` where they are kept on the device: never where
        workers sum among themselves, or scripts step themselves.
        """
        return self._weights if self.own is None else self.own.weights

    def begin(
        self,
        values: Float32,
        samples: int,
        loss: float | None,
        statistics: Float32 | None = None,
        computed_at: Sequence[int] | None = None,
        figures: ScriptFigures = NO_FIGURES,
    ) -> PushRequest | None:
        """Process one mini-batch; return an exchange, or None for a local step.

        Args:
            values: [num_parameters] float32 mean gradient at `weights`; where the method
                `steps_on_workers`, the weights that the script's step has made of `weights`. Where
                `on_device`, it may be an `thinwire.ops.kernels.device.DeviceArray`.
            samples: Examples in the mini-batch. A local step of none changes nothing, and a round
                of none is an exchange without an update.
            loss: Its mean loss; None: unknown.
            statistics: [m] the moving statistics after it, where they are averaged.
            computed_at: The shards' versions that the gradient was computed at; None: `versions`.
            figures: What a script's optimizer adds.

        Raises:
            thinwire.ops.codecs.base.NonFiniteUpdate: The values, the loss or the statistics hold
                NaN or infinity; nothing has changed, and `weights` and `statistics` are the last
                good ones.
        """
        if figures.change is not None and not all_finite(figures.change):
            raise NonFiniteUpdate(
                "the script has set weights to NaN or infinity; expected finite ones"
            )
        if figures.overflow:
            return self._begin_overflow(samples, loss, statistics, computed_at, figures)
        if self.method.takes_local_steps and not samples:
            self.round.record(0, None, figures.batch_parts)
            return self.end_round() if self.method.pacer.push_now(self.round.num_steps) else None
        if self.own is not None:
            if not self.own.is_ahead:
                self.own.step(values, loss, statistics)
            self.own.is_ahead = False
        finite = statistics is None or np.isfinite(statistics).all()
        if not (finite and (loss is None or np.isfinite(loss))):
            # Let the codec's own check refuse it.
            values = np.full(self.spec.num_parameters, np.nan, np.float32)
        rate = self.step_rate() if figures.learning_rate is None else figures.learning_rate
        if self.method.takes_local_steps:
            self.round.step(values, rate)
        packet = self._encode(*self._to_send(values, rate), figures) if self.ends_round else None
        if statistics is not None:
            self.statistics[:] = statistics
        self.round.record(samples, loss, figures.batch_parts)
        request = self._request(packet, computed_at, figures) if packet is not None else None
        if self._runs_ahead:
            self._run_ahead()
        return request

    @property
    def ends_round(self) -> bool:
        """Whether the next mini-batch is the round's last by the worker's own count."""
        return self.method.pacer.push_now(self.round.num_steps + 1)

    def step_rate(self) -> float:
        """Return the scheduled learning rate of the next step."""
        if self._rate_in_round is None:
            return self.learning_rate
        round_ = self.round
        return self._rate_in_round.rate(
            self.versions[0], self.samples_of_run, round_.num_steps, round_.samples
        )

    def _run_ahead(self) -> None:
        """Go on from the base and what was just sent, before the shards answer it.

        They add the same; their answer adds the others' changes, one step later.
        """
        np.copyto(self.weights, self.base)
        for shard in range(len(self.layouts)):
            self._add_sent(self.weights, shard)

    def _begin_overflow(
        self,
        samples: int,
        loss: float | None,
        statistics: Float32 | None,
        computed_at: Sequence[int] | None,
        figures: ScriptFigures,
    ) -> PushRequest:
        """Return the exchange of a mini-batch without an update; it takes part in its round."""
        if self.method.kind is Kind.DELTA:
            raise ValueError("an overflow of changes of weights; the script's optimizer skips it")
        if statistics is not None and np.isfinite(statistics).all():
            self.statistics[:] = statistics
        finite_loss = loss if loss is not None and np.isfinite(loss) else None
        self.round.record(samples, finite_loss, figures.batch_parts)
        return self._request(self._packer.empty(), computed_at, figures)

    def end_round(self) -> PushRequest:
        """Return the exchange of the local steps taken so far (at least one)."""
        if self.round.is_empty:
            return self._request(self._packer.empty())
        return self._request(self._encode(*self._to_send(self.weights, self.learning_rate)))

    def begin_empty(self) -> PushRequest:
        """Return the exchange of a worker without examples: it takes part, and is not merged."""
        self.round.record(0, None)
        return self._request(self._packer.empty())

    def end_training(self) -> PushRequest | None:
        """Return the exchange of all changes that the codec has kept back; None: there are none.

        Only where changes of weights travel, of which late ones are as good as others: the sum is
        what the workers have trained. With momentum the residual holds more than that sum. See the
        analysis of error feedback by its virtual iterate, Karimireddy et al., ICML 2019.
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
        loss, own_rate = self.round.loss, figures.learning_rate
        routed = self._packer.route(packet, self.step, loss)
        self._unanswered = set(range(len(self.layouts)))
        return PushRequest(
            step=self.step,
            kind=packet.kind,
            shards=self._packer.sent,
            base_versions=list(self.versions),
            generations=list(self.generations),
            samples=self.round.samples,
            local_steps=0 if self.round.is_empty else self.round.num_steps,
            learning_rate=own_rate if own_rate is not None else self.learning_rate,
            loss=loss,
            aux=self._aux() if self.aux_size else None,
            base_checksums=self._checksums(),
            routed=routed,
            lags=self._lags(computed_at),
            loss_scale=figures.loss_scale,
            overflow=figures.overflow,
            sets_rate=own_rate is not None,
            optimizer=figures.optimizer,
            repeats_batch=figures.repeats_batch,
            batch_parts=self.round.batch_parts,
            changes=self._packer.divide_change(figures.change),
        )

    def _lags(self, computed_at: Sequence[int] | None) -> Sequence[int]:
        """Return the versions since `computed_at`; after a shard's restart there may be fewer."""
        if computed_at is None:
            return ()
        return [max(0, now - then) for now, then in zip(self.versions, computed_at, strict=True)]

    def _checksums(self) -> list[int] | None:
        """Return checksums by which the shards verify their replicas of this base, at intervals."""
        if not self.method.down_codec.keeps_replicas or self.step % replicas.CHECKSUM_INTERVAL:
            return None
        places = (shard_positions(self.spec, layout) for layout in self.layouts)
        return [replicas.checksum(self.base[at] for at in shard) for shard in places]

    def _aux(self) -> Float32:
        if not self.method.num_averaged(self.spec.num_parameters):
            return self.statistics.copy()
        return np.concatenate([self.statistics, self.round.pack()])

    def finish(self, replies: Sequence[ShardReply]) -> Float32:
        """Apply one reply of every shard, in order; return the weights to train on."""
        for shard, reply in enumerate(replies):
            self.receive(shard, reply)
        if self._runs_ahead:
            np.copyto(self.weights, self.base)
        if self.own is not None:
            self.own.catch_up()
        return self.restart_from_base()

    def settle(self, replies: Sequence[ShardReply | None]) -> Float32:
        """Apply what came of a push, a reply of every shard; return the weights to train on.

        Args:
            replies: None: the shard refused the push as not finite.
        """
        for shard, reply in enumerate(replies):
            if reply is not None:
                self.receive(shard, reply)
        self.handle_refusals(replies)
        return self.restart_from_base()

    def receive(self, shard: int, reply: ShardReply) -> None:
        """Apply one shard's reply to the base model."""
        if reply.operation is Operation.SET_REST:
            self._add_sent(self.base, shard)
        for each in reply.rounds:
            self._repeat(shard, each)
        self._change(self.base, shard, reply.blocks, int(reply.operation is Operation.ADD))
        if self.own is not None and shard in self._unanswered:
            self._add_sent(self.own.unsent, shard, -1)
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
        """Add what was sent last to a shard to a model [num_parameters], or subtract it (-1)."""
        self._change(weights, shard, self._sent_to(shard), sign)

    def _sent_to(self, shard: int) -> list[Block]:
        """Return the blocks that were sent last to a shard, as it decodes them."""
        return [on_host(expanded(block)) for block in self._packer.sent[shard]]

    def _repeat(self, shard: int, round_: RepeatedRound) -> None:
        """Change the base model by a round as the shard does, by the same functions in order."""
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
        """Yield the views of a model [num_parameters] that a shard's blocks are to change."""
        for place, block in self._slices[shard].places(blocks):
            if self._mirror is not None and weights is self.base:
                self._mirror.note(place.start, block.size, block.indices)
            yield weights[place], block

    def _change(self, weights: Float32, shard: int, blocks: Iterable[Block], sign: int) -> None:
        """Add a shard's blocks to a model [num_parameters] (1, -1), or overwrite it by them (0)."""
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
        """Adopt the averages over the workers."""
        num_statistics = len(self.statistics)
        self.statistics[:] = means[:num_statistics]
        if len(means) > num_statistics:
            self.round.unpack(means[num_statistics:])

    def restart_from_base(self) -> Float32:
        """Begin the next local steps at the shards' model, or ahead of it; return the weights."""
        if self._mirror is not None:
            self._mirror.catch_up()
        if self.method.ahead:
            self._start[:] = self._newest
            unsent = self._packer.unsent()
            if self._mirror is None:
                unsent = np.asarray(unsent)  # of a codec that works on the device
            self._start += unsent * np.float32(self.method.ahead)
        self.round.restart()
        return self.weights

    def resume_round(self) -> Float32:
        """Continue the restored local steps, if the shards still have the model they began at.

        Returns:
            The weights to train on.
        """
        statistics = self.round.resume(self.versions)
        if statistics is not None:
            self.statistics[:] = statistics
        return self.weights

    def handle_refusals(self, replies: Sequence[ShardReply | None]) -> None:
        """Handle the rejections of the last push; a reply of None: it was not finite."""
        outliers = [shard for shard, reply in enumerate(replies) if reply and reply.refused]
        if outliers:
            self._forget(outliers)
        elif replies[0] is None:
            self.undelivered()

    def _forget(self, shards: Iterable[int]) -> None:
        """Drop residuals and velocities: they hold what made the last push too large.

        They would send it again and again, a part at a time.
        """
        self._packer.forget(shards)
        self.round.forget()
        if self.own is not None:
            self.own.forget()

    def undelivered(self) -> None:
        """Take the last packet, which was rejected, back into the residuals."""
        self._packer.undelivered()
        self._unanswered.clear()

    def save(self) -> State:
        """Return the state that survives this process, with the local steps not yet pushed."""
        return {
            **self.round.save(self.versions, self.statistics),
            "step": self.step,
            **self._packer.save(),
            **({} if self.own is None else {"unsent": self._unsent(self.own)}),
        }

    def restore(self, state: State, last_applied_step: int) -> bool:
        """Restore what `save` returned.

        The residual is used only if the shards applied exactly the saved steps; otherwise it would
        send entries twice, or at the wrong place.

        Returns:
            Whether the codec's state was used.
        """
        fits = bool(state["step"] == last_applied_step)
        self._packer.restore(state, fits)
        self.round.restore(state, fits)
        if self.own is not None and fits:
            np.copyto(self.own.unsent, state["unsent"])
        self.step = last_applied_step
        return fits

    def _unsent(self, own: OwnChanges) -> Float32:
        """Return what is unsent of a script's changes once the newest push is applied: [n]."""
        unsent = own.unsent.copy()
        for shard in self._unanswered:
            self._add_sent(unsent, shard, -1)
        return unsent

    def _to_send(self, values: Float32, rate: float) -> tuple[Float32, float]:
        """Return what an exchange sends, and the learning rate that goes with it."""
        if self.method.takes_local_steps:
            return self.weights - self._start, rate
        if self.own is not None:
            return self.own.step_taken, 1.0
        return self.method.local.as_gradient(self.weights, values, rate)

    def _encode(self, values: Float32, rate: float, figures: ScriptFigures = NO_FIGURES) -> Packet:
        step = self.step + 1
        return self._packer.encode(
            values, step, rate, self._epoch, figures.touched, figures.optimizer
        )

    @property
    def _epoch(self) -> float:
        return self.samples_of_run / self._num_examples if self._num_examples else 0.0
