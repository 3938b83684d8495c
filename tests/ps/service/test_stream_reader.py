"""The states of a client's stream, and the dialogues that the states lead to."""

import gc
import weakref

import pytest

from tests.ps.service.test_hostile_values import EVALUATOR, LOOKS, SCRIPT, SHARD, Leader
from tests.ps.streams import ROGUE, Stream, frame, push_frame
from thinwire.proto import thinwire_pb2 as pb
from thinwire.ps.service.dialogues.observers import (
    EvaluatorDialogue,
    FollowerDialogue,
    SupervisorDialogue,
)
from thinwire.ps.service.dialogues.offer import OfferDialogue
from thinwire.ps.service.dialogues.script import ScriptDialogue
from thinwire.ps.service.dialogues.worker import WorkerDialogue
from thinwire.ps.service.stream_state import ClientStreamState

DIALOGUES = (
    WorkerDialogue,
    SupervisorDialogue,
    EvaluatorDialogue,
    FollowerDialogue,
    ScriptDialogue,
    OfferDialogue,
)
#: Messages that no dialogue receives: the first message, and parts of the framing.
OF_THE_READER = {"hello", "chunk", "switch"}
WORKER = {"id": ROGUE, "incarnation": 5}


def open_stream(shard, **fields):
    """Return the reader of a stream whose Hello the writer thread has not handled yet."""
    reader = shard.server.reader_of(Stream(shard.server))
    assert reader.state is ClientStreamState.BEFORE_HELLO
    assert reader.receive(frame(hello=shard.hello(**fields)))
    return reader


def test_every_message_has_a_dialogue_and_every_row_a_message():
    bodies = {field.name for field in pb.ToServer.DESCRIPTOR.oneofs_by_name["body"].fields}
    assert set().union(*(dialogue.messages for dialogue in DIALOGUES)) == bodies - OF_THE_READER


def test_a_worker_waits_is_admitted_and_is_replaced():
    shard = Leader("asgd")
    old = open_stream(shard, **WORKER)
    assert old.state is ClientStreamState.WAITING
    shard.server.run_until(shard.server.queue.empty)
    assert old.state is ClientStreamState.ADMITTED
    new = open_stream(shard, **WORKER)
    shard.server.run_until(shard.server.queue.empty)
    assert old.state is ClientStreamState.REPLACED
    assert new.state is ClientStreamState.ADMITTED


def test_a_worker_that_waits_must_not_send():
    shard = Leader("asgd")
    reader = open_stream(shard, **WORKER)
    assert not reader.receive(frame(heartbeat=pb.Heartbeat()))
    assert shard.server.guard.refused == {"malformed": 1}


@pytest.mark.parametrize("fields", [LOOKS, EVALUATOR, SHARD, SCRIPT])
def test_other_clients_are_admitted_by_their_hello(fields):
    assert open_stream(Leader("asgd"), **fields).state is ClientStreamState.ADMITTED


@pytest.mark.parametrize("fields", [WORKER, LOOKS, EVALUATOR, SHARD, SCRIPT])
def test_a_link_that_no_flag_sets_is_refused_in_every_role(fields):
    """An infinite rate has no size of pieces: a script's Hello with it ended the thread."""
    shard = Leader("asgd")
    stream = shard.say(**fields, link=pb.EmulatedLink(mbps=float("inf")))
    assert stream.last("refusal")[0].reason == pb.REASON_MALFORMED
    assert shard.server.guard.refused == {"malformed": 1}


@pytest.mark.parametrize("fields", [WORKER, SCRIPT])
def test_half_a_payload_ends_with_its_stream(fields):
    """A circle of references would keep the payload until the garbage collector runs."""
    shard = Leader("asgd")
    reader = open_stream(shard, **fields)
    shard.server.run_until(shard.server.queue.empty)
    push = pb.ToServer.FromString(push_frame()).push
    push.ClearField("payload")
    assert reader.receive(frame(push=push))
    memory = weakref.ref(reader._assembler._buffer.obj)
    gc.disable()
    try:
        reader.forget()
        del reader
        assert memory() is None
    finally:
        gc.enable()
