"""A worker's decisions with the state server's answers, and without answers."""

from thinwire.proto import thinwire_pb2 as pb
from thinwire.worker.client.pacing_client import PacingState


def answer(local_steps, ready=True):
    return pb.Answer(step=1, local_steps=local_steps, ready=ready)


def test_without_the_state_server_a_round_has_as_many_steps_as_the_one_before():
    state = PacingState()
    assert not state.decide(2, answer(2, ready=False), 0.1)
    assert state.decide(3, answer(3), 0.1)
    for _ in range(3):  # it stays away
        decisions = [state.decide(steps, None, 0.0, is_away=True) for steps in (1, 2, 3)]
        assert decisions == [False, False, True]
    assert not state.decide(3, None, 0.0), "it is there, and has not answered"


def test_only_the_answer_to_the_present_query_says_how_long_one_takes():
    state = PacingState()
    state.decide(3, answer(2), 9.0)  # an earlier "push" of this round
    assert state.query(1, 2, 1, 0.5).query_seconds == 0.0
    state.decide(3, answer(3), 0.25)
    assert state.query(1, 2, 1, 0.5).query_seconds == 0.25
