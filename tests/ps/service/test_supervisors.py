"""If two Supervisors connect, the newer one replaces the older one."""

import types

import pytest

from tests.ps.streams import Shard, Stream, frame
from tests.virtual.toy import SPEC
from thinwire.proto import messages
from thinwire.proto import thinwire_pb2 as pb
from thinwire.ps.service.observers import RoundsRelay


def supervisor(shard, evaluates=True):
    """Return the open stream of a Supervisor after its Hello."""
    hello = pb.Hello(
        protocol_version=messages.PROTOCOL_VERSION,
        role=pb.ROLE_SUPERVISOR,
        num_shards=1,
        model=messages.tensors_of(SPEC) if evaluates else [],
    )
    stream = Stream(shard.server)

    def frames():
        yield frame(hello=hello)
        while not stream.closed:
            yield frame(heartbeat=pb.Heartbeat())

    stream.frames = frames()
    words = stream.incoming()
    reader = shard.server.reader_of(stream)
    stream.hear = lambda: reader.receive(next(words))
    stream.hear()
    shard.server.run_until(shard.server.queue.empty)
    return stream


def test_the_newer_one_takes_the_place_and_the_older_is_told():
    shard = Shard()
    old, new = supervisor(shard), supervisor(shard)
    refusal, _ = old.last("refusal")
    assert refusal.reason == pb.REASON_ID_TAKEN
    assert "another Supervisor" in refusal.message
    assert old.closed and not new.closed
    assert new.last("welcome")[0] is not None
    assert new.last("refusal")[0] is None


def test_who_only_looks_disturbs_nobody():
    shard = Shard()
    old = supervisor(shard)
    supervisor(shard, evaluates=False)
    supervisor(shard, evaluates=False)
    assert old.last("refusal")[0] is None
    assert not old.closed


def test_a_place_that_was_left_needs_no_taking():
    shard = Shard()
    old = supervisor(shard)
    (connection,) = shard.server.connections.with_role(pb.ROLE_SUPERVISOR)
    connection.left = True
    supervisor(shard)
    assert old.last("refusal")[0] is None


def test_a_status_is_sent_only_to_a_supervisor_that_looks():
    """A Supervisor that evaluates gets batches of rounds instead; other clients get no status."""
    shard = Shard()
    assert supervisor(shard, evaluates=False).last("report")[0].document
    shard.server.observers.on_status = lambda: pytest.fail("a status was made")
    assert supervisor(shard).last("welcome")[0] is not None
    evaluator = {"role": pb.ROLE_EVALUATOR, "id": 0, "incarnation": 4}
    stream = shard.say(**evaluator, fingerprint=[], model=[])
    assert stream.last("welcome")[0] is not None and stream.last("report")[0] is None


@pytest.mark.parametrize(
    ("batches", "kept"),
    [
        (["aaaaa", "bbbbb"], ["aaaaa", "bbbbb"]),  # as long as may be kept
        (["aaaaa", "bbbbb", "c"], ["bbbbb", "c"]),
        (["aaaaa", "b" * 11], ["b" * 11]),  # the newest is kept, however long
        (["b" * 11, "c"], ["c"]),
    ],
)
def test_the_newest_batches_of_rounds_wait_for_a_supervisor(batches, kept):
    relay, stream = RoundsRelay(kept_per_worker=10), Stream(None)
    for batch in batches:
        assert relay.take(1, batch, []) == 0
    relay.repeat(types.SimpleNamespace(stream=stream))
    assert [message.report.rounds for message, _ in stream.received] == kept
