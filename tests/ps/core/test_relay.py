"""Relayed rounds: workers add the shard's sums bit for bit, over the wire and after faults."""

import dataclasses
import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.virtual.run import MiniRun
from tests.virtual.toy import KERNELS, SPEC, method
from thinwire.ops.downlink import relay
from thinwire.ops.downlink.relay import DownRelay
from thinwire.ops.downlink.sizes import block_bytes
from thinwire.ops.downlink.types import (
    ModelChange,
    ModelRequest,
    Operation,
    RelayedRound,
    RelayedRounds,
    RelayedUpdate,
    ShardView,
)
from thinwire.ops.sharding.split import shard_positions
from thinwire.ops.types import FEW_BITS, Block, CodedValues, ShardLayout, Slice
from thinwire.ops.wire.blocks import IndexChooser
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed
from thinwire.ps.core import events
from thinwire.simulator.messages import decoded

pytestmark = pytest.mark.usefixtures("descriptions_cost_nothing")


def relaying(value_dtype="int2", sync="bsp", **choices):
    overrides = {"codec": "chunked_topk", "down_codec": "relay", "sync": sync}
    overrides |= choices.pop("overrides", {})
    settings = {"chunk": 8, "chunk_k": 2, "error_feedback": True, "nb_workers": 3} | choices
    return method("asgd", value_dtype=value_dtype, overrides=overrides, **settings)


class CheckedRun(MiniRun):
    """After its replies a worker's model equals the shards', bit for bit; operations are stored."""

    def __init__(self, *given, **more):
        self.operations, self.expected = [], {}
        super().__init__(*given, **more)

    def decoded(self, shard, reply):
        self.operations.append(reply.operation)
        self.expected[reply.worker, shard] = self.shards[shard].model.theta.copy()
        return super().decoded(shard, reply)

    def feed(self, shard, event):
        actions = super().feed(shard, event)
        for action in actions:
            if isinstance(action, events.Reply) and not self.workers[action.worker].replies:
                self._check(action.worker)
        return actions

    def _check(self, worker):
        base = self.workers[worker].core.base
        for shard, layout in enumerate(self.layouts):
            held = np.concatenate([base[place] for place in shard_positions(SPEC, layout)])
            assert held.tobytes() == self.expected[worker, shard].tobytes()


@pytest.mark.parametrize("value_dtype", [*FEW_BITS, "float32", "int8"])
@pytest.mark.parametrize("nb_ps", [1, 2])
def test_workers_hold_the_shard_bit_for_bit(value_dtype, nb_ps):
    run = CheckedRun(relaying(value_dtype), iter_max=30, nb_ps=nb_ps).run()
    assert not run.deadlocked()
    assert Operation.RELAY in run.operations


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 999),
    value_dtype=st.sampled_from([*FEW_BITS, "float16"]),
    local_steps=st.sampled_from([1, 3]),
    sync=st.sampled_from(["bsp", "asp", "ssp"]),
    weighting=st.sampled_from(["none", "samples", "inverse"]),
    server=st.sampled_from(["sgd", "momentum"]),
    chunk_k=st.integers(1, 8),
)
def test_whatever_goes_with_it_is_exact(
    seed, value_dtype, local_steps, sync, weighting, server, chunk_k
):
    chosen = relaying(
        value_dtype,
        sync,
        chunk_k=chunk_k,
        local_steps=local_steps,
        overrides={
            "pacer": "fixed" if local_steps > 1 else "every",
            "weighting": weighting,
            "server_optimizer": server,
        },
    )
    run = CheckedRun(chosen, iter_max=20, seed=seed).run()
    assert not run.deadlocked()
    if server == "momentum":
        assert Operation.RELAY not in run.operations


def test_a_worker_that_missed_a_round_gets_what_has_changed():
    run = CheckedRun(relaying(), iter_max=40)
    run.join_all()
    for _ in range(30):
        run.turn()
    run.workers[2].alive = False
    run.feed(0, events.Leave(2, run.workers[2].incarnation, "gone"))
    for _ in range(30):
        run.turn()
    run.operations.clear()
    run.workers[2].join(reconnects=False)
    assert Operation.FULL in run.operations
    while run.turn():
        pass
    assert not run.deadlocked() and Operation.RELAY in run.operations


