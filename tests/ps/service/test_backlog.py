"""A reader waits for the writer thread only if many events of its client are queued."""

import pytest

from tests.ps.streams import HONEST, Shard, frame
from thinwire.proto import thinwire_pb2 as pb
from thinwire.ps.service import backlog
from thinwire.ps.service.backlog import Backlog


def put_by(messages, num_replies=0):
    """Count messages (bytes, whether a request); return how often the writer is waited for."""
    queued = []
    counted = Backlog(queued.append, lambda: num_replies)
    for num_bytes, is_request in messages:
        counted.add(num_bytes, is_request)
    return len(queued)


@pytest.mark.parametrize(
    ("messages", "num_waits"),
    [
        ([(100, True)], 0),
        ([(100, True)] * backlog.MOST_QUEUED_REQUESTS, 1),
        ([(100, False)] * 1000, 0),
        ([(0, False)] * (backlog.MOST_QUEUED_BYTES // 1000), 1),  # small ones cost something, too
        ([(backlog.MOST_QUEUED_BYTES, False)], 1),
    ],
)
def test_only_much_is_waited_for(messages, num_waits):
    assert put_by(messages) == num_waits


def test_requests_that_are_answered_are_not_waited_for():
    assert put_by([(100, True)] * 3, num_replies=2) == 0


def test_parts_of_a_push_are_one_request(monkeypatch):
    counted = []
    monkeypatch.setattr(
        Backlog, "add", lambda self, num_bytes, is_request: counted.append(is_request)
    )
    push = pb.Push(step=1, samples=8, local_steps=1)
    part = pb.Push(step=1, samples=8, local_steps=1, more=True)
    Shard("dgt").say(frame(push=part), frame(push=part), frame(push=push), id=HONEST)
    assert counted == [False, False, False, True]
