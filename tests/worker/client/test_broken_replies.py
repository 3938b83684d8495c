"""An invalid reply ends a worker or a Supervisor with an error message, not a traceback."""

import queue
import types

import numpy as np
import pytest

from tests.virtual.toy import SPEC, method
from tests.worker.client.test_exchange_aux import exchange
from thinwire.ops.types import ConfigurationError
from thinwire.proto import thinwire_pb2 as pb
from thinwire.supervisor.evaluator import ModelFetcher
from thinwire.worker.client.protocol import Replied

_DENSE = [pb.Block(slot=slot, count=size) for slot, size in enumerate((16, 8, 4))]
_WHOLE = np.ones(28, "<f4").tobytes()

BROKEN = {
    "operation": pb.Reply(operation=77),
    "payload": pb.Reply(blocks=_DENSE, payload=_WHOLE[:-4]),
    "coding": pb.Reply(blocks=[pb.Block(slot=0, count=16, coding=9)], payload=bytes(64)),
    "rest": pb.Reply(operation=pb.OPERATION_SET_REST),
}


def answering(message):
    asked = exchange(aux_size=0)
    asked.shards[0].pull = lambda: None
    asked.shards[0].wait_for_reply = lambda: (Replied(message), memoryview(message.payload))
    return asked


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_a_worker_says_who_sent_what_it_cannot_use(name):
    asked = answering(BROKEN[name])
    with pytest.raises(ConfigurationError, match=r"127\.0\.0\.1:\d+ sent a reply .* same Thinwire"):
        asked.pull()
    with pytest.raises(ConfigurationError, match=r"127\.0\.0\.1:\d+"):
        asked._settle(0)


def view_of(reply):
    """Return a Supervisor's result of one shard's reply."""
    layouts = method("asgd").place(SPEC, 1)
    viewer = ModelFetcher(SPEC, layouts, 0, in_step=False)
    replies = queue.SimpleQueue()
    answer = reply, memoryview(reply.payload)
    session = types.SimpleNamespace(
        send_control=lambda message: replies.put(answer), address="here:1"
    )
    return viewer.fetch([types.SimpleNamespace(replies=replies, session=session)])


def test_a_whole_model_is_seen():
    seen = view_of(pb.Reply(blocks=_DENSE, payload=_WHOLE, version=5))
    np.testing.assert_array_equal(seen.weights, np.ones(28, np.float32))
    assert seen.versions == [5]


@pytest.mark.parametrize(
    "reply",
    [
        pb.Reply(),  # its weights would be uninitialized memory
        pb.Reply(blocks=_DENSE[:2], payload=_WHOLE[:96]),
        pb.Reply(blocks=_DENSE, payload=_WHOLE[:-4]),
        pb.Reply(aux_count=3, blocks=_DENSE, payload=_WHOLE),
        pb.Reply(
            blocks=[pb.Block(slot=0, count=1, coding=4, index_bytes=4), *_DENSE[1:]],
            payload=bytes(8) + _WHOLE[64:],
        ),
    ],
    ids=["nothing", "a part", "too short", "statistics", "sparse"],
)
def test_less_than_the_model_is_no_view(reply):
    with pytest.raises(ConfigurationError, match="here:1 sent a model that cannot be read"):
        view_of(reply)


def test_half_precision_is_read_as_what_it_stands_for():
    dense = [pb.Block(slot=0, count=16, value_dtype=pb.VALUE_DTYPE_BFLOAT16), *_DENSE[1:]]
    ones = np.full(16, 0x3F80, "<u2").tobytes()
    seen = view_of(pb.Reply(blocks=dense, payload=ones + _WHOLE[64:]))
    np.testing.assert_array_equal(seen.weights, np.ones(28, np.float32))
