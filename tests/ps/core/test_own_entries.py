"""Replies that leave out a worker's own entries give the shard's floats, despite any loss.

The runs have real cores and lose replies at random: the worker repeats the push later, when other
workers may have changed the same entries.
"""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.virtual.lossy import World
from tests.virtual.run import MiniRun
from tests.virtual.toy import SPEC, method
from thinwire.ops.downlink.exact import DownDelta
from thinwire.ops.downlink.own_entries import find
from thinwire.ops.downlink.types import ModelChange, ModelRequest, Operation, OwnEntries, ShardView
from thinwire.ops.kernels import load_kernels
from thinwire.ops.push_head import PushHead
from thinwire.ops.sharding.split import shard_positions
from thinwire.ops.types import VALUE_DTYPES, Update
from thinwire.ops.weighting.base import Arrival
from thinwire.ps.core import events
from thinwire.simulator.messages import decoded

pytestmark = pytest.mark.usefixtures("small_models_relay")


class LossyRun(MiniRun):
    """Loses replies to pushes, and compares each worker's model with the shard's former model."""

    def __init__(self, *arguments, loss=0.0, **named):
        super().__init__(*arguments, **named)
        self.loss = loss
        self.unanswered = []  # (worker, shard), to be requested again
        self.expected = {}  # (worker, shard) -> the worker's weights after the newest reply
        self.operations = set()
        self.num_values = 0  # in replies to pushes
        self.num_checked = 0

    def decoded(self, shard, reply):
        model = self.shards[shard].model
        # The copy is there where the reply leaves out entries.
        held = model.downlink.copy_of(reply.worker, reply.version)
        self.expected[reply.worker, shard] = (model.theta if held is None else held).copy()
        if reply.step:
            self.operations.add(reply.operation)
            blocks, rounds = decoded(reply.update, self.layouts[shard])
            blocks += [b for each in rounds for own in each.updates for b in own or ()]
            self.num_values += sum(len(block.values.data) for block in blocks)
        return super().decoded(shard, reply)

    def turn(self):
        if self.unanswered and self.rng.random() < 0.5:
            worker, shard = self.unanswered.pop(0)
            self.feed(shard, self.push_event(worker, shard))
            return True
        return super().turn() or bool(self.unanswered)

    def run(self, max_turns=100_000):
        for worker in self.workers.values():
            self.spoil(worker)
        return super().run(max_turns)

    def spoil(self, worker):
        take = worker.take

        def take_or_lose(shard, reply):
            if worker.outgoing is not None and self.rng.random() < self.loss:
                self.unanswered.append((worker, shard))
                return
            take(shard, reply)
            if not worker.replies:  # the last shard's has been applied
                self.check(worker)

        worker.take = take_or_lose

    def check(self, worker):
        """Each worker's model equals each shard's model at its reply, bit for bit."""
        for shard, layout in enumerate(self.layouts):
            mine = np.concatenate([worker.core.base[at] for at in shard_positions(SPEC, layout)])
            expected = self.expected[worker.number, shard]
            np.testing.assert_array_equal(mine.view(np.uint32), expected.view(np.uint32))
        self.num_checked += 1


def sending(name="dgs", nb_workers=3, down_codec="delta", overrides=None, **choices):
    choices = {"compression_rate": 0.15, **choices}
    overrides = {"down_codec": down_codec, **(overrides or {})}
    return method(name, nb_workers=nb_workers, overrides=overrides, **choices)


@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(["delta", "auto"]),
    st.sampled_from(VALUE_DTYPES),
    st.integers(1, 3),
    st.sampled_from(["asp", "ssp", "gsp", "bsp"]),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([0.05, 0.15, 0.5]),
    st.integers(0, 2**16),
)
def test_floats_are_the_shards_whatever_is_lost(down, dtype, nb_ps, sync, loss, rate, seed):
    groups = {"groups": ((1, 2), (3,))} if sync == "gsp" else {}
    chosen = sending(
        down_codec=down,
        compression_rate=rate,
        value_dtype=dtype,
        overrides={"sync": sync},
        down_ratio=0.9 if down == "auto" else None,
        **groups,
    )
    run = LossyRun(chosen, iter_max=40, seed=seed, nb_ps=nb_ps, rate=0.3, loss=loss).run()
    assert run.num_checked > 10
    assert not run.deadlocked()


