"""The worker's core equals plain numpy: its pushes, and the effect of replies."""

import math

import numpy as np
import pytest

from tests.virtual.toy import method
from tests.virtual.worker import (
    KERNELS,
    SIZE,
    SPEC,
    core_of,
    float32_block,
    numbers,
    part,
    reply,
    start,
)
from thinwire.ops.codecs.base import NonFiniteUpdate
from thinwire.ops.downlink.types import Operation, RepeatedRound
from thinwire.ops.kernels.numpy_ops import aligned
from thinwire.ops.sharding.flat_updates import SlicesInModel
from thinwire.ops.sharding.split import place_tensors, shard_positions
from thinwire.ops.types import Kind, where_of
from thinwire.worker.core.core import WorkerCore
from thinwire.worker.core.messages import ScriptFigures


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
        core.receive(
            shard,
            reply(
                layout,
                Operation.NONE,
                blocks=[],
                version=10 + shard,
                generation=shard,
                learning_rate=0.25 + shard,
            ),
        )
    outgoing = core.begin(numbers(1), samples=8, loss=0.75)
    assert (outgoing.head.step, outgoing.kind, outgoing.head.samples) == (1, Kind.GRADIENT, 8)
    assert (outgoing.head.local_steps, outgoing.head.loss) == (1, 0.75)
    assert outgoing.head.schedule_rate == 0.25, "shard 0's"
    assert [origin.base_version for origin in outgoing.origins] == [10, 11, 12][:nb_ps]
    assert [origin.generation for origin in outgoing.origins] == [0, 1, 2][:nb_ps]
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
    versions = [origin.base_version for origin in outgoing.origins]
    assert versions == [0, 7, 0], "a push keeps the versions it was computed at"


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
        for at, block in SlicesInModel(core.spec, layout).places(blocks):
            expected[at][block.indices] += KERNELS.dequantise(block.values)
    first = shard_positions(core.spec, core.layouts[0])[0].start
    expected[first] = 7
    rest = [float32_block(0, core.layouts[0].slices[0].size, np.array([0]), [7])]
    replies = [
        reply(core.layouts[0], Operation.SET_REST, blocks=rest),
        reply(core.layouts[1], Operation.SET_REST, blocks=[]),
    ]
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
    assert (outgoing.kind, outgoing.head.local_steps, outgoing.head.samples) == (Kind.DELTA, 3, 12)
    assert outgoing.head.loss == 2.0 and outgoing.head.step == 1
    sent = np.concatenate([block.values.data for block in outgoing.shards[0]])
    np.testing.assert_array_equal(sent, here - numbers())
    np.testing.assert_array_equal(core.base, numbers())
    np.testing.assert_array_equal(start(core, numbers(9)), numbers(9))
    assert core.begin(numbers(), 4, 1.0) is None, "the next round begins at its first step"


def running_ahead(**choices):
    """Return a core of a script that steps itself, at a model of zeros."""
    core = core_of("gd", local_optimizer="script", overlap=True, **choices)
    start(core, np.zeros(SIZE, np.float32))
    return core


def add(shard, outgoing, layout):
    """Add the sent update to the model of the only shard."""
    for at, block in SlicesInModel(SPEC, layout).places(outgoing.shards[0]):
        shard[at][where_of(block.indices)] += block.values.data


def test_a_script_keeps_its_own_changes_whatever_is_sent_of_them():
    core = running_ahead(compression_rate=0.25)
    [layout] = core.layouts
    shard, total = np.zeros(SIZE, np.float32), np.zeros(SIZE)
    for number in range(20):
        stepped = core.weights + numbers(number)
        core.own.step(stepped, loss=0.0)
        np.testing.assert_allclose(core.weights, stepped, atol=1e-5, err_msg="alone it is Keras'")
        add(shard, core.begin(stepped, samples=8, loss=0.0), layout)
        others = numbers(100 + number)
        shard += others
        core.receive(0, reply(layout, values=shard))
        np.testing.assert_array_equal(core.base, shard)
        total += numbers(number).astype(float) + others
        core.own.catch_up()
        np.testing.assert_allclose(core.weights, total, atol=1e-4)
    kept = core.own.unsent.copy()
    assert np.count_nonzero(kept) > SIZE / 2
    start(core, shard)
    np.testing.assert_array_equal(core.own.unsent, kept, err_msg="a pull answers no push")
    add(shard, core.end_training(), layout)
    np.testing.assert_allclose(shard, total, atol=1e-4)
    core.receive(0, reply(layout, values=shard))
    np.testing.assert_allclose(core.own.unsent, 0, atol=1e-5)


