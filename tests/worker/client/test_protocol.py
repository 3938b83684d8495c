"""A worker's protocol with one shard: each state, each message, and any order of messages."""

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from thinwire.ops.push_head import PushHead, PushOrigin
from thinwire.ops.types import Kind
from thinwire.proto import thinwire_pb2 as pb
from thinwire.worker.client.protocol import (
    TRANSITIONS,
    Answered,
    Ended,
    NewestEpoch,
    Rejoin,
    Replied,
    Send,
    ShardProtocol,
    State,
    Trigger,
    WaitUntil,
)
from thinwire.worker.core.messages import PushRequest

STEP, LIFE, NOW = 4, 7, 100.0


def push(step=STEP):
    return PushRequest(PushHead(step, 1, 1, 0.0), [PushOrigin()], Kind.GRADIENT, [()])


def welcome(epoch=3, incarnation=LIFE):
    return pb.ToClient(welcome=pb.Welcome(incarnation=incarnation, epoch=epoch))


def reply(step=STEP, epoch=3):
    return pb.ToClient(reply=pb.Reply(step=step, epoch=epoch, version=9))


def refusal(reason, step=STEP, **fields):
    return pb.ToClient(refusal=pb.Refusal(reason=reason, step=step, message="no", **fields))


def answer(step=STEP, local_steps=2, ready=False):
    return pb.ToClient(answer=pb.Answer(step=step, local_steps=local_steps, ready=ready))


def halt(cause="iter_max"):
    return pb.ToClient(halt=pb.Halt(cause=cause))


def query(step=STEP, local_steps=2):
    return pb.Query(step=step, local_steps=local_steps)


NOT_MEMBER = refusal(pb.REASON_NOT_MEMBER)
QUARANTINED = refusal(pb.REASON_QUARANTINED, retry_after_seconds=5.0)


def fresh(shard=0):
    return ShardProtocol(shard, NewestEpoch())


def joined(shard=0):
    protocol = fresh(shard)
    protocol.join()
    assert protocol.receive(welcome(), NOW) == []
    return protocol


def requesting(shard=0):
    protocol = joined(shard)
    assert kinds(protocol.push(push())) == [Send]
    return protocol


def in_state(state, shard=0):
    """Return a protocol in a state, with a push open where the state allows it."""
    if state is State.CLOSED:
        protocol = requesting(shard)
        protocol.lost()
    elif state is State.JOINING:
        protocol = in_state(State.CLOSED, shard)
        protocol.join()
    elif state is State.READY:
        protocol = joined(shard)
    else:
        protocol = requesting(shard)
        if state is State.QUARANTINED:
            protocol.receive(QUARANTINED, NOW)
        elif state is State.EXPELLED:
            protocol.receive(NOT_MEMBER, NOW)
        elif state is State.ENDED:
            protocol.receive(refusal(pb.REASON_MALFORMED), NOW)
    assert protocol.state is state
    return protocol


def kinds(actions):
    return [type(action) for action in actions]


