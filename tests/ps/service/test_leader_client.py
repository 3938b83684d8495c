"""A following shard's stream to shard 0 is reopened when the stream breaks."""

import types

import pytest

from thinwire.ops.types import ShardLayout
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.grpc import StreamLost, Unreachable
from thinwire.ps.core import events
from thinwire.ps.service.leader_client import LeaderClient


class Stream:
    """A stream that breaks at the first look."""

    def __init__(self, number):
        self.number, self.sent = number, []

    def listen(self):
        raise StreamLost(f"stream {self.number} broke")

    def send_control(self, message):
        self.sent.append(message)

    def close(self):
        pass


@pytest.fixture
def leader():
    """A client that gets three streams, one after the other; then shard 0 is unreachable."""
    made = LeaderClient("here", pb.Hello(), ShardLayout(()), lambda event: None, str)
    made.events, made.streams = [], [Stream(number) for number in (1, 2, 3)]
    left = iter(made.streams)

    def dial(seconds):
        stream = next(left, None)
        if stream is None:
            raise Unreachable("nobody is there")
        return stream, pb.Welcome()

    made._put, made._dialler = made.events.append, types.SimpleNamespace(dial=dial)
    made.connect(1.0)
    return made


@pytest.mark.parametrize("begins_phase", [False, True])
def test_a_loss_is_logged_unless_this_shard_has_ended_the_stream_itself(
    leader, caplog, begins_phase
):
    if begins_phase:
        leader.reconnect(pb.Hello(phase=2))
    with caplog.at_level("WARNING", logger="absl"):
        leader._listen(1.0)
    lost = [number for number in (1, 2, 3) if f"to shard 0: stream {number} broke" in caplog.text]
    assert lost == ([2, 3] if begins_phase else [1, 2, 3])
    assert leader.events == [events.Stop("interrupted")] and leader.lost_for_good


def test_the_end_that_workers_requested_is_requested_of_each_new_stream(leader):
    leader.request_end("diverged")
    leader._listen(1.0)
    assert [[message.halt.cause for message in each.sent] for each in leader.streams] == [
        ["diverged"]
    ] * 3
