"""Every rejection by a shard is counted once, by its reason."""

import pytest

from tests.ps.streams import HONEST, ROGUE, Shard, Stream, frame, push_frame
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed
from thinwire.ps.wire.epochs import decode_epoch


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"id": 9}, "id_range"), ({"id": HONEST}, "id_taken")],
)
def test_a_hello_that_the_core_refuses_is_counted(fields, reason):
    shard = Shard("asgd")

    def holder():
        yield frame(hello=shard.hello(id=HONEST, incarnation=7))
        shard.say(**fields)

    Stream(shard.server, holder()).read()
    assert shard.server.guard.refused == {reason: 1}


@pytest.mark.parametrize(
    "asked",
    [
        push_frame(incarnation=8),
        frame(query=pb.Query(incarnation=8, step=1)),
    ],
)
def test_what_another_life_asks_is_counted(asked):
    shard = Shard("asgd")
    shard.say(asked, incarnation=7)
    assert shard.server.guard.refused == {"not_member": 1}
    assert shard.core.version == 0


def test_a_push_of_another_membership_is_counted():
    shard = Shard("asgd")
    shard.say(push_frame(incarnation=7, epoch=99), incarnation=7)
    assert shard.server.guard.refused == {"stale_epoch": 1}


def test_what_the_accounts_count_is_not_counted_twice():
    shard = Shard("asgd")
    lost = push_frame(incarnation=7, generation=3)
    shard.say(push_frame(incarnation=7, loss=float("nan")), lost, incarnation=7)
    assert shard.server.guard.refused == {}
    assert shard.core.counters.rejected == {"non_finite": 1, "generation": 1}


def test_what_comes_on_a_stream_that_was_replaced_is_counted():
    shard = Shard("asgd")

    stream = Stream(shard.server)

    def incoming():  # the client reads no farewell before it speaks again
        yield frame(hello=shard.hello(incarnation=7))
        shard.server.run_until(shard.server.queue.empty)
        shard.say(incarnation=7)
        yield frame(heartbeat=pb.Heartbeat())

    stream.incoming = incoming
    stream.read()
    assert shard.server.guard.refused.get("replaced") == 1
    assert set(shard.server.connections.workers) <= {ROGUE}


def test_an_epoch_with_other_steps_than_workers_is_malformed():
    odd = pb.Membership(epoch=4, formed=[pb.Group(workers=[1, 2], steps=[5])], formed_epoch=4)
    with pytest.raises(Malformed, match="epoch 4: .*step"):
        decode_epoch(odd)