#: Effect of each message in each state: the next state, and the kinds of actions.
_SAME = None, []
_S = State
EVERY_MESSAGE = {
    "welcome": (welcome(), {_S.JOINING: (_S.REQUESTING, [Send])}),
    "its reply": (
        reply(),
        {
            _S.JOINING: (None, [Replied]),
            _S.REQUESTING: (_S.READY, [Replied]),
            _S.QUARANTINED: (None, [Replied]),
            _S.EXPELLED: (None, [Replied]),
        },
    ),
    "another reply": (reply(STEP - 1), {}),
    "answer": (answer(), {}),
    "halt": (halt(), {_S.QUARANTINED: (_S.ENDED, [Ended])}),
    "waiting": (pb.ToClient(waiting=pb.Waiting()), {}),
    "nothing": (pb.ToClient(), {}),
    "chunk": (pb.ToClient(chunk=pb.Chunk(data=b"x")), {}),
    "expulsion": (
        NOT_MEMBER,
        {state: (_S.EXPELLED, [Rejoin]) for state in (_S.JOINING, _S.READY, _S.REQUESTING)}
        | {_S.QUARANTINED: (_S.EXPELLED, [Rejoin])},
    ),
    "quarantine": (
        QUARANTINED,
        {state: (_S.QUARANTINED, [WaitUntil]) for state in (_S.JOINING, _S.READY, _S.REQUESTING)}
        | {_S.QUARANTINED: (None, [WaitUntil])},
    ),
    "stale epoch": (refusal(pb.REASON_STALE_EPOCH, epoch=8), {_S.REQUESTING: (None, [Send])}),
    "stale generation": (
        refusal(pb.REASON_STALE_GENERATION),
        {_S.REQUESTING: (None, [Send])},
    ),
    "outlier": (refusal(pb.REASON_OUTLIER), {_S.REQUESTING: (None, [Send])}),
    "not finite": (
        refusal(pb.REASON_NON_FINITE),
        {
            _S.JOINING: (None, [Replied]),
            _S.REQUESTING: (_S.READY, [Replied]),
            _S.QUARANTINED: (None, [Replied]),
            _S.EXPELLED: (None, [Replied]),
        },
    ),
    "malformed": (
        refusal(pb.REASON_MALFORMED),
        {
            state: (_S.ENDED, [Ended])
            for state in (_S.JOINING, _S.REQUESTING, _S.QUARANTINED, _S.EXPELLED)
        },
    ),
    "of an older push": (refusal(pb.REASON_OUTLIER, step=STEP - 1), {}),
    "limit": (refusal(pb.REASON_LIMIT, step=0), {_S.JOINING: (_S.ENDED, [Ended])}),
    "starting": (
        refusal(pb.REASON_STARTING, step=0),
        {_S.JOINING: (_S.QUARANTINED, [WaitUntil])},
    ),
    "id taken for now": (
        refusal(pb.REASON_ID_TAKEN, step=0, retry_after_seconds=3.0),
        {_S.JOINING: (_S.QUARANTINED, [WaitUntil])},
    ),
    "id taken": (refusal(pb.REASON_ID_TAKEN, step=0), {_S.JOINING: (_S.ENDED, [Ended])}),
    "a reason of a later version": (
        refusal(77),
        {
            state: (_S.ENDED, [Ended])
            for state in (_S.JOINING, _S.REQUESTING, _S.QUARANTINED, _S.EXPELLED)
        },
    ),
}


@pytest.mark.parametrize(("state", "name"), list(itertools.product(State, EVERY_MESSAGE)), ids=str)
def test_every_message_in_every_state(state, name):
    message, expected = EVERY_MESSAGE[name]
    protocol = in_state(state)
    actions = protocol.receive(message, NOW)
    following, expected_kinds = expected.get(state, _SAME)
    assert kinds(actions) == expected_kinds
    assert protocol.state is (following or state)


@pytest.mark.parametrize("state", State)
def test_a_lost_stream_in_every_state(state):
    protocol = in_state(state)
    actions = protocol.lost()
    if state is State.ENDED:
        assert (actions, protocol.state) == ([], State.ENDED)
        return
    assert actions == ([] if state is State.READY else [Rejoin(Trigger.LOST)])
    assert protocol.state is (State.EXPELLED if state is State.EXPELLED else State.CLOSED)


@pytest.mark.parametrize("state", State)
def test_a_transition_table_without_dead_ends(state):
    """From every state, a Welcome or the end can be reached."""
    reached, before = {state}, set()
    while reached != before:
        before = set(reached)
        reached |= {target for each in before for target in TRANSITIONS[each].values()}
    assert State.ENDED in reached
    assert state is State.ENDED or State.READY in reached


def test_a_retry_is_the_same_push():
    protocol = requesting()
    again = []
    for message in (refusal(pb.REASON_STALE_EPOCH, epoch=8), None, NOT_MEMBER):
        actions = protocol.lost() if message is None else protocol.receive(message, NOW)
        if Rejoin in kinds(actions):
            protocol.join()
            actions = protocol.receive(welcome(epoch=8, incarnation=99), NOW)
        again += actions
    assert again == [Send(push(), LIFE, 8)] * 3


def test_a_push_opened_without_a_stream_is_sent_on_the_next():
    protocol = joined()
    protocol.lost()
    assert protocol.push(push()) == [Rejoin(Trigger.LOST)]
    protocol.join()
    assert protocol.receive(welcome(), NOW) == [Send(push(), LIFE, 3)]