@pytest.mark.parametrize("applied", [True, False])
def test_own_changes_go_on_in_the_next_incarnation_as_the_codec_does(applied):
    core, shard = running_ahead(compression_rate=0.25), np.zeros(SIZE, np.float32)
    stepped = core.weights + numbers()
    add(shard, core.begin(stepped, samples=8, loss=0.0), core.layouts[0])
    again = running_ahead(compression_rate=0.25)
    again.restore(core.save(), last_applied_step=1 if applied else 0)
    start(again, shard if applied else np.zeros(SIZE, np.float32))
    expected = stepped if applied else np.zeros(SIZE, np.float32)
    np.testing.assert_allclose(again.weights, expected, atol=1e-6)


@pytest.mark.parametrize("bad", ["weights", "loss", "statistics"])
def test_a_step_to_nan_is_refused_before_the_script_goes_on(bad):
    core, values, statistics, loss = running_ahead(), numbers(), np.zeros(2, np.float32), 0.0
    if bad == "loss":
        loss = math.nan
    else:
        {"weights": values, "statistics": statistics}[bad][1] = math.inf
    with pytest.raises(NonFiniteUpdate, match="optimizer.*NaN"):
        core.own.step(values, loss, statistics)
    np.testing.assert_array_equal(core.weights, np.zeros(SIZE))
    np.testing.assert_array_equal(core.own.unsent, np.zeros(SIZE))


def test_a_push_that_is_refused_as_too_large_is_forgotten():
    core = running_ahead(compression_rate=0.25)
    stepped = core.weights + numbers()
    core.own.step(stepped, loss=0.0)
    core.begin(stepped, samples=8, loss=0.0)
    answer = reply(core.layouts[0], values=np.zeros(SIZE, np.float32), refused=True)
    core.receive(0, answer)
    core.handle_refusals([answer])
    np.testing.assert_array_equal(core.own.unsent, np.zeros(SIZE))
    assert core.end_training() is None


def test_with_a_momentum_only_the_codec_shows_what_is_sent():
    assert running_ahead(compression_rate=0.25).own is not None
    core = core_of("dgs", local_optimizer="script", overlap=True, dgs_momentum=0.9)
    assert core.own is None


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
    assert (outgoing.head.step, outgoing.head.samples, outgoing.head.loss) == (
        1,
        8 * local_steps,
        1.0,
    )
    assert outgoing.head.local_steps == local_steps


def test_two_workers_draw_different_numbers_and_one_worker_the_same():
    chosen = method("asgd", nb_workers=2, compression_rate=0.3, overrides={"codec": "random_k"})

    def positions(*seed):
        core = WorkerCore(SPEC, place_tensors(SPEC, 1), chosen, KERNELS, seed)
        start(core, numbers())
        pushes = [core.begin(numbers(1), 8, 1.0) for _ in range(4)]
        return [block.indices.tolist() for push in pushes for block in push.shards[0]]

    assert positions(1, 1) == positions(1, 1)
    assert positions(1, 1) != positions(1, 2)
    assert positions(1, 1) != positions(2, 1)


@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 1000])
def test_aligned_buffers(size):
    buffer = aligned(size)
    assert (buffer.shape, buffer.dtype, buffer.any()) == ((size,), np.float32, False)
    assert size == 0 or buffer.ctypes.data % 64 == 0
    assert buffer.flags.c_contiguous and buffer.flags.writeable


def test_a_push_that_is_refused_as_not_finite_stays_unsent():
    """The saved state of a worker that then ends includes its change."""
    core = running_ahead(compression_rate=0.25)
    stepped = core.weights + numbers()
    core.own.step(stepped, loss=0.0)
    core.begin(stepped, samples=8, loss=0.0)
    core.handle_refusals([None])
    np.testing.assert_allclose(core.save()["unsent"], numbers(), atol=1e-6)


def test_a_relayed_round_is_the_mean_over_those_who_sent_nothing_too():
    core = core_of()
    start(core, numbers())
    whole = float32_block(0, core.layouts[0].slices[0].size, None, np.ones(12))
    one_of_two = RepeatedRound(((whole,), ()), 0.5)
    core.receive(0, reply(core.layouts[0], Operation.RELAY, blocks=[], rounds=(one_of_two,)))
    expected = numbers()
    expected[:12] -= np.float32(0.25)
    np.testing.assert_allclose(core.base, expected, rtol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1.0])
def test_weights_that_a_script_sets_to_no_number_are_refused(value):
    core = core_of()
    start(core, numbers())
    change = np.zeros(SIZE, np.float32)
    change[3] = value
    if np.isfinite(value):
        assert core.begin(numbers(1), 4, 0.5, figures=ScriptFigures(change=change)).head.step == 1
        return
    with pytest.raises(NonFiniteUpdate, match="set weights to NaN or infinity"):
        core.begin(numbers(1), 4, 0.5, figures=ScriptFigures(change=change))
