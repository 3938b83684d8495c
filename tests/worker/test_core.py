"""The worker's core against plain numpy: what goes out, what a reply does, what is kept."""

import dataclasses
import math
from typing import ClassVar

import numpy as np
import pytest

from ops import kernels, routing
from ops.checkpoint import Checkpoints
from ops.codecs import NonFiniteUpdate
from ops.down_codecs import Operation
from ops.types import Block, CodedValues, Kind, ModelSpec, Packet, TensorSpec
from tests.harness import method
from worker.core import WorkerCore, aligned
from worker.exchanged import ShardReply

BODIES = kernels.load("numpy")
SPEC = ModelSpec((TensorSpec("w", (3, 4)), TensorSpec("b", (4,)), TensorSpec("s", (1,))))
SIZE = SPEC.num_parameters


def float32_block(slot, size, indices, values):
    return Block(slot, size, indices, CodedValues("float32", np.asarray(values, np.float32)))


@dataclasses.dataclass(frozen=True)
class LargestWithResidual:
    """One entry a tensor, the rest is kept: the smallest codec that has a residual."""

    kind: ClassVar[Kind] = Kind.GRADIENT

    def init(self, spec, kernels):
        return {"residual": [np.zeros(tensor.size, np.float32) for tensor in spec.tensors]}

    def encode(self, tensors, state, ctx):
        blocks = []
        for slot, (tensor, residual) in enumerate(zip(tensors, state["residual"], strict=True)):
            residual += tensor
            at = np.abs(residual).argmax()
            blocks.append(float32_block(slot, tensor.size, np.array([at]), [residual[at]]))
            residual[at] = 0
        return Packet(tuple(blocks), self.kind), state

    def undelivered(self, packet, state):
        for block in packet.blocks:
            state["residual"][block.slot][block.indices] += block.values.data
        return state


def core_of(name="asgd", nb_ps=1, **choices):
    chosen = method(name, nb_workers=1, **choices)
    return WorkerCore(SPEC, routing.place(SPEC, nb_ps), chosen, BODIES, [1, 1])


def keeping_core():
    core = core_of()
    chosen = dataclasses.replace(core.method, codec=LargestWithResidual())
    return WorkerCore(SPEC, core.layouts, chosen, BODIES, [1, 1])


def reply(layout, operation=Operation.FULL, values=None, blocks=None, **fields):
    """A reply of one shard; `values` [shard size] fill it whole."""
    if blocks is None:
        offsets = layout.offsets
        blocks = [
            float32_block(slot, piece.size, None, values[offsets[slot] : offsets[slot + 1]])
            for slot, piece in enumerate(layout.slices)
        ]
    given = {"version": 0, "generation": 0, "learning_rate": 0.5, "samples": 0, "stop": False}
    return ShardReply(operation, blocks, **{**given, **fields})


def start(core, model):
    """Hand the core the model, as its first pull does."""
    return core.finish([reply(layout, values=part(layout, model)) for layout in core.layouts])


def part(layout, model):
    starts = [SPEC.offsets[piece.tensor] + piece.start for piece in layout.slices]
    return np.concatenate(
        [model[s : s + piece.size] for s, piece in zip(starts, layout.slices, strict=True)]
    )


def numbers(seed=0):
    return np.random.default_rng(seed).standard_normal(SIZE, np.float32)


@pytest.mark.parametrize("nb_ps", [1, 2, 3])
def test_a_full_reply_of_every_shard_is_the_model(nb_ps):
    core = core_of(nb_ps=nb_ps)
    np.testing.assert_array_equal(start(core, numbers()), numbers())
    assert core.weights is core.base, "without local steps there is one model, not two"
    assert core.base.ctypes.data % 64 == 0