@pytest.mark.parametrize(
    ("name", "choices"),
    [
        ("dgs", {}),
        ("gd", {"value_dtype": "int8"}),
        ("dgc", {"value_dtype": "bfloat16"}),
        ("asgd", {"overrides": {"codec": "topk", "pacer": "fixed"}, "local_steps": 2}),
        ("dgs", {"overrides": {"weighting": "inverse"}}),
    ],
)
def test_replies_that_change_weights_leave_a_workers_own_out(name, choices):
    chosen = sending(name, **choices)
    run = LossyRun(chosen, iter_max=60, nb_ps=2, loss=0.2).run()
    assert Operation.SET_REST in run.operations
    assert run.num_checked > 20


@pytest.mark.parametrize(
    "choices",
    [
        {"name": "adacomp"},  # gradients: the rate is the shard's to know
        {"down_codec": "dense"},
        {"down_codec": "sparse"},
        {"overrides": {"sync": "bsp"}},  # a mean does not show the other workers' shares
    ],
)
def test_everything_is_sent_where_a_worker_cannot_know(choices):
    run = LossyRun(sending(**choices), iter_max=60, nb_ps=2, loss=0.2).run()
    assert Operation.SET_REST not in run.operations


def test_a_group_gets_the_same_arrays_and_a_worker_alone_its_own():
    run = LossyRun(sending("dgs", overrides={"sync": "gsp"}, groups=((1, 2), (3,))), iter_max=80)
    run.run()
    replies = [each for _, each in run.actions if isinstance(each, events.Reply) and each.step]
    by_worker = {w: {r.operation for r in replies if r.worker == w} for w in (1, 2, 3)}
    assert Operation.SET_REST in by_worker[3]
    assert Operation.SET_REST not in by_worker[1] | by_worker[2]
    pairs = [r for r in replies if r.worker in (1, 2) and r.operation is Operation.SET]
    assert pairs and len({id(r.update) for r in pairs}) < len(pairs)


def test_a_worker_alone_is_sent_nothing():
    run = LossyRun(sending(nb_workers=1, compression_rate=0.1), iter_max=30)
    run.run()
    assert run.operations == {Operation.SET_REST}
    assert run.num_values == 0
    assert run.num_checked > 25


def test_replies_shrink_by_about_the_workers_own():
    class Sees(DownDelta):
        omits_own_entries = False

    counts = []
    for down_codec in (DownDelta(), Sees()):
        chosen = dataclasses.replace(sending(nb_workers=2), down_codec=down_codec)
        run = LossyRun(chosen, iter_max=60).run()
        counts.append((run.num_values, run.theta))
    (less, theta), (more, expected) = counts
    assert less < 0.75 * more
    np.testing.assert_array_equal(theta, expected)  # and training goes the very same way


# -- incarnations, leases and restarts ------------------------------------------------------------

WORKERS = st.integers(1, 2)
LOST = st.integers(0, 2)
EVENTS = st.one_of(
    st.tuples(st.just("push"), WORKERS, st.sampled_from([0.0, 1.0, 1.0, 30.0]), LOST),
    st.tuples(st.just("push"), WORKERS, st.sampled_from([1.0, 1e-38, 1e-41]), LOST),
    st.tuples(st.just("be_born"), WORKERS),
    st.tuples(st.just("forget"), WORKERS),
    st.tuples(st.just("pull"), WORKERS, LOST),
    st.tuples(st.just("save")),
    st.tuples(st.just("restart")),
)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(["delta", "auto"]),
    st.sampled_from(VALUE_DTYPES),
    st.booleans(),
    st.lists(EVENTS, max_size=25),
)
def test_nobody_drifts_through_lives_and_restarts(down_codec, dtype, from_zero, happenings):
    """`World.check` compares after every reply; from zero, sums are below the normal range too."""
    world = World(sending("gd", 2, down_codec, value_dtype=dtype))
    if from_zero:
        world.initial[:] = 0
        world.core = world.new_core()
        world.snapshot = world.core.state_dict()
        world.be_born(1)
        world.be_born(2)
    for what, *arguments in happenings:
        getattr(world, what)(*arguments)
    world.settle(1, 2)
    np.testing.assert_array_equal(world.base(1), world.theta)