def test_a_push_that_waits_goes_through_a_snapshot_with_its_blocks():
    from thinwire.ps.core.serialization import from_plain, to_plain

    run = CheckedRun(relaying(), iter_max=100)
    run.join_all()
    while not any(run.shards[0]._members[number].submitted for number in run.workers):
        run.turn()
    (push,) = [p for number in run.workers for p in run.shards[0]._members[number].submitted][:1]
    coded = dataclasses.replace(push, blocks=tuple(map(IndexChooser().encode, push.blocks)))
    for one in (push, coded):
        again = from_plain(json_and_arrays(to_plain(one)))
        for ours, theirs in zip(one.blocks, again.blocks, strict=True):
            assert type(ours) is type(theirs)
            assert on_wire(ours) == on_wire(theirs)


def on_wire(block):
    reply = pb.Reply()
    pieces = messages.blocks_to_message([IndexChooser().encode(block)], reply.blocks)
    return reply.SerializeToString(), b"".join(map(bytes, pieces))


def json_and_arrays(value):
    """Return plain data after a round trip through a file."""
    if isinstance(value, dict):
        return {str(key): json_and_arrays(item) for key, item in value.items()}
    if isinstance(value, list):
        return [json_and_arrays(item) for item in value]
    return value if isinstance(value, np.ndarray) else json.loads(json.dumps(value))


class AsyncRun(CheckedRun):
    """A CheckedRun that also counts the rounds and updates of each relayed reply."""

    def __init__(self, *given, **more):
        self.relayed = []
        super().__init__(*given, **more)

    def decoded(self, shard, reply):
        if isinstance(reply.update, RelayedRounds):
            self.relayed.append(reply.update)
        return super().decoded(shard, reply)


@pytest.mark.parametrize("nb_ps", [1, 2])
@pytest.mark.parametrize("name", ["dgs", "gd", "dgc"])
def test_updates_that_are_released_alone_are_relayed_without_the_receivers_own(
    name, nb_ps, monkeypatch
):
    monkeypatch.setattr(relay, "_KEPT_BYTES", 100)  # several rounds of this small model
    monkeypatch.setattr(relay, "_MOST_MORE", 100)
    run = AsyncRun(method(name, 3, compression_rate=0.2), iter_max=60, nb_ps=nb_ps)
    for shard in run.shards:
        shard.is_behind = True
    run = run.run()
    assert not run.deadlocked()
    replies = [each for each in run.relayed if len(each.rounds) > 1]
    num_own = []
    for reply in replies:
        updates = [update for each in reply.rounds for update in each.updates]
        num_own.append(sum(map(reply.is_own, updates)))  # none where the push came after the end
        sizes = sum(block_bytes(b) for update in updates for b in update.blocks)
        assert (reply.num_bytes < sizes) is (num_own[-1] > 0)
    assert set(num_own) <= {0, 1} and num_own.count(1) > len(num_own) // 2


class TestWhatPays:
    """The codec alone: two updates of others since the base."""

    size = 10_000

    def reply(self, is_urgent=False, num_values=100, overlap=0, forgets=False):
        policy, rng = DownRelay(), np.random.default_rng(0)
        state, theta = policy.init(self.size), np.zeros(self.size, np.float32)
        places = rng.permutation(self.size)
        for version, first in ((1, 0), (2, num_values - overlap)):
            indices = np.sort(places[first : first + num_values])
            coded = CodedValues("float16", np.ones(num_values, np.float16))
            update = RelayedUpdate(version, 5, (Block(0, self.size, indices, coded),))
            relayed = RelayedRound((update,), 1.0)
            state = policy.record_update(ModelChange(indices, version, None, relayed), state)
        if forgets:
            state["scratch"]["rounds"].pop(0)
        request = ModelRequest(3, 7, 0, 1000, is_urgent)
        shard = ShardView(theta, 2, KERNELS, (0, self.size))
        return policy.gather(request, shard, state)

    def test_fewer_bytes_are_relayed_and_more_only_while_others_wait(self):
        """Two values of 2 bytes, or one of 3.5, for an entry that both have changed."""
        assert self.reply().operation is Operation.RELAY
        assert self.reply(overlap=90).operation is Operation.SET
        assert self.reply(overlap=90, is_urgent=True).operation is Operation.RELAY

    def test_entries_that_are_in_two_updates_are_counted_once(self):
        counts = {lap: self.reply(True, overlap=lap).update.num_entries for lap in (0, 30, 90)}
        assert counts == {0: 200, 30: 170, 90: 110}

    def test_what_is_not_kept_is_not_relayed(self):
        assert self.reply(forgets=True).operation is Operation.SET
        # Two updates of 1,100 values and their positions are more than half a byte an entry.
        assert self.reply(num_values=1100).operation is Operation.SET
        assert self.reply(num_values=900).operation is Operation.RELAY