@pytest.mark.parametrize("nb_ps", [1, 2, 3])
def test_a_push_holds_the_gradient_and_where_it_was_computed(nb_ps):
    core = core_of(nb_ps=nb_ps)
    start(core, numbers())
    for shard, layout in enumerate(core.layouts):
        core.receive(shard, reply(layout, Operation.NONE, blocks=[], version=10 + shard,
                                  generation=shard, learning_rate=0.25 + shard))  # fmt: skip
    outgoing = core.begin(numbers(1), samples=8, loss=0.75)
    assert (outgoing.step, outgoing.kind, outgoing.samples) == (1, Kind.GRADIENT, 8)
    assert (outgoing.local_steps, outgoing.loss) == (1, 0.75)
    assert outgoing.learning_rate == 0.25, "shard 0's"
    assert outgoing.base_versions == [10, 11, 12][:nb_ps]
    assert outgoing.generations == [0, 1, 2][:nb_ps]
    for layout, blocks in zip(core.layouts, outgoing.shards, strict=True):
        sent = np.concatenate([block.values.data for block in blocks])
        np.testing.assert_array_equal(sent, part(layout, numbers(1)))


def test_the_version_vector_moves_shard_by_shard():
    core = core_of(nb_ps=3)
    assert (core.versions, core.generations) == ([0, 0, 0], [-1, -1, -1])
    start(core, numbers())
    core.receive(1, reply(core.layouts[1], Operation.NONE, blocks=[], version=7, generation=2))
    assert (core.versions, core.generations) == ([0, 7, 0], [0, 2, 0])
    outgoing = core.begin(numbers(), 8, 0.5)
    core.receive(2, reply(core.layouts[2], Operation.NONE, blocks=[], version=9))
    assert outgoing.base_versions == [0, 7, 0], "a push keeps the versions it was computed at"


@pytest.mark.parametrize(
    ("operation", "expected"), [(Operation.SET, [5.0, -6.0]), (Operation.ADD, [8.0, -3.0])]
)
def test_sparse_replies_set_or_add(operation, expected):
    core = core_of()
    start(core, np.full(SIZE, 3, np.float32))
    block = float32_block(1, 4, np.array([0, 3]), [5, -6])
    weights = core.finish([reply(core.layouts[0], operation, blocks=[block])])
    wanted = np.full(SIZE, 3, np.float32)
    wanted[[12, 15]] = expected
    np.testing.assert_array_equal(weights, wanted)


@pytest.mark.parametrize("value_dtype", ["float32", "int8"])
def test_the_rest_comes_on_top_of_what_was_pushed(value_dtype):
    core = core_of("gd", nb_ps=2, compression_rate=0.2, value_dtype=value_dtype)
    start(core, np.full(SIZE, 3, np.float32))
    gradient = np.linspace(-1, 1, SIZE, dtype=np.float32)
    outgoing = core.begin(gradient, 1, 0.5)
    expected = core.base.copy()
    for layout, blocks in zip(core.layouts, outgoing.shards, strict=True):
        for block, at in ((b, routing.positions(core.spec, layout)[b.slot]) for b in blocks):
            expected[at][block.indices] += BODIES.dequantise(block.values)
    first = routing.positions(core.spec, core.layouts[0])[0].start
    expected[first] = 7
    rest = [float32_block(0, core.layouts[0].slices[0].size, np.array([0]), [7])]
    replies = [reply(core.layouts[0], Operation.SET_REST, blocks=rest),
               reply(core.layouts[1], Operation.SET_REST, blocks=[])]  # fmt: skip
    weights = core.finish(replies)
    np.testing.assert_array_equal(weights, expected)
    assert (weights != 3).sum() >= 4


def test_only_shard_0_leads():
    core = core_of(nb_ps=2)
    start(core, numbers())
    fields = {"learning_rate": 9.0, "samples": 99, "stop": True, "stop_reason": "iter_max"}
    core.receive(1, reply(core.layouts[1], Operation.NONE, blocks=[], **fields))
    assert (core.learning_rate, core.samples_of_run, core.stopped) == (0.5, 0, False)
    core.receive(0, reply(core.layouts[0], Operation.NONE, blocks=[], **fields))
    assert (core.learning_rate, core.samples_of_run, core.stopped) == (9.0, 99, True)
    core.receive(0, reply(core.layouts[0], Operation.NONE, blocks=[]))
    assert (core.stopped, core.stop_reason) == (True, "iter_max"), "a stop is for good"


