"""A datagram receiver rejects impossible pushes and datagrams of strangers."""

import math

import numpy as np
import pytest

from tests.ps.port import alone, hostile, ramp, values_of
from thinwire.proto.framing import Malformed
from thinwire.ps.wire.push_decoder import NonFinite


def test_what_is_not_finite_when_it_is_whole_is_refused():
    port, worker = alone(dgt_wait_ms=1000.0)
    outgoing = worker.begin()
    worker.mark(outgoing, loss=math.inf)
    before = port.theta
    worker.send(outgoing)
    port.turn()
    assert [(each.reason, each.step) for each in port.refusals] == [("NON_FINITE", 1)]
    np.testing.assert_array_equal(port.theta, before)
    worker.push(worker.begin(ramp()))
    np.testing.assert_array_equal(values_of(port.pushed[-1]), ramp())


def test_datagrams_of_a_refused_step_are_not_used_late():
    port, worker = alone()
    outgoing = worker.begin()
    worker.mark(outgoing, loss=math.nan)  # at once: nothing is waited for
    worker.send(outgoing)
    worker.push(worker.begin(ramp()))
    np.testing.assert_array_equal(values_of(port.pushed[-1]), ramp())
    assert port.dropped()["abandoned"] > 0


def test_a_step_that_was_refused_is_not_applied_under_another_loss():
    port, worker = alone(dgt_k=1.0)
    outgoing, before = worker.begin(ramp()), port.theta
    worker.mark(outgoing, loss=math.inf)
    assert [each.reason for each in port.refusals] == ["NON_FINITE"]
    with pytest.raises(NonFinite, match="step 1"):
        worker.mark(outgoing, loss=0.5)
    port.turn()
    assert not port.pushed
    np.testing.assert_array_equal(port.theta, before)
    worker.push(worker.begin(ramp()))
    assert port.core.version == 1


def _channels(*rows):
    def change(manifest):
        del manifest.channels[:]
        for channel, first, count in rows:
            manifest.channels.add(channel=channel, first=first, count=count)

    return change


def _k(value):
    def change(manifest):
        manifest.k = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        _channels((2, 0, 1), (1, 0, 1)),
        _channels((1, 0, 1), (1, 1, 1)),
        _channels((0, 0, 1)),
        _channels((8, 0, 1)),
        _channels((7, 0, 1)),  # the run has three
        _channels((1, 0, 29)),  # the shard has 28 entries
        _channels((1, 0, 2**32 - 1)),
        _k(math.nan),
        _k(-0.1),
        _k(1.5),
        _k(math.inf),
    ],
)
def test_manifests_that_cannot_be_are_malformed(change):
    port, worker = alone(dgt_wait_ms=1000.0)
    push, payload = worker.messages(worker.begin())[0]
    change(push.manifest)
    before = port.theta
    with pytest.raises(Malformed):
        port.receiver.on_push(1, push, payload)
    port.turn()
    np.testing.assert_array_equal(port.theta, before)
    worker.push(worker.begin(ramp()))
    np.testing.assert_array_equal(values_of(port.pushed[-1]), ramp())


def test_announcements_of_tensors_that_leave_gaps_are_malformed():
    port, worker = alone(dgt_marker="tensor", dgt_wait_ms=1000.0)
    messages = worker.messages(worker.begin())
    messages[0][0].manifest.channels[0].first += 3
    with pytest.raises(Malformed):
        for push, payload in messages:
            port.receiver.on_push(1, push, payload)
    assert not port.turn().pushed


def test_parts_without_end_are_malformed():
    """The shard would store them until a last part comes, which never comes."""
    port, worker = alone(dgt_marker="tensor", dgt_wait_ms=1000.0)
    push, _ = worker.messages(worker.begin())[0]
    push.payload_bytes = 0
    del push.blocks[:], push.manifest.channels[:]
    with pytest.raises(Malformed, match="messages of one step"):
        for _ in range(10):
            port.receiver.on_push(1, push, memoryview(b""))
    worker.push(worker.begin(ramp()))
    np.testing.assert_array_equal(values_of(port.pushed[-1]), ramp())


def test_a_manifest_that_counts_more_blocks_than_there_are_is_only_a_wrong_count():
    port, worker = alone()
    push, payload = worker.messages(worker.begin())[0]
    push.manifest.num_blocks = push.manifest.num_reliable = 2**32 - 1
    push.manifest.num_skipped = push.manifest.num_dropped = 2**32 - 1
    port.receiver.on_push(1, push, payload)
    port.turn()
    outcome = port.receiver.outcome(1, 1)
    assert 0 <= outcome.fresh <= 1 and 0 <= outcome.filled <= 1


# -- hostile ----------------------------------------------------------------------------------


def test_a_hundred_thousand_hostile_datagrams_leave_the_model_alone_and_are_counted():
    port, worker = alone()
    for _ in range(3):
        past = worker.begin(ramp())
        worker.push(past)
    old, rng = worker.datagrams(past), np.random.default_rng(11)
    outgoing = worker.begin(ramp(2))
    good = worker.datagrams(outgoing)
    before, counted = port.theta, sum(port.dropped().values())
    num_sent = 0
    while num_sent < 100_000:
        data, size, count = hostile(rng, good, old)
        port.receiver.receive(memoryview(data), size)
        num_sent += count
    np.testing.assert_array_equal(port.theta, before)
    assert sum(port.dropped().values()) - counted == num_sent
    assert len(port.pushed) == 3
    worker.push(outgoing)
    np.testing.assert_array_equal(values_of(port.pushed[-1]), ramp(2))
    assert port.receiver.outcome(1, 4).arrived == port.receiver.outcome(1, 4).announced


def test_lost_on_purpose_is_what_comes_by_udp_alone():
    port, worker = alone()
    port.receiver.inject_loss(1.0, 7)
    outgoing = worker.begin(ramp())
    worker.send(outgoing)
    assert port.dropped() == {"on purpose": len(_each(worker.datagrams(outgoing)))}
    for data, size in worker.datagrams(outgoing):
        port.receiver.receive_from_stream(memoryview(data), size)
    worker.mark(outgoing)
    np.testing.assert_array_equal(values_of(port.pushed[0]), ramp())


def _each(batches):
    return [data[at : at + size] for data, size in batches for at in range(0, len(data), size)]