def test_a_quarantine_ends_with_a_hello():
    protocol = requesting()
    assert protocol.receive(QUARANTINED, NOW) == [WaitUntil(105.0)]
    assert protocol.tick(104.9) == []
    assert protocol.tick(105.0) == [Rejoin(Trigger.QUARANTINE)]
    protocol.join()
    assert protocol.receive(welcome(), 106.0) == [Send(push(), LIFE, 3)]


def test_a_push_waits_for_the_end_of_a_quarantine():
    protocol = joined()
    protocol.receive(refusal(pb.REASON_QUARANTINED, step=0, retry_after_seconds=5.0), NOW)
    assert protocol.push(push()) == [WaitUntil(105.0)]


def test_an_outlier_is_replaced_by_the_shard_s_model():
    protocol = requesting()
    assert protocol.receive(refusal(pb.REASON_OUTLIER), NOW) == [Send(pb.Pull(), LIFE, 3)]
    (replied,) = protocol.receive(reply(step=0), NOW)
    assert replied.is_outlier and protocol.step == 0
    protocol.push(push(5))
    (replied,) = protocol.receive(reply(step=5), NOW)
    assert not replied.is_outlier


def test_a_push_that_is_abandoned_becomes_a_pull():
    protocol = requesting()
    assert protocol.abandon_push() == [Send(pb.Pull(), LIFE, 3)]
    assert protocol.abandon_push() == []  # a pull is not abandoned
    assert protocol.receive(reply(), NOW) == []  # the reply to the push
    assert kinds(protocol.receive(reply(step=0), NOW)) == [Replied]


def test_the_end_of_the_run_is_for_shard_0_to_declare():
    first, second = requesting(0), requesting(1)
    for protocol in (first, second):
        assert protocol.receive(halt(), NOW) == []  # the push is still replied to
    assert first.lost() == [Ended("iter_max")]
    assert second.lost() == [Rejoin(Trigger.LOST)]
    assert first.push(push(9)) == [Ended("iter_max")]


def test_a_query_is_settled_by_its_answer_or_by_an_earlier_push():
    protocol = joined()
    assert kinds(protocol.query(query())) == [Send]
    assert protocol.receive(answer(local_steps=1), NOW) == []
    (answered,) = protocol.receive(answer(), NOW)
    assert answered.answer.local_steps == 2
    protocol.query(query(local_steps=3))
    (answered,) = protocol.receive(answer(ready=True), NOW)
    assert answered.answer.ready


def test_a_late_answer_to_push_settles_the_next_query_of_the_step():
    protocol = joined()
    protocol.query(query())
    protocol.cancel_query()
    assert protocol.receive(answer(ready=True), NOW) == []
    assert kinds(protocol.query(query(local_steps=3))) == [Send, Answered]
    assert kinds(protocol.query(query(step=STEP + 1))) == [Send]


def test_a_query_without_local_steps_is_not_answered():
    protocol = joined()
    assert kinds(protocol.query(query(local_steps=0))) == [Send]
    assert protocol.lost() == []
    assert protocol.query(query(local_steps=0)) == []


@pytest.mark.parametrize("how", ["lost", "expelled", "quarantined", "away"])
def test_a_query_is_settled_where_the_state_server_is_away(how):
    protocol = joined()
    if how == "away":
        protocol.lost()
    actions = protocol.query(query())
    if how == "lost":
        actions = protocol.lost()
    elif how != "away":
        actions = protocol.receive(NOT_MEMBER if how == "expelled" else QUARANTINED, NOW)
    assert Answered(None) in actions


def test_epochs_are_shared_and_never_go_back():
    epochs = NewestEpoch()
    first, second = ShardProtocol(0, epochs), ShardProtocol(1, epochs)
    for protocol, epoch in ((first, 5), (second, 4)):
        protocol.join()
        protocol.receive(welcome(epoch), NOW)
    assert second.push(push()) == [Send(push(), LIFE, 5)]


def test_what_a_driver_may_not_do():
    protocol = requesting()
    with pytest.raises(ValueError, match="step 5 .* step 4"):
        protocol.push(push(5))
    with pytest.raises(ValueError, match="JOIN .* REQUESTING"):
        protocol.join()