def test_local_steps_send_the_change_of_weights():
    core = core_of(local_steps=3, overrides={"pacer": "fixed"})
    start(core, numbers())
    gradients, here = [numbers(seed) for seed in (1, 2, 3)], numbers()
    for number, gradient in enumerate(gradients, 1):
        outgoing = core.begin(gradient, samples=4, loss=float(number))
        here = here - np.float32(0.5) * gradient
        np.testing.assert_array_equal(core.weights, here)
        assert (outgoing is None) == (number < 3)
    assert (outgoing.kind, outgoing.local_steps, outgoing.samples) == (Kind.DELTA, 3, 12)
    assert outgoing.loss == 2.0 and outgoing.step == 1
    sent = np.concatenate([block.values.data for block in outgoing.shards[0]])
    np.testing.assert_array_equal(sent, here - numbers())
    np.testing.assert_array_equal(core.base, numbers())
    np.testing.assert_array_equal(start(core, numbers(9)), numbers(9))
    assert core.begin(numbers(), 4, 1.0) is None, "the next round begins at its first step"


@pytest.mark.parametrize("local_steps", [1, 3])
@pytest.mark.parametrize("bad", [math.nan, math.inf, "loss"])
def test_what_is_not_finite_changes_nothing(local_steps, bad):
    core = core_of(local_steps=local_steps, overrides={"pacer": "fixed"})
    start(core, numbers())
    gradient, loss = numbers(1), 1.0
    if bad == "loss":
        loss = math.nan
    else:
        gradient[5] = bad
    for _ in range(2):
        with pytest.raises(NonFiniteUpdate):
            core.begin(gradient, 8, loss)
    np.testing.assert_array_equal(core.weights, numbers())
    outgoing = [core.begin(numbers(1), 8, 1.0) for _ in range(local_steps)][-1]
    assert (outgoing.step, outgoing.samples, outgoing.loss) == (1, 8 * local_steps, 1.0)
    assert outgoing.local_steps == local_steps


def test_the_residual_is_kept_from_step_to_step():
    core = keeping_core()
    start(core, numbers())
    residual, total = np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)
    for seed in range(1, 6):
        outgoing = core.begin(numbers(seed), 8, 1.0)
        residual += numbers(seed)
        for block in outgoing.shards[0]:
            at = SPEC.offsets[block.slot] + block.indices
            np.testing.assert_array_equal(block.values.data, residual[at])
            total[at] += block.values.data
            residual[at] = 0
        core.finish([reply(core.layouts[0], Operation.NONE, blocks=[])])
    kept = np.concatenate(core.save()["codec"]["residual"])
    np.testing.assert_array_equal(kept, residual)
    given = sum(numbers(seed) for seed in range(1, 6))
    np.testing.assert_allclose(total + kept, given, atol=1e-5)  # nothing lost, nothing twice


def test_what_was_refused_returns_to_the_residual():
    core = keeping_core()
    start(core, numbers())
    core.undelivered()  # before anything was sent it is a no-op
    core.begin(numbers(1), 8, 1.0)
    core.undelivered()
    np.testing.assert_array_equal(np.concatenate(core.save()["codec"]["residual"]), numbers(1))


@pytest.mark.parametrize(("applied", "fits"), [(2, True), (1, False), (3, False), (0, False)])
def test_a_residual_comes_back_only_at_its_own_step(applied, fits, tmp_path):
    core = keeping_core()
    start(core, numbers())
    for seed in (1, 2):
        core.begin(numbers(seed), 8, 1.0)
        core.finish([reply(core.layouts[0], Operation.NONE, blocks=[])])
    Checkpoints(tmp_path).save(2, core.save())

    other = keeping_core()
    assert other.restore(Checkpoints(tmp_path).load_latest()[1], applied) is fits
    kept = np.concatenate(core.save()["codec"]["residual"])
    expected = kept if fits else np.zeros(SIZE, np.float32)
    np.testing.assert_array_equal(np.concatenate(other.save()["codec"]["residual"]), expected)
    assert other.step == applied
    start(other, numbers())
    assert other.begin(numbers(3), 8, 1.0).step == applied + 1


