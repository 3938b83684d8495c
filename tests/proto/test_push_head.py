"""A push's numbers and the fields of its message: the same in both directions, and by default."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.ops.push_head import PushHead, PushOrigin
from thinwire.ops.types import Kind
from thinwire.proto import push_head
from thinwire.proto import thinwire_pb2 as pb

COUNTS = st.integers(0, 2**32 - 1)
REALS = st.floats(0, 2**20, width=32, allow_subnormal=False)
HEADS = st.builds(
    PushHead,
    step=COUNTS,
    samples=COUNTS,
    local_steps=COUNTS,
    loss=st.none() | REALS,
    learning_rate=st.none() | REALS,
    loss_scale=REALS,
    overflow=st.booleans(),
    optimizer=COUNTS,
    repeats_batch=st.booleans(),
    batch_parts=COUNTS,
    settings=st.lists(REALS, max_size=5).map(tuple),
    without_gradient=st.lists(COUNTS, max_size=5).map(tuple),
    schedule_rate=REALS,
)
ORIGINS = st.builds(PushOrigin, COUNTS, COUNTS, COUNTS, st.none() | COUNTS)


@given(HEADS, ORIGINS)
def test_a_message_gives_back_what_was_written_into_it(head, origin):
    message = pb.Push()
    push_head.head_to_message(head, message)
    push_head.origin_to_message(origin, message)
    received = pb.Push.FromString(message.SerializeToString())
    assert push_head.head_from_message(received) == head
    assert push_head.origin_from_message(received) == origin
    rate = head.schedule_rate if head.learning_rate is None else head.learning_rate
    assert received.learning_rate == rate


def test_every_number_of_a_head_is_in_the_message():
    """A head of numbers other than the defaults loses none of them."""
    default = PushHead(learning_rate=0.5)
    for field in dataclasses.fields(PushHead):
        changed = 2.0 if field.name in ("learning_rate", "loss_scale", "loss") else 1
        changed = (1,) if field.name in ("settings", "without_gradient") else changed
        head = dataclasses.replace(default, **{field.name: changed})
        if field.compare:
            message = pb.Push()
            push_head.head_to_message(head, message)
            assert push_head.head_from_message(message) == head != default, field.name


def test_the_defaults_are_those_of_an_empty_message():
    """A field that the sender does not know has the meaning of a head without it."""
    assert push_head.head_from_message(pb.Push()) == PushHead()
    assert push_head.origin_from_message(pb.Push()) == PushOrigin()
    message = pb.Push()
    push_head.head_to_message(PushHead(), message)
    push_head.origin_to_message(PushOrigin(), message)
    assert message.SerializeToString() == b""


@pytest.mark.parametrize("kind", Kind)
def test_each_kind_has_a_number(kind):
    message = pb.Push()
    push_head.kind_to_message(kind, message)
    assert push_head.kind_from_message(message) is kind


def test_a_kind_of_a_later_version_is_none():
    message = pb.Push.FromString(b"\x30\x4d")  # field 6 is 77
    assert message.kind == 77 and push_head.kind_from_message(message) is None


def test_a_loss_that_is_no_number_stays_one():
    message = pb.Push(loss=math.nan)
    assert math.isnan(push_head.head_from_message(message).loss)
