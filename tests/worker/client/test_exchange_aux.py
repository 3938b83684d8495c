"""A worker's exchange encodes and decodes averaged auxiliary values."""

import threading

import numpy as np
import pytest

from tests.command_line import given
from tests.virtual.worker import SPEC, normed_core, numbers, start
from thinwire.flags.run import read_run
from thinwire.ops.push_head import PushOrigin
from thinwire.ops.types import ConfigurationError, Link
from thinwire.ops.wire.blocks import IndexChooser
from thinwire.proto import thinwire_pb2 as pb
from thinwire.proto.framing import Malformed
from thinwire.worker.client.exchange import Exchange
from thinwire.worker.client.messages import push_messages


def exchange(nb_ps=1, aux_size=3):
    with given("--nb_workers=1", f"--nb_ps={nb_ps}"):
        run = read_run()
    layouts = run.method.place(SPEC, nb_ps)
    return Exchange(run, 1, SPEC, layouts, Link(), threading.Event(), aux_size)


def test_a_push_ends_with_them_and_a_reply_brings_them_back():
    core = normed_core()
    start(core, numbers())
    outgoing = core.begin(numbers(1), 8, 1.0, np.float32([4, 5, 6]))
    ((message, pieces),) = push_messages(outgoing, 0, 1, 0, IndexChooser())
    payload = b"".join(bytes(piece) for piece in pieces)
    assert message.push.aux_count == 3
    np.testing.assert_array_equal(np.frombuffer(payload[-12:], "<f4"), [4, 5, 6])
    answer = pb.Reply(blocks=message.push.blocks, aux_count=3, operation=pb.OPERATION_FULL)
    reply = exchange()._decode(0, answer, memoryview(payload))
    np.testing.assert_array_equal(reply.aux, [4, 5, 6])
    assert [len(block.values.data) for block in reply.blocks] == [12, 4, 1]


def test_other_shards_send_and_get_none():
    core = normed_core()
    start(core, numbers())
    outgoing = core.begin(numbers(1), 8, 1.0, np.float32([4, 5, 6]))
    outgoing.shards.append(outgoing.shards[0])
    outgoing.routed.append(outgoing.routed[0])
    outgoing.origins.append(PushOrigin())
    ((message, _),) = push_messages(outgoing, 1, 1, 0, IndexChooser())
    assert message.push.aux_count == 0
    assert exchange(nb_ps=2)._decode(1, pb.Reply(), memoryview(b"")).aux is None


@pytest.mark.parametrize("count", [0, 2, 4])
def test_a_shard_with_another_model_is_named(count):
    with pytest.raises(ConfigurationError, match=f"averages {count} values .* 3; "):
        exchange()._decode(0, pb.Reply(aux_count=count), memoryview(bytes(4 * count)))


def test_a_reply_that_is_too_short_is_malformed():
    with pytest.raises(Malformed, match="3 auxiliary values .*payload of 8 bytes"):
        exchange()._decode(0, pb.Reply(aux_count=3), memoryview(bytes(8)))


def test_the_rest_of_a_push_does_not_answer_a_pull():
    rest = pb.Reply(operation=pb.OPERATION_SET_REST)
    with pytest.raises(Malformed, match="SET_REST"):
        exchange(aux_size=0)._decode(0, rest, memoryview(b""))