class TestWhatIsKept:
    """The codec alone, fed with rounds of one update, each of one entry and some blocks."""

    def kept(self, num_rounds, size=10_000, num_blocks=1, values=1, payload=None):
        policy = DownRelay()
        state, chooser = policy.init(size), IndexChooser()
        for version in range(1, num_rounds + 1):
            indices = np.arange(values, dtype=np.int64)
            coded = CodedValues("float16", np.ones(values, np.float16))
            block = chooser.encode(Block(0, size, indices, coded))
            if payload is not None:
                block = dataclasses.replace(block, value_bytes=payload[: len(block.value_bytes)])
            relayed = RelayedRound((RelayedUpdate(1, version, (block,) * num_blocks),), 1.0)
            state = policy.record_update(ModelChange(indices, version, None, relayed), state)
        return policy, state

    def reply(self, num_rounds, **more):
        policy, state = self.kept(num_rounds, **more)
        size = len(state["last_changed"])
        shard = ShardView(np.zeros(size, np.float32), num_rounds, KERNELS, (0, size))
        return policy.gather(ModelRequest(3, 7, 0, 1000, True), shard, state)

    def test_no_more_rounds_than_so_many_however_small(self):
        _, state = self.kept(100)
        assert len(state["scratch"]["rounds"]) == 64
        assert [each.version for each in state["scratch"]["rounds"]] == list(range(37, 101))

    def test_not_the_payload_that_a_block_came_in(self):
        payload = memoryview(bytearray(1 << 20))
        _, state = self.kept(1, payload=payload)
        (kept,) = state["scratch"]["rounds"]
        (update,) = kept.round.updates
        assert all(
            type(each) is bytes for b in update.blocks for each in (b.index_bytes, b.value_bytes)
        )

    def test_no_round_that_is_larger_than_the_shard(self, monkeypatch):
        monkeypatch.setattr(relay, "_DESCRIPTION_BYTES", 20)
        pushed = [RelayedUpdate(n, 1, ()) for n in (1, 2)]
        policy, state = self.kept(1)
        blocks = (Block(0, 10_000, None, CodedValues("float32", np.ones(10_000, np.float32))),)
        for copies, is_kept in ((1, True), (2, False)):
            state = policy.init(10_000)
            updates = tuple(dataclasses.replace(each, blocks=blocks * copies) for each in pushed)
            policy.record_update(ModelChange(None, 1, None, RelayedRound(updates, 1.0)), state)
            assert bool(state["scratch"]["rounds"]) is is_kept

    def test_a_header_of_many_blocks_is_not_begun(self, monkeypatch):
        monkeypatch.setattr(relay, "_MOST_MORE", 1e9)
        monkeypatch.setattr(relay, "_DESCRIPTION_BYTES", 20)
        monkeypatch.setattr(relay, "_KEPT_BYTES", 1e9)
        assert self.reply(8, num_blocks=1000).operation is Operation.RELAY
        assert self.reply(16, num_blocks=1000).operation is Operation.SET

    def test_nor_what_is_decoded_into_many_times_the_shard(self, monkeypatch):
        monkeypatch.setattr(relay, "_MOST_MORE", 1e9)
        monkeypatch.setattr(relay, "_KEPT_BYTES", 1e9)
        assert self.reply(3, size=100, values=60).operation is Operation.RELAY
        assert self.reply(4, size=100, values=60).operation is not Operation.RELAY

    def test_nothing_before_an_update_that_cannot_be_relayed(self):
        policy, state = self.kept(5)
        policy.record_update(ModelChange(np.arange(3), 6), state)
        assert not state["scratch"]["rounds"]


def some_rounds():
    run = AsyncRun(relaying("int2"), iter_max=20).run()
    return run.relayed[-1]


def on_the_wire(rounds):
    reply = pb.Reply(step=rounds.step)
    pieces = messages.rounds_to_message(rounds, reply, IndexChooser())
    return reply, b"".join(map(bytes, pieces))


