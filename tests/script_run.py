"""A script's optimizer on the PS, in one process: real cores and messages, gradients by rows."""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile

import keras
import numpy as np

from tests.virtual.toy import method
from thinwire.ops.kernels import load_kernels
from thinwire.ops.methods.builder import adopt
from thinwire.ops.offer import Offer, read_offer
from thinwire.ops.optimizers.described import describe, describe_constraints
from thinwire.ops.optimizers.schedule import Budget, Schedule
from thinwire.ops.optimizers.script import server_update
from thinwire.ops.optimizers.slots import (
    OwnSlots,
    cut,
    decode,
    divide,
    encode,
    join,
    slot_places,
)
from thinwire.ops.sharding.split import (
    part_of_layout,
    part_of_spec,
    shard_positions,
    shard_spec,
)
from thinwire.ops.types import ModelSpec, TensorSpec
from thinwire.ps.core import events
from thinwire.ps.core.core import PsCore
from thinwire.ps.core.members import CoreConfig
from thinwire.ps.core.membership import Coordinator, FollowerMembership
from thinwire.ps.wire.claims import ClaimBounds
from thinwire.ps.wire.push_decoder import PushDecoder
from thinwire.runtime.persistence.checkpoint import Checkpoints
from thinwire.simulator.messages import decoded
from thinwire.worker.client.messages import PushEncoder
from thinwire.worker.core.core import WorkerCore
from thinwire.worker.core.messages import NO_FIGURES, ShardReply

BODIES = load_kernels("numpy")
#: Path -> shape; no row's gradient depends on the last one.
SHAPES = {
    "embedding/table": (7, 4),
    "dense/kernel": (4, 5),
    "dense/bias": (5,),
    "conv/kernel": (2, 2, 3, 4),
    "scale": (),
    "head/kernel": (3, 2),
}
UNUSED = "head/kernel"


def variables(constraints=None):
    """Return a script's variables, with constraints by path."""
    found = []
    for number, (path, shape) in enumerate(SHAPES.items()):
        scope, _, name = path.rpartition("/")
        values = np.random.default_rng(number).normal(size=shape).astype(np.float32)
        with keras.name_scope(scope) if scope else keras.name_scope(""):
            found.append(keras.Variable(values, name=name))
        if constraints and path in constraints:
            found[-1].constraint = constraints[path]
    return found


def flat_of(arrays):
    return np.concatenate([np.asarray(array, np.float32).ravel() for array in arrays])


class Rows:
    """A loss that is a mean over rows, each of them a parabola in every weight."""

    def __init__(self, size, num_rows, seed=0):
        rng = np.random.default_rng(seed)
        self.slopes = rng.normal(size=(num_rows, size)).astype(np.float32)
        self.bends = rng.uniform(0, 1, (num_rows, size)).astype(np.float32)
        self.slopes[:, -6:] = self.bends[:, -6:] = 0.0  # of UNUSED

    def gradient(self, theta, rows):
        """Return the mean gradient [n] float32 of some rows."""
        return (self.slopes[rows] + self.bends[rows] * theta).mean(0, dtype=np.float32)


def train_alone(optimizer, own, rows, batches):
    """Train variables as Keras does, on one batch of rows after the other; return them flat.

    Each step is eager: so few cost less than a trace of them.
    """
    optimizer.build(own)
    for batch in batches:
        flat = rows.gradient(flat_of(own), batch)
        gradients, start = [], 0
        for path, variable in zip(SHAPES, own, strict=True):
            size = int(np.prod(variable.shape))
            part = flat[start : start + size].reshape(variable.shape)
            gradients.append(None if path == UNUSED else keras.ops.convert_to_tensor(part))
            start += size
        optimizer.apply(gradients, own)
    return flat_of(own)


def offer_of(optimizer, own, clock="batches", unused=(UNUSED,)):
    """Return a script's offer as a PS reads it; `optimizer` may be several, each with variables."""
    several = optimizer if isinstance(optimizer, list) else [(optimizer, own)]
    described = [describe(each, stepped, clock) for each, stepped in several]
    optimizers = [each.offer for each in described]
    if len(several) > 1:
        paths = [tuple(variable.path for variable in stepped) for _, stepped in several]
        pairs = zip(optimizers, paths, strict=True)
        optimizers = [dataclasses.replace(each, paths=stepped) for each, stepped in pairs]
    tensors = [TensorSpec(variable.path, tuple(variable.shape)) for variable in own]
    made = Offer(
        ModelSpec(tuple(tensors)),
        optimizers=tuple(optimizers),
        constraints=describe_constraints(own),
        unused=unused,
        loss_scale=described[0].loss_scale,
    )
    return read_offer(made.to_json(), 1 << 30)


def through_disk(state):
    with tempfile.TemporaryDirectory() as folder:
        Checkpoints.in_folder(pathlib.Path(folder)).save(1, state)
        return Checkpoints.in_folder(pathlib.Path(folder)).load_latest()[1]