MESSAGES = st.one_of(
    st.builds(welcome, st.integers(0, 9), st.sampled_from([0, LIFE, 8])),
    st.builds(reply, st.integers(0, 5), st.integers(0, 9)),
    st.builds(answer, st.integers(0, 5), st.integers(0, 4), st.booleans()),
    st.builds(halt, st.sampled_from(["", "iter_max"])),
    st.builds(
        refusal,
        st.one_of(st.sampled_from(pb.Reason.values()), st.integers(0, 2**31 - 1)),
        st.integers(0, 5),
        epoch=st.integers(0, 9),
        retry_after_seconds=st.sampled_from([0.0, 5.0, -1.0, float("inf"), float("nan")]),
    ),
    st.sampled_from([pb.ToClient(), pb.ToClient(waiting=pb.Waiting())]),
)


class AnyOrder(RuleBasedStateMachine):
    """A correct driver, and a shard that sends any messages."""

    def __init__(self):
        super().__init__()
        self.protocol, self.now = fresh(), NOW
        self.open = None  # the push that is neither settled nor replaced by a pull
        self.incarnation = 0
        self.waits = False  # a WaitUntil or a Rejoin has been returned since the last Hello
        self.next_step = 1

    def take(self, actions, abandons=False):
        for action in actions:
            match action:
                case Send(request=PushRequest(head=PushHead(step=step)), incarnation=incarnation):
                    assert self.open is not None and step == self.open.head.step
                    assert self.incarnation in (0, incarnation)
                    self.incarnation = incarnation
                case Send(request=pb.Pull()):
                    # Only a refusal that names the push, or the driver, replaces it by a pull.
                    self.open = None
                case Replied() | Ended():
                    self.open = None
                case Rejoin() | WaitUntil():
                    self.waits = True

    @rule(message=MESSAGES)
    def receive(self, message):
        before, was_open = self.protocol.is_requesting, self.protocol.step
        actions = self.protocol.receive(message, self.now)
        if before and not self.protocol.is_requesting:
            settled = [each for each in actions if isinstance(each, Replied | Ended)]
            assert len(settled) == 1
            if isinstance(settled[0], Replied) and settled[0].reply is not None:
                assert settled[0].reply.step == was_open
        if self.open is not None and self.protocol.is_requesting and not self.protocol.step:
            assert message.refusal.reason in (pb.REASON_OUTLIER, pb.REASON_STALE_GENERATION)
            self.open = None
        self.take(actions)

    @rule()
    def lose(self):
        self.take(self.protocol.lost())

    @rule(seconds=st.sampled_from([0.0, 1.0, 10.0]))
    def pass_time(self, seconds):
        self.now += seconds
        self.take(self.protocol.tick(self.now))

    @precondition(lambda self: self.protocol.state in (State.CLOSED, State.EXPELLED))
    @rule()
    def join(self):
        self.waits = False
        self.protocol.join()

    @precondition(lambda self: not self.protocol.is_requesting)
    @rule(pulls=st.booleans())
    def request(self, pulls):
        if pulls:
            self.take(self.protocol.pull())
            return
        self.open = push(self.next_step) if self.protocol.state is not State.ENDED else None
        self.next_step += 1
        self.take(self.protocol.push(self.open or push()))

    @rule()
    def abandon(self):
        self.open = None
        self.take(self.protocol.abandon_push())

    @rule(local_steps=st.integers(0, 4), step=st.integers(0, 5))
    def query(self, local_steps, step):
        self.take(self.protocol.query(query(step, local_steps)))

    @invariant()
    def an_open_push_is_kept(self):
        if self.open is not None:
            assert self.protocol.is_requesting and self.protocol.step == self.open.head.step

    @invariant()
    def something_leads_on(self):
        """A worker that waits for a reply is on a stream, or knows how to open one."""
        if self.protocol.is_requesting:
            state = self.protocol.state
            assert state in (State.REQUESTING, State.JOINING) or self.waits
            assert state not in (State.READY, State.ENDED)


AnyOrder.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestAnyOrder = AnyOrder.TestCase