SIZES = [tensor.size for tensor in SPEC.tensors]
LAYOUT = ShardLayout(tuple(Slice(number, 0, size) for number, size in enumerate(SIZES)))


@pytest.mark.parametrize("is_coded", [False, True])
def test_rounds_travel_and_come_back(is_coded):
    rounds = some_rounds()
    if is_coded:  # as they come from a decoder of pushes
        chooser = IndexChooser()
        (one,) = rounds.rounds
        updates = [
            dataclasses.replace(each, blocks=tuple(map(chooser.encode, each.blocks)))
            for each in one.updates
        ]
        coded = dataclasses.replace(rounds, rounds=(RelayedRound(tuple(updates), one.rate),))
        block = coded.rounds[0].updates[0].blocks[0]
        assert block_bytes(block) == len(block.index_bytes) + len(block.value_bytes)
    else:
        coded = rounds
    reply, payload = on_the_wire(coded)
    (found,) = messages.rounds_from_message(reply, memoryview(payload), SIZES)
    _, (sent,) = decoded(rounds, LAYOUT)
    assert found.rate == sent.rate and found.updates.count(None) == 1
    for ours, theirs in zip(sent.updates, found.updates, strict=True):
        assert (ours is None) is (theirs is None)
        for one, two in zip(ours or (), theirs or (), strict=True):
            assert one.slot == two.slot
            np.testing.assert_array_equal(
                KERNELS.dequantise(one.values), KERNELS.dequantise(two.values)
            )


def changed(reply, **fields):
    other = pb.Reply()
    other.CopyFrom(reply)
    for name, value in fields.items():
        if name == "step":
            other.step = value
        elif isinstance(value, list):
            del other.rounds[0].num_blocks[:]
            other.rounds[0].num_blocks.extend(value)
        else:
            setattr(other.rounds[0], name, value)
    return other


@pytest.mark.parametrize(
    ("fields", "cut", "message"),
    [
        ({"num_blocks": []}, 0, "1 rounds of a reply announce 0 blocks"),
        ({"num_blocks": [1]}, 0, "1 rounds of a reply announce 1 blocks"),
        ({"step": 0}, 0, "own"),
        ({"own": 9}, 0, "own update 9"),
        ({"rate": math.nan}, 0, "rate nan"),
        ({}, 1, "ends at byte"),
        ({}, -1, "use"),
    ],
)
def test_rounds_that_do_not_add_up_are_refused(fields, cut, message):
    reply, payload = on_the_wire(some_rounds())
    payload = payload[:-cut] if cut > 0 else payload + b"\0" * -cut
    with pytest.raises(Malformed, match=message):
        messages.rounds_from_message(changed(reply, **fields), memoryview(payload), SIZES)


def test_an_own_update_with_blocks_and_two_own_ones_are_refused():
    reply, payload = on_the_wire(some_rounds())
    (round_,) = reply.rounds
    round_.own = 1 + next(n for n, count in enumerate(round_.num_blocks) if count)
    with pytest.raises(Malformed, match=f"own update {round_.own} of"):
        messages.rounds_from_message(reply, memoryview(payload), SIZES)
    reply, payload = on_the_wire(some_rounds())
    reply.rounds.add(num_blocks=[0], rate=1.0, own=1)
    with pytest.raises(Malformed, match="own updates"):
        messages.rounds_from_message(reply, memoryview(payload), SIZES)


def test_of_a_workers_own_pushes_only_that_is_left_out_which_a_reply_answers():
    """It lost the answer to the one before, and pushes again from the same weights."""
    policy, size = DownRelay(), 10_000
    state = policy.init(size)
    for version, (worker, step) in enumerate([(1, 6), (2, 7), (1, 7)], start=1):
        indices = np.arange(50 * version, 50 * version + 50)
        coded = CodedValues("float16", np.ones(50, np.float16))
        update = RelayedUpdate(worker, step, (Block(0, size, indices, coded),))
        relayed = RelayedRound((update,), 1.0)
        policy.record_update(ModelChange(indices, version, None, relayed), state)
    shard = ShardView(np.zeros(size, np.float32), 3, KERNELS, (0, size))
    reply, _ = on_the_wire(policy.gather(ModelRequest(1, 7, 0), shard, state).update)
    assert [(each.own, list(each.num_blocks)) for each in reply.rounds] == [
        (0, [1]),
        (0, [1]),
        (1, [0]),
    ]