class ScriptRun:
    """Shards and workers of a run whose PS steps with a script's optimizer.

    With `former`, the run continues from the files that the former run's shards leave on disk;
    with `slots`, it starts from a script optimizer's slots, by variable.
    """

    def __init__(
        self, offer, theta, nb_ps=1, nb_workers=2, name="bsp", former=None, slots=(), **choices
    ):
        overrides = {"server_optimizer": "script"} | choices.pop("overrides", {})
        chosen = method(name, nb_workers, overrides=overrides, **choices)
        self.method, self.offer, self.slots = adopt(chosen, offer), offer, slots
        self.layouts = self.method.place(offer.spec, nb_ps)
        self.shards = [self._shard(number, theta, nb_workers) for number in range(nb_ps)]
        for shard, other in zip(self.shards, former.shards if former else (), strict=False):
            shard.load_state_dict(through_disk(other.state_dict()))
        scaled = offer.loss_scale is not None
        bounds = ClaimBounds.of(self.method, scales_loss=scaled, nb_workers=nb_workers)
        self.decoders = [
            PushDecoder(
                layout,
                self.method.kind,
                BODIES,
                bounds=bounds,
                groups=[part_of_layout(layout, numbers)[1] for numbers in offer.groups()],
            )
            for layout in self.layouts
        ]
        self.workers = [
            WorkerCore(offer.spec, self.layouts, chosen, BODIES, [1, number], groups=offer.groups())
            for number in range(1, nb_workers + 1)
        ]
        for worker, other in zip(self.workers, former.workers if former else (), strict=False):
            worker.step = other.step
        self.encoders = [[PushEncoder(s, None) for s in range(nb_ps)] for _ in self.workers]
        self.replies = [{} for _ in self.workers]
        for number in range(1, nb_workers + 1):
            for shard in range(nb_ps):
                self.feed(shard, events.Join(number, number, False, "peer"))
        self.pull()

    def _shard(self, number, theta, nb_workers):
        layout = self.layouts[number]
        member = Coordinator(nb_workers, 1e9) if number == 0 else FollowerMembership(nb_workers)
        config = CoreConfig(
            Budget(10**6),
            Schedule(0.5),
            nb_workers,
            spec=shard_spec(self.offer.spec, layout),
            loss_scale=self.offer.loss_scale,
            first_batches=self.offer.schedule_starts(),
        )
        spec, chosen = self.offer.spec, self.method
        own = np.concatenate([theta[at] for at in shard_positions(spec, layout)])
        places = slot_places(self.offer, layout)
        if any(places):
            initial = []
            for slots, numbers, each in zip(self.slots, self.offer.groups(), places, strict=True):
                part, (held, _) = part_of_spec(spec, numbers), part_of_layout(layout, numbers)
                initial.append(divide(join(cut(slots, part, held), each), each))
            update = server_update(self.offer, initial)
            chosen = dataclasses.replace(chosen, server=update)
        return PsCore(config, chosen, own, BODIES, member)

    def pull(self):
        for number in range(1, len(self.workers) + 1):
            for shard in range(len(self.shards)):
                self.feed(shard, events.Pull(number, number, None, 0))

    def feed(self, shard, event):
        for action in self.shards[shard].handle(event, 0.0):
            if isinstance(action, events.NewEpoch) and shard == 0:
                for other in range(1, len(self.shards)):
                    self.feed(other, action.epoch)
            elif isinstance(action, events.Reply):
                self._take(shard, action)
            assert not isinstance(action, events.Reject), action

    def _take(self, shard, action):
        replies = self.replies[action.worker - 1]
        blocks, rounds = decoded(action.update, self.layouts[shard])
        replies[shard] = ShardReply(
            action.operation,
            blocks,
            action.version,
            0,
            action.learning_rate,
            action.samples,
            action.stop,
            loss_scale=action.loss_scale,
            schedule_counts=action.schedule_counts,
            rounds=rounds,
        )
        if len(replies) == len(self.shards):
            self.workers[action.worker - 1].finish([replies[s] for s in range(len(self.shards))])
            replies.clear()

    def push(self, number, gradient, samples, figures=NO_FIGURES):
        """Let worker `number` (from 1) push a gradient [n] of some samples.

        Without a given count the push is this worker's part of one batch.
        """
        worker = self.workers[number - 1]
        head = dataclasses.replace(figures.head, batch_parts=figures.head.batch_parts or 1)
        figures = dataclasses.replace(figures, head=head)
        outgoing = worker.begin(gradient, samples, 1.0, figures=figures)
        for shard, encoder in enumerate(self.encoders[number - 1]):
            epoch = self.shards[0].membership.epoch
            ((message, pieces),) = encoder.encode(outgoing, number, epoch)
            payload = memoryview(b"".join(bytes(piece) for piece in pieces))
            push = message.push
            self.feed(shard, self.decoders[shard].decode(number, push, payload))

    def round(self, rows, parts):
        """Let every worker push the mean gradient of its part of the rows."""
        for number, part in enumerate(parts, 1):
            theta = self.workers[number - 1].weights
            self.push(number, rows.gradient(theta, part), len(part))

    def fill(self, optimizer, own, number=0):
        """Give one of a script's own optimizers of some variables the slots of all shards."""
        found = []
        for core in self.shards:
            document, pieces = encode(core.model.slots())
            found.append(decode(document, memoryview(b"".join(map(bytes, pieces))))[number])
        numbers = self.offer.groups()[number]
        layouts = [part_of_layout(layout, numbers)[0] for layout in self.layouts]
        slots = OwnSlots(optimizer, self.offer.optimizers[number], own)
        slots.fill(layouts, [state.slots for state in found], found[0].rate)

    @property
    def theta(self):
        flat = np.empty(self.offer.spec.num_parameters, np.float32)
        for core, layout in zip(self.shards, self.layouts, strict=True):
            places = shard_positions(self.offer.spec, layout)
            for slot, place in enumerate(places):
                start, stop = layout.offsets[slot : slot + 2]
                flat[place] = core.model.theta[start:stop]
        return flat