def test_two_workers_draw_different_numbers_and_one_worker_the_same():
    chosen = method("asgd", nb_workers=2, compression_rate=0.3, overrides={"codec": "random_k"})

    def positions(*seed):
        core = WorkerCore(SPEC, routing.place(SPEC, 1), chosen, BODIES, seed)
        start(core, numbers())
        pushes = [core.begin(numbers(1), 8, 1.0) for _ in range(4)]
        return [block.indices.tolist() for push in pushes for block in push.shards[0]]

    assert positions(1, 1) == positions(1, 1)
    assert positions(1, 1) != positions(1, 2)
    assert positions(1, 1) != positions(2, 1)


STATISTICS = np.float32([1, 2, 3])


def normed_core(**choices):
    chosen = method("asgd", nb_workers=1, **choices)
    return WorkerCore(SPEC, routing.place(SPEC, 1), chosen, BODIES, [1, 1], STATISTICS)


def test_statistics_go_with_each_push_and_are_replaced_by_the_reply():
    core = normed_core()
    start(core, numbers())
    mine = np.float32([4, 5, 6])
    outgoing = core.begin(numbers(1), 8, 1.0, mine)
    mine[:] = 0  # a retry sends what was sent
    np.testing.assert_array_equal(outgoing.aux, [4, 5, 6])
    core.finish([reply(core.layouts[0], Operation.NONE, blocks=[], aux=np.float32([7, 8, 9]))])
    np.testing.assert_array_equal(core.statistics, [7, 8, 9])
    np.testing.assert_array_equal(outgoing.aux, [4, 5, 6])
    core.finish([reply(core.layouts[0], Operation.NONE, blocks=[])])  # of a shard without them
    np.testing.assert_array_equal(core.statistics, [7, 8, 9])


def test_a_model_without_statistics_sends_none():
    core = core_of()
    start(core, numbers())
    assert core.begin(numbers(1), 8, 1.0, np.empty(0, np.float32)).aux is None
    assert core.aux_size == 0


@pytest.mark.parametrize("local_steps", [1, 3])
def test_statistics_that_are_not_finite_change_nothing(local_steps):
    core = normed_core(local_steps=local_steps, overrides={"pacer": "fixed"})
    start(core, numbers())
    with pytest.raises(NonFiniteUpdate):
        core.begin(numbers(1), 8, 1.0, np.float32([4, np.inf, 6]))
    np.testing.assert_array_equal(core.statistics, STATISTICS)
    np.testing.assert_array_equal(core.weights, numbers())


def test_statistics_of_a_round_come_back_with_it(tmp_path):
    core = normed_core(local_steps=3, overrides={"pacer": "fixed"})
    start(core, numbers())
    core.begin(numbers(1), 8, 1.0, np.float32([4, 5, 6]))
    Checkpoints(tmp_path).save(0, core.save())
    for version, expected in ((0, [4, 5, 6]), (1, [7, 8, 9])):
        other = normed_core(local_steps=3, overrides={"pacer": "fixed"})
        other.restore(Checkpoints(tmp_path).load_latest()[1], 0)
        other.finish([reply(core.layouts[0], Operation.NONE, blocks=[], version=version,
                            generation=-1, aux=np.float32([7, 8, 9]))])  # fmt: skip
        other.resume_round()
        np.testing.assert_array_equal(other.statistics, expected)


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 1000])
def test_aligned_buffers(size):
    buffer = aligned(size)
    assert (buffer.shape, buffer.dtype, buffer.any()) == ((size,), np.float32, False)
    assert size == 0 or buffer.ctypes.data % 64 == 0
    assert buffer.flags.c_contiguous and buffer.flags.writeable
