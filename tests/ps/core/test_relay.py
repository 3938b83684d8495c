"""Relayed rounds: workers add what the shard added, bit for bit, over the wire and after faults."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.harness import KERNELS, SPEC, MiniRun, method
from thinwire.ops.downlink.types import Operation, RelayedRound
from thinwire.ops.sharding.split import shard_positions
from thinwire.ops.types import FEW_BITS
from thinwire.ops.wire.blocks import IndexChooser
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed
from thinwire.ps.core import events
from thinwire.ps.wire.replies import coded_blocks


def relaying(value_dtype="int2", sync="bsp", **choices):
    overrides = {"codec": "chunked_topk", "down_codec": "relay", "sync": sync}
    overrides |= choices.pop("overrides", {})
    settings = {"chunk": 8, "chunk_k": 2, "error_feedback": True, "nb_workers": 3} | choices
    return method("asgd", value_dtype=value_dtype, overrides=overrides, **settings)


class CheckedRun(MiniRun):
    """After its replies a worker's model is the shards', bit for bit; operations are kept."""

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
    # Three workers' float32 values are no fewer bytes than the new ones of all their entries.
    assert (Operation.RELAY in run.operations) is (value_dtype != "float32")


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


def test_the_state_goes_through_a_snapshot_in_a_round():
    """A push that waits keeps its blocks, and the last round is part of the soft state."""
    from thinwire.ps.core.serialization import from_plain, to_plain

    run = CheckedRun(relaying(), iter_max=100)
    run.join_all()
    for _ in range(40):
        run.turn()
    core = run.shards[0]
    saved = to_plain(core.state_dict()), to_plain(core.state_dict(soft=True))
    other = run._shard(0, np.zeros(28, np.float32))
    other.load_state_dict(from_plain(saved[0]))
    other.load_state_dict(from_plain(saved[1]), soft=True)
    last = core.model._down["scratch"]["round"]
    again = other.model._down["scratch"]["round"]
    assert again["version"] == last["version"]
    for ours, theirs in zip(last["relayed"].updates, again["relayed"].updates, strict=True):
        for one, two in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(one.values.data, two.values.data)
            np.testing.assert_array_equal(one.values.scales, two.values.scales)


def on_the_wire(relayed):
    chooser, reply = IndexChooser(), pb.Reply()
    pieces = messages.blocks_to_message(
        [chooser.encode(block) for block in coded_blocks(relayed, None)], reply.blocks
    )
    reply.relayed.extend(len(blocks) for blocks in relayed.updates)
    return reply, b"".join(map(bytes, pieces))


def a_round():
    chosen = relaying("int2")
    run = MiniRun(chosen, iter_max=20)
    run.run()
    found = [
        a.update for _, a in run.actions if isinstance(getattr(a, "update", None), RelayedRound)
    ]
    return found[-1]


def test_a_round_travels_and_comes_back():
    relayed = a_round()
    reply, payload = on_the_wire(RelayedRound((*relayed.updates, ()), relayed.rate))
    sizes = [tensor.size for tensor in SPEC.tensors]
    found = messages.relayed_from_message(reply.blocks, reply.relayed, memoryview(payload), sizes)
    assert len(found) == 4 and found[-1] == ()
    for ours, theirs in zip(relayed.updates, found, strict=False):
        for one, two in zip(ours, theirs, strict=True):
            assert one.slot == two.slot
            np.testing.assert_array_equal(
                KERNELS.dequantise(one.values), KERNELS.dequantise(two.values)
            )


@pytest.mark.parametrize(
    ("counts", "cut", "message"),
    [([], 0, "of 0 updates"), ([1], 0, "with 1"), (None, 1, "ends at byte"), (None, -1, "use")],
)
def test_rounds_that_do_not_add_up_are_refused(counts, cut, message):
    reply, payload = on_the_wire(a_round())
    payload = payload[:-cut] if cut > 0 else payload + b"\0" * -cut
    given = reply.relayed if counts is None else counts
    sizes = [tensor.size for tensor in SPEC.tensors]
    with pytest.raises(Malformed, match=message):
        messages.relayed_from_message(reply.blocks, given, memoryview(payload), sizes)