def test_positions_are_kept_for_as_long_as_the_worker_is():
    world = World(sending("gd", 2))
    entries, window = 4 * 36, 4 * 6
    world.push(1)
    assert Operation.SET_REST in world.operations
    # Positions: of 5 in 30, 1 in 5 and the one; the window has all of them, too.
    assert world.counts["bytes"] == entries + window + 8 * 6
    saved = world.core.model.state_dict(soft=False)["down_codec"]
    assert "scratch" not in saved
    world.save()
    world.restart()
    assert world.counts["bytes"] == entries
    world.push(1)
    world.forget(1)
    assert world.counts["bytes"] == entries


def test_the_window_of_positions_finds_what_a_look_at_all_entries_finds():
    """Few or many entries, own ones and others', bases within the window and before it."""
    rng, size, codec, replies = np.random.default_rng(4), 400, DownDelta(), 0
    theta, bases = rng.normal(size=size).astype(np.float32), {1: 0, 2: 0, 3: 0}
    state, view = codec.init(size), theta.view()
    for version in range(1, 300):
        worker = int(rng.integers(1, 4))
        at = np.flatnonzero(rng.random(size) < rng.choice([0.0, 0.01, 0.1, 0.3]))
        mine = at[rng.random(len(at)) < 0.9]
        own = OwnEntries(worker, version, bases[worker], version, mine)
        theta[at] += 1
        own = own if rng.random() < 0.8 else None
        state = codec.record_update(ModelChange(at, version, own), state)
        request = ModelRequest(worker, version, bases[worker])
        shard = ShardView(view, version, load_kernels("numpy"), (0, size))
        window, state["scratch"]["window"] = state["scratch"]["window"], []
        expected = codec.gather(request, shard, state)
        state["scratch"]["window"] = window
        found = codec.gather(request, shard, state)
        assert found.operation is expected.operation
        assert found.update.indices is None or found.update.indices.dtype == np.int64
        np.testing.assert_array_equal(found.update.indices, expected.update.indices)
        np.testing.assert_array_equal(found.update.values, expected.update.values)
        replies += bool(window) and window[0]["version"] <= bases[worker] + 1
        bases[worker] = version
    assert 50 < replies < 290  # both ways were taken


def test_own_entries_are_left_out_only_of_the_answer_to_that_push_from_that_base():
    """On a model that has them already a worker would add them twice."""
    codec, size = DownDelta(), 100
    state, theta = codec.init(size), np.arange(size, dtype=np.float32)
    own = OwnEntries(1, 5, 0, 1, np.arange(3))
    state = codec.record_update(ModelChange(np.arange(3), 1, own), state)
    state = codec.record_update(ModelChange(np.arange(3, 6), 2), state)
    shard = ShardView(theta, 2, load_kernels("numpy"), (0, size))
    for request, operation, lacking in (
        (ModelRequest(1, 5, 0), Operation.SET_REST, [3, 4, 5]),
        (ModelRequest(1, 6, 0), Operation.SET, [0, 1, 2, 3, 4, 5]),
        (ModelRequest(1, 5, 1), Operation.SET, [3, 4, 5]),
    ):
        reply = codec.gather(request, shard, state)
        assert (reply.operation, reply.update.indices.tolist()) == (operation, lacking)
    codec.forget(1, state)  # the worker has left; one with its id has pushed nothing
    reply = codec.gather(ModelRequest(1, 5, 0), shard, state)
    assert (reply.operation, reply.update.indices.tolist()) == (Operation.SET, [0, 1, 2, 3, 4, 5])


def test_an_entry_that_leaves_the_normal_range_is_no_own_one():
    """Kernels may flush a subnormal sum to zero, so worker and shard may differ."""
    tiny = np.finfo(np.float32).tiny
    before = np.array([1.5 * tiny, 1.0, 0.5 * tiny, 0.0], np.float32)
    values = np.array([-tiny, 1.0, tiny, 0.5 * tiny], np.float32)
    arrival = Arrival(1, Update(np.arange(4), values), 0, head=PushHead(5))
    found = find(arrival, before, before + values, 3)
    assert found.indices.tolist() == [1, 2]


@pytest.mark.parametrize(("base", "operation"), [(4, Operation.FULL), (5, Operation.SET)])
def test_who_lacks_a_dense_update_gets_the_whole_model(base, operation):
    codec, size = DownDelta(), 100
    state, theta = codec.init(size), np.ones(size, np.float32)
    state = codec.record_update(ModelChange(None, 5), state)
    state = codec.record_update(ModelChange(np.arange(3), 6), state)
    shard = ShardView(theta, 6, load_kernels("numpy"), (0, size))
    assert codec.gather(ModelRequest(1, 7, base), shard, state).operation is operation
